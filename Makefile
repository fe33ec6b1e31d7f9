# `make` lists the targets. Everything runs in .venv, which is made on first use; only Python 3.11 or newer is needed.
# PYTHON=/path/to/python makes .venv from that one.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: .venv bench bench-layouts bench-learning bench-logs bench-readers bench-verbs check clean crash-test demo help lint peers test types

BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv-tf-agents
TORCH := .venv-torch

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(STAMP) ## Make .venv with everything installed; again when pyproject.toml changes

peers: $(PEERS)/.installed $(TORCH)/.installed ## Make .venv-tf-agents and .venv-torch, where tests run beside the real ones

demo: $(STAMP) ## Collect to disk, get killed, go on, train offline, evaluate
	$(BIN)/python examples/demo.py

test: $(STAMP) $(PEERS)/.installed $(TORCH)/.installed ## Run the test suite and the docstring examples
	$(BIN)/python -m pytest

# Tests that have a long form, as far as they are there.
CRASH_TESTS := $(wildcard $(patsubst %,tests/test_%.py,crash crash_lines power_cut_pages processes hygiene))

crash-test: $(STAMP) ## Kill writers at more than a thousand moments, with readers beside them; minutes
	DISKBUF_CRASH_TEST=long $(BIN)/python -m pytest $(CRASH_TESTS)

lint: $(STAMP) ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## Check types
	$(BIN)/python -m mypy

check: test lint types ## All three: test, lint, types

bench: $(STAMP) ## Measure speed against plain NumPy and plain files
	$(BIN)/python tools/bench/bench.py

bench-readers: $(STAMP) $(PEERS)/.installed ## Measure the readers beside TF-Agents; a quarter of an hour
	$(PEERS)/bin/python tools/bench/readers.py

bench-logs: $(STAMP) ## Measure off-policy evaluation of ten million logged rows, and importing logs; minutes
	$(BIN)/python tools/bench/off_policy.py
	$(BIN)/python tools/bench/log_import.py

bench-layouts: $(STAMP) ## Measure the layouts beside raw files, TensorStore and plain requests; minutes
	$(BIN)/python tools/bench/layouts.py
	$(BIN)/python tools/bench/copying.py

bench-verbs: $(STAMP) ## Measure the command line, each verb as a whole command; minutes
	$(BIN)/python tools/bench/verbs.py

bench-learning: $(STAMP) $(PEERS)/.installed ## Measure collecting and training beside TF-Agents; minutes
	$(PEERS)/bin/python tools/bench/learning.py

clean: ## Remove .venv, caches and builds; stores under runs/ stay
	rm -rf .venv $(PEERS) $(TORCH) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# TF-Agents' pins clash with ours, so it has an environment of its own; that sees TensorFlow and diskbuf in .venv.
$(PEERS)/.installed: tests/peers/tf_agents.txt $(STAMP)
	@echo 'Making $(PEERS) with TF-Agents (half a minute)'
	@$(BIN)/python -m venv --clear $(PEERS)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$where")')" \
	    > "$$($(PEERS)/bin/python -c "$$where")/_diskbuf_venv.pth"
	@keras=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("tensorflow").rpartition(".")[0])'); \
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps \
	    -r tests/peers/tf_agents.txt "tf-keras==$$keras.*"
	@touch $@
	@echo 'Ready: $(PEERS)'

# Torch is large, so it too has an environment of its own. Where pip would fetch a build for CUDA, of gigabytes, call
# make with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(TORCH)/.installed: tests/peers/torch.txt $(STAMP)
	@echo 'Making $(TORCH) with PyTorch (a minute)'
	@$(BIN)/python -m venv --clear $(TORCH)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$where")')" \
	    > "$$($(TORCH)/bin/python -c "$$where")/_diskbuf_venv.pth"
	@$(TORCH)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet -r tests/peers/torch.txt
	@touch $@
	@echo 'Ready: $(TORCH)'

# The first Python that starts and is new enough; PYTHON, when given, is the only candidate.
$(STAMP): pyproject.toml
	@python=; \
	for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'make: diskbuf needs Python 3.11 or newer, found none$(if $(PYTHON), at $(PYTHON)).' \
	         'Install it (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python' >&2; \
	    exit 1; \
	fi; \
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "make: this Python $$version has no venv module." \
	         "Install it (Debian, Ubuntu: apt install python$$version-venv)" >&2; \
	    exit 1; \
	fi; \
	echo "Making .venv with Python $$version"; \
	$(BIN)/python -c '' 2>/dev/null || "$$python" -m venv --clear .venv; \
	echo 'Installing diskbuf and what it needs into .venv (one to several minutes)'; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[test,plot]' \
	    | sed -n -e 's/^Collecting /  /p' -e 's/^Installing collected packages.*/Unpacking/p'; \
	touch $@; \
	echo 'Ready: .venv'

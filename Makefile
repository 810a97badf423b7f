# Two commands do everything on a machine with Python 3.11+ and make: `make run` and `make test`.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors are still printed; warnings about the user's own pip settings are not.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help run test docs deployment format clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.run-installed  ## install into .venv, repeat the paper's Figure 1 and write a report about it
	@echo "Repeating the paper's Figure 1: 6 settings with 5 seeds each, less than a minute."
	@$(BIN)/aipod compare synthetic --out runs/demo --force
	@$(BIN)/aipod report runs/demo

test: $(VENV)/.test-installed  ## install into .venv, then lint, check types, build the documents and run every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy aipod
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -n $(WORKERS)

docs: $(VENV)/.test-installed  ## build the documentation; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html; it needs no server."

deployment: $(VENV)/.test-installed  ## start a real federation on Flower and kill parts of it: some minutes
	$(BIN)/python -m pytest -n 0 -m deployment -s tests/flower/test_flower_deployment.py

format: $(VENV)/.test-installed  ## sort imports, apply safe lint fixes and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find aipod tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps live inside .venv, so that deleting .venv by hand also forgets the installs.
$(VENV)/.run-installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing aipod[experiments] into $(VENV); the first time takes a minute or two."
	@$(PIP) install -c constraints.txt -e '.[experiments]'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing aipod[dev,docs,experiments,flower,tensorboard] into $(VENV); the first time takes a minute or two."
	@$(PIP) install -c constraints.txt -e '.[dev,docs,experiments,flower,tensorboard]'
	@touch $@

# A stamp rather than .venv/bin/python: an interrupted creation leaves the latter without pip.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "aipod needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there); try: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

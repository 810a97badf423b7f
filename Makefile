# Two commands do everything on a machine with Python 3.11+ and make: `make run` and `make test`.

PYTHON ?= python3
WORKERS ?= 2
# The versions to install. `make test CONSTRAINTS=` in a fresh clone takes the newest of everything.
CONSTRAINTS ?= constraints.txt
# The interpreters that `make installs` tries.
PYTHONS ?= $(BIN)/python

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors are still printed; warnings about the user's own pip settings are not.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
INSTALL := $(PIP) install $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e

.DEFAULT_GOAL := help
.PHONY: help run test docs notebooks claims deployment installs format clean

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

notebooks:  ## make docs/notebooks from the guides
	@$(PYTHON) docs/notebooks.py

claims: $(VENV)/.test-installed  ## measure what the documents claim; LONG=--long measures the studies too
	@$(BIN)/python benchmarks/claims.py $(LONG)

docs: $(VENV)/.test-installed  ## build the documentation; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html; it needs no server."

deployment: $(VENV)/.test-installed  ## start a real federation on Flower and kill parts of it: some minutes
	$(BIN)/python -m pytest -n 0 -m deployment -s tests/flower/test_flower_deployment.py

installs: $(VENV)/.test-installed  ## install the wheel into clean environments, oldest and newest versions: half an hour
	$(BIN)/python .ci/installs.py --python $(PYTHONS)

format: $(VENV)/.test-installed  ## sort imports, apply safe lint fixes and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find aipod tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps live inside .venv, so that deleting .venv by hand also forgets the installs.
$(VENV)/.run-installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing aipod and what its experiments need into $(VENV); the first time takes a minute or two."
	@$(INSTALL) '.[experiments]'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing aipod with all its extras into $(VENV); the first time takes a minute or two."
	@$(INSTALL) '.[dev,docs,experiments,flower,tables,tensorboard]'
	@touch $@

# A stamp rather than .venv/bin/python: an interrupted creation leaves the latter without pip.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "aipod needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there); try: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup test lint demo check-slow bench clean

setup: $(READY)

# torch comes by pip alone: other installers fetch gigabytes that a CPU has no use for.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "adumbra needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=24'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: setup lint
	$(BIN)/python -m pytest -n auto -m 'not slow'

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports

check-slow: setup
	$(BIN)/python -m pytest -n auto -m slow

# A generated log becomes a store; four methods train on it; a table and a picture compare them.
demo: setup
	rm -rf demo
	$(BIN)/adumbra demo --out demo

bench: setup
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV) demo build *.egg-info src/*.egg-info

# Every target sets up all it needs: `git clone`, `make test`, nothing by hand.
#   make PYTHON=python3.12 test    uses another interpreter for the first set-up

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types bench clean

help:  ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

# Redone only when what is to be installed changes. Our own build runs without isolation, so that the setuptools it
# uses is the pinned one too.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once; a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt setuptools
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## a virtual environment with everything, at the pinned versions

demo: $(STAMP)  ## what the library does, shown
	$(BIN)/python -m monoidreduce demo

# Two workers with one thread each: torch's own threads would fight over the cores.
test: lint types  ## lint, types, unit tests, the examples in docstrings and in the README
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests/interpret
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" tests/ranks  # eight processes of its own

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

bench: $(STAMP)  ## measure on this machine's CPU
	$(BIN)/python -m benchmarks.cpu

clean:  ## remove everything made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

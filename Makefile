# Every target sets up all it needs: `git clone`, `make test`, nothing by hand.
#   make PYTHON=python3.12 test    uses another interpreter for the first set-up

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PEER   := $(VENV)/.transformers-tests

MAKEFLAGS += -j3  # types are checked while the site is built and the first tests run

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-interpret test-ranks slow lint types docs docs-serve bench size release-check clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

# Redone only when what is to be installed changes. Our own build runs without isolation, so that the setuptools it
# uses is the pinned one too. Byte code is left to the first import: most of the twenty thousand files are never imported.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch and about a hundred packages, once. This takes two to five minutes; pip tells how far it is."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt setuptools
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	@echo "$(VENV) is ready."
	@touch $@

$(PEER): $(STAMP)
	@$(BIN)/python -m tests.support.transformers_test_classes || echo "transformers' test class could not be downloaded: tests with it are skipped."
	@touch $@

setup: $(STAMP) $(PEER)  ## a virtual environment with everything, at the pinned versions

demo: $(STAMP)  ## what the library does, shown
	$(BIN)/python -m monoidreduce demo

# Compiled modules are kept: the tests start a hundred processes.
unexport PYTHONDONTWRITEBYTECODE

test: lint types test-ranks  ## lint, types, the site, unit tests, the examples in docstrings and on every page

# One after the other, from here up. Two workers with one thread each: torch's own threads would fight over the cores.
# A test of ranks has up to eight processes of its own, which often wait for each other.
test-ranks: test-interpret
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 -m "not slow" tests/ranks

test-interpret: test-unit
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests/interpret

test-unit: lint docs $(PEER)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

slow: $(STAMP) $(PEER)  ## what `make test` leaves out: the longest tests, and the other cases of those that it samples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m slow tests/interpret
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 -m slow tests/ranks

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy
	$(BIN)/mypy

# Warnings are errors (mkdocs.yml), but not with --quiet, which hides and does not count them. The variable silences an
# advertisement of mkdocs-material's successor.
docs: $(STAMP)  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(STAMP)  ## the site on a local port, rebuilt as you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(STAMP)  ## measure on this machine's CPU
	$(BIN)/python -m benchmarks.cpu

size: $(STAMP)  ## files and lines by package
	@$(BIN)/python -m docs.size

release-check: $(STAMP)  ## wheel and sdist, installed into fresh environments without and with Triton, and tried there
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[release]' --no-build-isolation
	$(BIN)/python -m tests.release.check

clean:  ## remove everything made
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

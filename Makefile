# make demo     train, decode and compare on a generated task (minutes on a laptop); DEMO_SYSTEM=bi-rnmt: with LSTMs
# make test     run the tests
# make lint     ruff: rules and format
# make types    mypy, strict
# make clean    remove .venv and caches; the demo's results stay
#
# Each target first installs what it needs into .venv, and only when pyproject.toml or constraints.txt changed.
#     PYTHON=python3.12       the interpreter to build it from (3.11 or newer)
#     PIP_ARGS="..."          further arguments of pip install, for instance an index of CPU builds of torch
#     VENV=folder             another place than .venv

PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
DEMO_SYSTEM ?= bift
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(STAMP)
	@$(BIN)/bothways demo --system $(DEMO_SYSTEM)

test: $(STAMP)
	@$(BIN)/pytest $(PYTEST_ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find bothways tests -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(STAMP)

# Torch alone and first: with it in place nothing that follows can bring in another build of it.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
	    echo "bothways needs Python 3.11 or newer, but there is no '$(PYTHON)'; name one: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    "bothways needs Python 3.11 or newer, but $(PYTHON) is %d.%d.%d; name another: make PYTHON=python3.11 ..." % v[:3])'
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) (the largest part; minutes on a slow connection)"
	@$(PIP) $(PIP_ARGS) -c constraints.txt $(TORCH)
	@echo "Installing bothways and its tools"
	@$(PIP) $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Ready: $(VENV)"

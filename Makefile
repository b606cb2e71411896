# autopar's commands. Each sets up `.venv` itself, once; nothing here needs root.
#
#   make demo    train a small Llama on four local processes and show what the compiler made of it
#   make test    lint, kernels (compiled for GPUs), then the tiers: unit, proofs (whole models), browser, dist (gloo)
#   make lint    ruff, mypy, pyright, import rules, wheel contents: what CI and pre-commit run
#   make clean   remove what the others made
#
# PYTHON=/path/to/python3.12 chooses the interpreter, TORCH_INSTALL_OPTIONS adds options to pip
# (`--index-url …` for a CPU build of torch).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test kernels unit proofs browser dist gpu lint format clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.autopar-installed
WORKERS ?= 2
# Ranks wait for one another, and for planning: more of them than cores keep the cores busy.
DIST_WORKERS ?= 3
PYTEST_OPTIONS ?=

# Tests and tools never ask a hub for anything, and processes do not fight over two cores.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each tier has several processes that import the same files: what Python made of them is kept.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n '3,6s/^# *//p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)
	@$(BIN)/autopar demo

# Each tier prints pytest's own closing line; the dist tier's is the last one.
test: lint kernels unit proofs browser dist

# Triton's compiler needs no GPU; where there is no Triton there is nothing to compile.
kernels: $(STAMP)
	@if $(BIN)/python -c 'import triton' 2> /dev/null; \
	  then env -u TRITON_INTERPRET $(BIN)/python -m autopar.runtime.kernels.aot --usual --workers $(WORKERS); \
	  else echo "kernels: not compiled, no Triton for this platform"; fi

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m "not slow and not moderate" -n $(WORKERS) --dist worksteal $(PYTEST_OPTIONS)

proofs: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m "slow or moderate" -n $(WORKERS) --dist worksteal $(PYTEST_OPTIONS)

# Reports are opened in Chromium or Chrome where one is installed; without one these tests are skipped and say so.
browser: $(STAMP)
	$(BIN)/python -m pytest tests/browser -n $(WORKERS) --dist loadfile $(PYTEST_OPTIONS)

dist: $(STAMP)
	$(BIN)/python -m pytest tests/dist -n $(DIST_WORKERS) --dist worksteal $(PYTEST_OPTIONS)

gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_OPTIONS)

# Pyright takes as long as the others together, and beside them; what each finds is printed.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright & pyright=$$!; found=0; \
	  { $(BIN)/python .ci/check_imports.py && $(BIN)/python .ci/check_wheel.py && $(BIN)/mypy; } || found=1; \
	  wait $$pyright && exit $$found

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info autopar_demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The editable install is redone when what it depends on changes.
$(STAMP): pyproject.toml constraints.txt
	@python=$$(.ci/find_python) && \
	  if [ ! -x $(BIN)/python ]; then echo "Creating $(VENV) with $$python"; "$$python" -m venv $(VENV); fi
	@echo "Installing autopar and its tools into $(VENV) (the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet $(TORCH_INSTALL_OPTIONS) --constraint constraints.txt --editable '.[hf,dev]'
	@touch $@

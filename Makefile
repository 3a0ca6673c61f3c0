# Everything a person or CI runs. Each target does its own set-up on a fresh machine; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
# In one process (WORKERS=0) tests are easier to debug, and take half as long again.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-faults test-soak test-emulated emulator lint bench wheels clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup:  ## make or refresh .venv (first time: about 3 minutes and 4 GB; later: a moment)
	@$(PYTHON) scripts/setup_cpu.py --venv $(VENV)

ON_EMULATOR := $(filter --ascend,$(ARGS))
demo: setup $(if $(ON_EMULATOR),emulator)  ## run the demonstration on this machine's CPU (ARGS=--ascend: on an emulated NPU)
	@$(if $(ON_EMULATOR),build/emulator/venv/bin/python -m vllm_kvoffload.cli.main,$(BIN)/kvoffload) demo $(ARGS)

test: setup  ## all tests, also those that start vLLM engines (ARGS="-k name" chooses)
	@$(PYTEST) $(ARGS)

test-fast: setup  ## the tests that take seconds
	@$(PYTEST) -m "not slow" $(ARGS)

test-faults: setup  ## every fault on real prefill, decode and proxy processes, and the matrix of them
	@$(BIN)/python -m tests.faults $(ARGS)

test-soak: setup  ## an hour of load, kills, freezes and strangers (ARGS="--minutes 10" for less; report in build/soak)
	@$(BIN)/python -m tests.soak $(ARGS)

emulator: setup  ## an emulated NPU with vllm-ascend in build/emulator, for tests/emulated (3 minutes, 0.8 GB)
	@$(BIN)/python tools/npu_emulator/install.py --venv build/emulator/venv --base $(BIN)/python

test-emulated: emulator  ## whole vllm-ascend engines on the emulated NPU: 30 engines, 15 minutes or more (ARGS="-k name" chooses)
	@$(BIN)/python -m pytest tests/emulated -n 0 -v --durations=0 $(ARGS)

lint: setup  ## ruff's checks and formatting, and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy scripts
	@MYPYPATH=tools/npu_emulator $(BIN)/mypy --explicit-package-bases tools/npu_emulator

bench: setup  ## the benchmarks (ARGS="--help" shows what can be chosen)
	@$(BIN)/python -m benchmarks $(ARGS)

wheels:  ## wheels for x86-64 and aarch64 in dist/wheels (needs pipx, Docker, and for the other architecture QEMU)
	@pipx run cibuildwheel --platform linux --archs x86_64,aarch64 --output-dir dist/wheels

clean:  ## remove build products and caches ($(VENV) stays: rm -rf it to start from nothing)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

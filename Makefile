# setup run test test-long soak lint bench bench-broadcast. Each target makes the environment first where it is missing.
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: setup run test test-long soak lint bench bench-broadcast docs

setup:
	@bash scripts/setup.sh

# torchrun sets it to 1 anyway, and says so at length; the ranks divide the cores themselves
run: export OMP_NUM_THREADS ?= 1
run: setup
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m tp_runtime.launch decode --model smollm2 \
	    --enable-dynamic-decode-backend --prompt "What is the capital of France?" --max-tokens 32

# Unit tests share nothing and run side by side; rank tests start processes of their own, one test at a time.
test: setup
	$(BIN)/pytest -q -n auto -m "not long and not gpu" tests/unit
	$(BIN)/pytest -q -n 0 -m "not long and not gpu" tests/ranks

test-long: setup
	$(BIN)/pytest -q -n 0 -m "long and not gpu" tests/unit tests/ranks

# The channel for long: joins, kills, messages, gaps, hostile ranks. SHORT=1: in under two minutes.
soak: setup
	$(BIN)/pytest -q -n 0 -s $(if $(SHORT),-m "not long") tests/ranks/test_broadcast_soak.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/cpu_decode.py
	$(BIN)/python benchmarks/selection_rules.py

bench-broadcast: setup
	$(BIN)/python benchmarks/broadcast

docs: setup
	$(BIN)/python -m tp_runtime.launch.configuration > docs/configuration.md

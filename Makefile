# Everything runs in .venv, which the first target makes. Use another interpreter with `make PYTHON=python3.12 ...`.
PYTHON ?= python3
BIN := .venv/bin

# Schedules of `make chaos`; with SEED=123 that one alone, and what it does.
SEEDS ?= 200

.PHONY: demo demo-serve test test-slow chaos lint bench bench-check clean

## Install, fetch the small model, and stream an answer of it through an engine-core process.
demo: .venv/demo
	$(BIN)/outboard models pull smollm2-135m
	$(BIN)/outboard generate "Write one sentence about the sea." --chat

# Hundreds of tests start, stop and kill real processes against a clock; on a busy machine one may come too late. It is
# tried again, and the summary says so (R); make RERUNS=0 test does without.
RERUNS ?= 2

# They start thousands of processes; where Python may not write bytecode, each would compile all that it imports.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

## Install, serve the small model, and ask it something with curl.
demo-serve: .venv/serve
	$(BIN)/outboard models pull smollm2-135m
	BIN=$(BIN) bash examples/ask_server.sh

## Install, lint, type-check, run all tests.
test: .venv/dev lint
	$(PYTEST) --numprocesses 2 --dist loadgroup --reruns $(RERUNS) -rR --cov --cov-report=term

## The tests that take minutes.
test-slow: .venv/dev
	$(PYTEST) -m slow

## Faults drawn from seeds against live traffic, and a table of what was survived; see tests/chaos.
chaos: .venv/dev
	PYTHONPATH=tests $(BIN)/python -m chaos $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## Streams, start-up and idle cost; see docs/architecture.md for what the figures mean.
bench: .venv/dev
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.idle

## Ratios against plain designs, in one run, that must not fall below their floors.
bench-check: .venv/dev
	$(BIN)/python -m benchmarks check

.venv/pip:
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[openvino]'
	touch $@

.venv/serve: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[openvino,serve,uvloop]'
	touch $@

.venv/dev: .venv/pip pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,openvino,ray,serve,traces,uvloop]'
	touch $@ .venv/demo .venv/serve

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage

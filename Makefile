# Each target is all the set-up a fresh machine with Python, make and git needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := fastac tests hunts examples benchmarks
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: train test test-slow test-versions soak check format benchmark peers gpu clean
.DELETE_ON_ERROR:

# Threads that wait must not spin: on a busy machine every step would wait for them.
train: $(VENV)/installed-train
	OMP_WAIT_POLICY=passive $(BIN)/python examples/train_wan.py $(ARGS)

# Tests use one thread each, so two run at a time on two cores.
test: $(VENV)/installed-dev $(VENV)/installed-backends
	$(PYTEST) -m "not slow and not soak" $(ARGS)

test-slow: $(VENV)/installed-dev $(VENV)/installed-backends
	$(PYTEST) -m "slow and not soak" $(ARGS)

# The oldest torch and the newest: an environment for each, kept in the cache folder of the user.
test-versions: $(VENV)/installed-dev
	$(BIN)/python -m hunts.versions $(ARGS)

# Before a release: random models, thousands of steps, real trainers, benchmarks.
soak: $(VENV)/installed-dev $(VENV)/installed-backends $(VENV)/installed-trainers
	$(PYTEST) -m soak $(ARGS)
	$(BIN)/python -m hunts.versions --all --write

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

benchmark: $(VENV)/installed-dev
	$(BIN)/python benchmarks/classification.py --check
	$(BIN)/python benchmarks/held_bytes.py --check
	$(BIN)/python benchmarks/host_time.py --check

# Beside other ways to checkpoint, one of which is a package of its own.
peers: $(VENV)/installed-peers
	$(BIN)/python benchmarks/peers.py $(ARGS)

# On a machine with a GPU, torch and the wheels that CONTRIBUTING.md lists, with its own Python: nothing is made or fetched.
# The tests have a quarter of the time, the benchmark what they leave, but half a minute to begin and to end.
gpu: MINUTES ?= 8
gpu:
	@start=$$(date +%s); \
	timeout -s INT -k 10 $$($(PYTHON) -c "print(15 * $(MINUTES))") $(PYTHON) -m pytest -m gpu $(ARGS); tests=$$?; \
	minutes=$$($(PYTHON) -c "print(round($(MINUTES) - 0.5 - ($$(date +%s) - $$start) / 60, 2))"); \
	$(PYTHON) benchmarks/gpu_wan.py --minutes $$minutes && exit $$tests

# What was trained or measured stays: only what make itself can make again goes.
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("the versions of constraints.txt need Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras: pip runs once, and again when what it was told to install changes.
$(VENV)/installed-train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(VENV)/installed-train $@

$(VENV)/installed-peers: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	touch $(VENV)/installed-train $@

# Real attention packages, for the tests alone. The stamp comes when none is missing: what could not be had is tried again.
$(VENV)/installed-backends: tests/backends/packages.py $(VENV)/installed-dev
	$(BIN)/python -m tests.backends.packages $(VENV)/backends --stamp $@

# And those of trainers that hunts/ alone trains.
$(VENV)/installed-trainers: tests/backends/packages.py $(VENV)/installed-dev
	$(BIN)/python -m tests.backends.packages $(VENV)/backends --hunts --stamp $@

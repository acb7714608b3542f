# `make help` lists the commands. Everything is set up in .venv, once; a changed pyproject.toml sets it up again.
PYTHON ?= python3
CONFIG ?= train_configs/debug.toml
# Overrides for `make train`, as on the command line: make train ARGS="--training.steps 4"
ARGS ?=
# Processes for `make train`: all GPUs where there are some, else 2 processes on the CPU.
NPROC ?=
# Arguments for pytest: make test TESTS="tests/test_metrics.py -x"
TESTS ?=

# Words of rows for `make parity`: only the rows that have one in their name; the page keeps the others.
ROWS ?=

VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train test test-all parity families faults check format clean
.NOTPARALLEL:

help:
	@echo "make train   set up $(VENV), then train $(CONFIG) (ARGS=\"--training.steps 4\", NPROC=4, CONFIG=x.toml)"
	@echo "make test    set up $(VENV), then run the tests (TESTS=\"tests/test_metrics.py -x\")"
	@echo "make test-all  the same, with those that take minutes"
	@echo "make parity  run the layout matrix against one process, write docs/parity.md (ROWS=\"tp4 offload\")"
	@echo "make families  compare every model family with transformers, write the table of docs/models.md"
	@echo "make faults  make every fault of a checkpoint happen, write the tables of docs/checkpoints.md"
	@echo "make check   formatting, lint and types"
	@echo "make format  rewrite the files as make check wants them"
	@echo "make clean   remove $(VENV), outputs and caches"

train: $(VENV)/.installed
	@nproc=$(NPROC); \
	if [ -z "$$nproc" ] && command -v nvidia-smi >/dev/null; then \
		nproc=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)'); \
	fi; \
	set -x; \
	exec $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node "$${nproc:-2}" \
		-m minititan.train --job.config_file $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev
	@echo "Running the tests"
	$(BIN)/python -m pytest $(TESTS)

test-all: $(VENV)/.installed-dev
	@echo "Running all tests, the long ones too"
	$(BIN)/python -m pytest -m "slow or not slow" $(TESTS)

parity: $(VENV)/.installed-dev
	@echo "Running the layout matrix$(if $(ROWS),: rows with $(ROWS) in their names,) (all of it: half an hour on 2 cores)"
	$(BIN)/python -m tests.distributed.parity $(ROWS)

families: $(VENV)/.installed-dev
	@echo "Comparing every model family with transformers (a minute)"
	$(BIN)/python -m tests.parity.families

faults: $(VENV)/.installed-dev
	@echo "Spoiling checkpoints, killing saves, loading every layout on every other (minutes)"
	$(BIN)/python -m tests.distributed.checkpoint_tables

check: $(VENV)/.installed-dev
	@echo "Checking formatting, lint and types"
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) outputs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find minititan tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# A half-made environment (interrupted set-up) is made again.
define venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
endef

$(VENV)/.installed: pyproject.toml
	$(venv)
	@echo "Installing minititan and what it needs into $(VENV) (once; PyTorch is a large download)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(venv)
	@echo "Installing minititan, what it needs and the development tools into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.installed $@

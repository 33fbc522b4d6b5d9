# make demo, make test: each does all its own set-up in .venv. Python 3.10 to 3.13; no GPU needed, one is used if present.
PYTHON ?= python3
# The CPU build of torch on a machine without a GPU comes from whichever index pip is configured for: see README, Install.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The supported Triton release that the tests don't run under: all kernels are compiled with it.
OTHER_TRITON := 3.7.1
OTHER_DIR := .triton-$(OTHER_TRITON)

.PHONY: help demo test test-gpu gate lint format wheel clean

help:
	@echo "make demo      a trained MoE model answers through Envoi: a table on the terminal, a picture in demo.png"
	@echo "make test      all tests (on a machine without a GPU: those that need none)"
	@echo "make test-gpu  the tests that need a GPU, and tests/gpu_evidence.json: which kernels they launched"
	@echo "make gate      accept the instruction counts of today's kernels: tests/sass/gate.json"
	@echo "make lint      ruff, pyright"
	@echo "make format    ruff format and the fixes that ruff is sure of"
	@echo "make wheel     build dist/*.whl"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch triton
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/envoi demo

test: $(STAMP) $(OTHER_DIR)
	$(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	PYTHONPATH=$(OTHER_DIR):src $(BIN)/python tools/compile_all.py $(OTHER_TRITON)

$(OTHER_DIR): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --target $@.part triton==$(OTHER_TRITON)
	@rm -rf $@ && mv $@.part $@

# Compiling takes longest, so several processes share the GPU and its memory.
GPU_JOBS ?= 6
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests -m gpu -n $(GPU_JOBS) --dist worksteal --record-kernels tests/gpu_evidence.json

gate: $(STAMP)
	$(BIN)/python tools/gate.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) .triton-* dist build .pytest_cache .ruff_cache .hypothesis demo.png

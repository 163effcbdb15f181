# Tinworks. `make demo` and `make test` are all that a clone needs; both install first, into $(VENV).
# `make VENV=DIR …` uses another virtual environment, `make PYTHON=… …` another Python (3.11 or newer).

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
PYTEST_ARGS ?=
SEED ?= 1
SEEDS ?= 100
CHAOS_ARGS ?=
SOAK_ARGS ?=
BIN := $(VENV)/bin

.PHONY: help install demo test test-vllm e2e test-all chaos soak lint proto compatibility clean

help:
	@echo "make demo      install, then train and sample a tiny model through the official SDK"
	@echo "make test      the fast tests"
	@echo "make test-vllm the tests that need vLLM, in an environment of its own, \$$(VENV_VLLM) (Linux, x86-64)"
	@echo "make e2e       the official SDK against SQLite and a folder, then against Postgres, Redis and S3"
	@echo "make test-all  all tests"
	@echo "make chaos     kill everything at random moments, with \$$(SEEDS) seeds from \$$(SEED) on (a minute each)"
	@echo "make soak      steady work for an hour, and whether memory, files, connections or latency grow"
	@echo "make lint      ruff, mypy, the layering rules"
	@echo "make proto     compile app/wire/*.proto anew; the install has done it once"
	@echo "make compatibility  write docs/compatibility.md anew"
	@echo "make clean     remove what install, tests and tools have made"

install:
	@$(PYTHON) scripts/install.py --venv $(VENV)

demo: install
	@$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vllm:
	@$(PYTHON) scripts/install_vllm.py --venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

e2e: install
	$(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS)
	TINWORKS_TEST_STACK=postgres-s3 $(BIN)/python -m pytest tests/e2e $(PYTEST_ARGS)

test-all: install
	$(BIN)/python -m pytest -m '' $(PYTEST_ARGS)

chaos: install
	$(BIN)/python -m tests.chaos --seed $(SEED) --seeds $(SEEDS) $(CHAOS_ARGS)

soak: install
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy app workers
	$(BIN)/lint-imports

proto:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/pip install --quiet 'setuptools>=77' grpcio-tools==1.75.1
	build/protoc/bin/python setup.py --quiet build_proto

compatibility: install
	TINWORKS_WRITE_DOCS=1 $(BIN)/python -m pytest tests/e2e/test_every_sdk_method.py -k page

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find app workers migrations tests examples bench scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

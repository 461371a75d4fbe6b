# On a fresh machine: `make demo` shows it working, `make test` proves it. Both make their own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-vllm fuzz bench policy-suite compare lint proto clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11 to 3.13 is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/kvaffinity demo

# Bodies of every API, good and bad, through the whole way from bytes to blocks; 6 minutes. With coverage to guide it:
# pip install atheris; python -m tests.fuzz.target -runs=1000000
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz.run --bodies 200000 --seed 1

bench: $(VENV)/installed
	$(BIN)/kvaffinity bench

# Against smg, sglang-router, vllm-router, Dynamo's engine and Envoy alone, in real time; 30 minutes. The other routers
# are installed under ~/.cache/kvaffinity/peers. Keep the machine idle meanwhile.
compare: $(VENV)/installed
	$(BIN)/kvaffinity compare --runs 3 --seconds 20 --seed 1 --out results/compare.json $(COMPARE_ARGS)

# The policy in 21 cells, 16 policies and 3 seeds each, and RESULTS.md; 60 minutes on two cores. QUICK=1: 4 minutes, and
# RESULTS-quick.md. DATA: where public traces are. What was run is kept under ~/.cache/kvaffinity.
DATA ?= $(wildcard ../shared/data)

policy-suite: $(VENV)/installed
	$(BIN)/kvaffinity suite $(if $(DATA),--data $(DATA)) \
	  $(if $(QUICK),--quick --out RESULTS-quick.md --plots dashboards/results/quick) $(SUITE_ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest $(PYTEST_ARGS)
	@echo "Left out: the tests against a real vLLM (make test-vllm: 3.5 GB, 2 minutes to install, 3 to run)."

VLLM := $(or $(KVAFFINITY_VLLM),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvaffinity/vllm)

test-vllm: $(VENV)/installed
	KVAFFINITY_VLLM=$(VLLM) PYTHON=$(PYTHON) tests/engines/install
	KVAFFINITY_VLLM=$(VLLM) $(BIN)/pytest tests/engines $(PYTEST_ARGS)

# An old compiler on purpose: code it generates runs on protobuf 6 and 7. It wants a protobuf of its own, so it gets a room of its own.
proto:
	$(PYTHON) -m venv $(VENV)-proto
	$(VENV)-proto/bin/pip install --quiet --disable-pip-version-check 'grpcio-tools>=1.74,<1.75'
	$(VENV)-proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. extproc/wire/envoy.proto

clean:
	rm -rf $(VENV) $(VENV)-proto dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Moonpool's front door. `make` lists the targets; each does its own set-up, and a second run is quick.
#   VENV=.venv             the virtual environment               PYTHON=python3.12  the interpreter it is made with
#   TESTS="tests/unit"     what `make test` runs                 PYTEST_ARGS="-x"   options for it
#   TEST_JOBS=2            test files run side by side
#   SEEDS=1000 FIRST=1                   worlds of `make sim`    STEPS=5000000      or so many steps of them
#   MOONPOOL_NATIVE=auto   require: a missing C library is an error (CI)            SUITES="rdma"  lab suites to run

VENV ?= .venv
TESTS ?= tests
PYTEST_ARGS ?=
TEST_JOBS ?= 2
SUITES ?=
SEEDS ?= 1000
FIRST ?= 1
STEPS ?= 0
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
NATIVE_MODE := $(or $(MOONPOOL_NATIVE),auto)
NATIVE_SOURCES := $(shell find src/moonpool/native -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.c')

# The folders store/, bench/, kernels/ and conductor/ must not be importable by their bare names from the root.
demo test contract bench bench-engine bench-pool sanitize: export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test contract sim build check format docs bench bench-engine bench-pool sanitize lab pythons clean

help:  ## list the targets
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

demo: build $(STAMPS)/test-system  ## request traffic through a master, two nodes and four workers: every byte checked
	$(BIN)/moonpool demo

test: build $(STAMPS)/test-system  ## the test suite (choose with TESTS=, PYTEST_ARGS=)
	$(BIN)/pytest -n $(TEST_JOBS) --dist loadfile --benchmark-disable $(PYTEST_ARGS) $(TESTS)

contract: build $(STAMPS)/test-system  ## the contract suite over every way to move bytes that this machine has
	MOONPOOL_CONTRACT_WAYS=all $(BIN)/pytest $(PYTEST_ARGS) tests/contract

sim: build  ## the store's simulator: SEEDS worlds from seed FIRST, or STEPS steps; every invariant checked
	$(BIN)/python -P tests/sim/run.py --seeds $(SEEDS) --first $(FIRST) --steps $(STEPS)

build: $(STAMPS)/native-$(NATIVE_MODE)  ## virtual environment, package, native modules

check: build  ## style, types, stubs of the native modules, house rules
	bash .ci/check $(BIN)

format: build  ## rewrite the Python sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: build  ## write the generated pages of docs/ anew
	$(BIN)/python .ci/configuration_page.py docs/configuration.md
	$(BIN)/python .ci/configuration_page.py --store docs/store/configuration.md
	$(BIN)/python .ci/rpc_page.py docs/rpc.md

bench: build  ## micro-benchmarks of kernels and codecs, then a short engine run
	$(BIN)/pytest tests/perf --benchmark-only
	$(BIN)/python -m moonpool.bench.engine --quick

bench-engine: build  ## the engine against its peers and the bare-C ceiling, paired; fills the table in README
	$(BIN)/python -m moonpool.bench.peers_setup || echo "going on without the peers named above"
	$(BIN)/python -m moonpool.bench.engine --update-readme

bench-pool: build $(STAMPS)/test-system  ## the store against Mooncake and redhare, paired; fills the table in README
	$(BIN)/python -m moonpool.bench.peers_setup mooncake-0.3.13 redhare-0.6.0 || echo "going on without the peers named above"
	$(BIN)/python -m moonpool.bench.pool --update-readme

sanitize: build $(STAMPS)/test-system  ## unit, contract and native tests under ASan and UBSan
	bash .ci/sanitize $(BIN)/python

lab: build  ## boot an emulated machine with RDMA, NVMe-oF or far memory and run the suites that need one
	bash tests/lab/setup
	$(BIN)/python tests/lab/suites.py $(SUITES)

pythons:  ## build and test on each Python from 3.11 to 3.14 found here
	bash .ci/pythons

clean:  ## remove what was built, not the virtual environments
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks src/moonpool.egg-info
	find src/moonpool/native -name '*.so' -delete
	rm -f $(STAMPS)/native-*

# ---- set-up, each step once -------------------------------------------------------------------------

$(STAMPS)/venv: .ci/system-packages .ci/find-python
	bash .ci/system-packages build
	"$$(bash .ci/find-python)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# The package is installed without its native modules: pip would build them in a temporary folder, from scratch
# each time. The step after this one builds them in place and only what changed.
$(STAMPS)/packages: $(STAMPS)/venv pyproject.toml
	$(BIN)/pip install -q --upgrade 'pip>=25.1' 'setuptools>=77' 'cython>=3.2,<4'
	MOONPOOL_NATIVE=skip $(BIN)/pip install -q --no-build-isolation --group dev -e .
	@touch $@

$(STAMPS)/native-$(NATIVE_MODE): $(STAMPS)/packages setup.py $(NATIVE_SOURCES)
	MOONPOOL_NATIVE=$(NATIVE_MODE) $(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(STAMPS)/test-system: $(STAMPS)/venv
	bash .ci/system-packages test
	@touch $@

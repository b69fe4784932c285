# Every target makes its own environment in .venv the first time; it is renewed when the two files below change.
#   make demo                    the whole road on a tiny model, about two minutes on two cores
#   make test                    style, types, and all tests but the slow ones
#   make test ARGS="-k packing"  more arguments for pytest, the demo or the benchmark
#   make PYTHON=python3.12 PIP_ARGS="--index-url ..."   another interpreter, another package index

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
PIP_ARGS ?=

BIN    := $(VENV)/bin
READY  := $(VENV)/.preftune-ready
PYTEST := $(BIN)/python -m pytest
SOURCES := preftune tests examples benchmarks docs/migration

.DEFAULT_GOAL := help
.PHONY: help venv install demo test unit integration test-dist test-slow test-learning bench lint format types docs browser clean distclean

# Neither the demo nor a test asks a hub for anything.
demo test unit integration test-dist test-slow test-learning: export HF_HUB_OFFLINE = 1

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile
	@echo "also: install unit integration test-dist test-slow test-learning lint format types docs bench browser clean distclean"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "preftune needs Python 3.11 or newer; call make with PYTHON=python3.11, for example" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing preftune and what it needs into $(VENV); this takes some minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

venv install: $(READY)

demo: $(READY)
	$(BIN)/preftune demo $(ARGS)

test: lint types
	$(PYTEST) -m "not slow" -n $(WORKERS) --dist loadgroup $(ARGS)

unit: $(READY)
	$(PYTEST) tests/unit -m "not slow" $(ARGS)

integration: $(READY)
	$(PYTEST) tests/integration -m "not slow and not dist" $(ARGS)

test-dist: $(READY)
	$(PYTEST) -m "dist and not slow" $(ARGS)

test-slow: $(READY)
	$(PYTEST) -m slow --ignore tests/learning $(ARGS)

test-learning: $(READY)
	$(PYTEST) tests/learning -m slow -s $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(READY)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

# For the test of the report's page, which is skipped where there is none (Debian; needs root)
browser:
	apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find preftune tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

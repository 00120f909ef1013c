# Every target first brings .venv up to date (scripts/bootstrap.sh: at once when nothing changed).
BIN := .venv/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help environment demo check quick test durations versions lint docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile | awk -F': ' '{printf "make %-12s %s\n", $$1, $$2}'

environment:  ## build .venv
	@sh scripts/bootstrap.sh

demo: environment  ## train a small model unevenly on this machine's CPU, and compare
	$(BIN)/python scripts/quickstart/demo.py $(ARGS)

check: environment  ## style, types (by a daemon that stays an hour) and the direction of imports, in seconds
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/dmypy run --timeout 3600
	$(BIN)/lint-imports

quick: check  ## also the unit tests that take moments, and ten trainings, one of each kind
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --at-most 0.3 @tests/sentinels.txt tests/unit $(ARGS)

durations: environment  ## record what unit tests take (tests/durations.json), on a machine that does nothing else
	$(BIN)/python -m pytest -n 2 --dist loadfile --record-durations tests/unit

test: lint  ## every check that CI runs; make test ARGS='-k plan' hands words to pytest
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Beside .venv, each in a folder of its own that comes before it on the path.
WHEELS := $(CURDIR)/build/megatron-core
EARLIER := 0.17 0.18

versions: environment  ## install the earlier versions of megatron-core, and train with each
	set -e; for version in $(EARLIER); do \
	  if [ ! -d $(WHEELS)/$$version ]; then \
	    $(BIN)/python -m pip install --no-deps --target $(WHEELS)/$$version "megatron-core==$$version.*"; \
	  fi; \
	  PYTHONPATH=$(WHEELS)/$$version $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS) \
	    tests/megatron/test_uneven_training.py tests/megatron/test_option_training.py \
	    tests/megatron/test_stages_training.py tests/megatron/test_stages_jobs.py \
	    tests/megatron/test_ministages.py; \
	done
	$(BIN)/python -m pytest tests/megatron/test_versions.py

lint: environment  ## style, types, and the direction of imports between packages
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: environment  ## write the generated pages, and build the site into build/site
	$(BIN)/python -m scripts.docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

clean:  ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find megatron_hexi scripts tests -name __pycache__ -prune -exec rm -rf {} +

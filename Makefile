# Every target makes .venv first, so a fresh clone needs nothing but Python ≥ 3.11.
PYTHON ?= python3
# e.g. PIP_FLAGS='--index-url …' where the default index has no CPU build of torch
PIP_FLAGS ?=
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help run check test slow nightly wheel bench docs site clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 8

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[cli,dev]'
	@touch $@

run: $(READY)  ## the first minute: digits as five tasks, fine-tuning against AGS-CL
	$(BIN)/agscl run

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check  ## check, then every quick test
	$(BIN)/pytest -m 'not slow' -n 2

slow: $(READY)  ## the tests that take minutes
	$(BIN)/pytest -m slow

nightly: slow  ## the slow tests, then the whole contract: every method, network and optimizer; about an hour on two cores
	$(BIN)/python benchmarks/contract.py --jobs 2

wheel: $(READY)  ## dist/: the wheel and the source archive
	$(BIN)/hatchling build --clean

bench: $(READY)  ## what each method adds to a training step, and what its importances take
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/methods.py

docs: $(READY)  ## the tables and figures of README and docs/, made from results/; one page of each kind in docs/pages/
	$(BIN)/python docs/make_docs.py
	$(BIN)/python docs/make_pages.py

SITE := .venv/.site

$(SITE): $(READY)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[cli,dev,site]'
	@touch $@

site: $(SITE)  ## site/: the documentation as a web site, with a page per method, the reference and notebooks run anew
	AGSCL_RUN_NOTEBOOKS=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment, dist/, site/ and caches, never runs/
	rm -rf .venv dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

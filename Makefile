# Two commands set up everything they need: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all truth faults unit unit-all lint bench docs docs-figures evidence clean

help:
	@echo "make demo   from a raw table of penguins to intervals, beside boosting and a deep ensemble; a picture in output/ (one to two minutes)"
	@echo "make test   run the linter, the type checker, every contract and the README: five to eight minutes on two cores"
	@echo "make test-all  run everything: all rows, calibration, long fits, every example and page (three quarters of an hour on two cores)"
	@echo "make unit   run only the tests of make test"
	@echo "make lint   run only the linter and the type checker"
	@echo "make truth  cross models of known posteriors with every kernel and guide, write docs/what_works.md (half an hour)"
	@echo "make faults ROOM=infer SEED=0 COUNT=50  plant faults in a room, one at a time: which does no test notice?"
	@echo "make bench  measure speed ratios, written to output/*.json"
	@echo "make docs   build the documentation as a site, with warnings as errors (output/docs/index.html)"
	@echo "make docs-figures  rerun the examples whose output and plots the site shows (an hour)"
	@echo "make evidence DATA=FOLDER  measure every table of the docs again (hours; resumes where it stopped)"
	@echo "make clean  remove the environment and everything generated"

# One stamp per set of requirements: the environment is updated when pyproject.toml changes. Every set includes the one
# for the examples; the one for the tests also includes the one for the docs.
EXTRAS_examples := examples
EXTRAS_docs := examples,docs
EXTRAS_benchmarks := examples,benchmarks
EXTRAS_test := test

$(VENV)/.%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS_$*)]"
	@touch $@ $(VENV)/.examples $(if $(filter test,$*),$(VENV)/.docs)

demo: $(VENV)/.examples
	$(BIN)/python -m examples.demo

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint unit

test-all: lint unit-all

# All tests of a file run on one worker, so that they can share fixtures and compiled programs.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

unit: $(VENV)/.test
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

unit-all: $(VENV)/.test
	$(PYTEST) $(PYTEST_ARGS)

# ONLY=SGHMC: only the cells whose ways or problems have this in their names.
truth: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m truth --workers $(WORKERS) $(if $(ONLY),"$(ONLY)")

# HAND=1 plants the faults that people chose; MAP=1 measures again which tests run which lines.
faults: $(VENV)/.test
	$(BIN)/python tests/faults --room $(ROOM) --seed $(or $(SEED),0) --count $(or $(COUNT),50) $(if $(HAND),--hand) \
	    $(if $(MAP),--map) --workers $(WORKERS) --output output/faults.json

bench: $(VENV)/.benchmarks
	$(BIN)/python -m examples.benchmarks.gradient_cost --output output/gradient_cost.json
	$(BIN)/python -m examples.benchmarks.sgld_step --output output/sgld_step.json
	$(BIN)/python -m examples.benchmarks.orbit_moves --output output/orbit_moves.json
	$(BIN)/python -m examples.benchmarks.coupling_step --output output/coupling_step.json
	$(BIN)/python -m examples.benchmarks.compilation --output output/compilation.json
	$(BIN)/python -m examples.benchmarks.first_draw --output output/first_draw.json
	$(BIN)/python -m examples.benchmarks.adf_speed --output output/adf_speed.json

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs output/docs

docs-figures: $(VENV)/.examples
	$(BIN)/python docs/make_examples.py

evidence: $(VENV)/.benchmarks
	$(BIN)/python -m examples.benchmarks all $(if $(DATA),--data $(DATA))

clean:
	rm -rf .venv* output build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info

# Each target makes the virtual environment it needs. PYTHON names the interpreter to make it with;
# PIP_CONSTRAINT, where set, is honoured: `PIP_CONSTRAINT=$PWD/constraints.txt make test` is what CI runs.
PYTHON ?= python3
VENV := .venv
NEWEST_VENV := .venv-newest
OLDEST_VENV := .venv-oldest
RUN := $(VENV)/bin/python
LOCATION := $(VENV)/location
DEMO_READY := $(VENV)/installed-demo
TEST_READY := $(VENV)/installed-test
DOCS_READY := $(VENV)/installed-docs
SOURCES := graphopt passes lowering
DOCUMENTED := graphopt graphopt.comm graphopt.cost graphopt.graph_utils graphopt.hooks graphopt.host \
	graphopt.iter_graph graphopt.manager \
	graphopt.lowering graphopt.optim graphopt.partition graphopt.pipelining graphopt.readable \
	graphopt.rewriting graphopt.saved graphopt.schedule graphopt.testing graphopt.verify graphopt.viewing
# What random cases of `make test-all` are made from, and which it has of a matrix of cases.
SEED ?= 0
# Lint runs beside the tests: whichever finds something fails the whole.
BESIDE := --jobs=2 --no-print-directory
# Tests of one file share the ranks that they start, so a file is run by one process; the order of
# files is that of tests/conftest.py.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Tests start many processes, each of which would compile all of graphopt again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo docs test test-all check test-alone test-all-alone check-alone check-newest check-oldest \
	lint clean

help:
	@echo 'make demo    a captured step, a refused pass, and what the graph gains over DDP'
	@echo '             (options: make demo ARGS="--links 0,1 --rounds 3")'
	@echo 'make test    lint and the tests, side by side'
	@echo 'make test-all SEED=7    lint and the tests with their large matrices, cases by SEED'
	@echo 'make check   lint and the quick tests, side by side'
	@echo 'make docs    the API reference, in docs/api'
	@echo 'make check-newest    the quick tests with the newest torch, in an environment of its own'
	@echo 'make check-oldest    the same with the oldest torch that graphopt works with'
	@echo 'make lint    ruff and mypy'
	@echo 'make clean   remove what the others made'

demo: $(DEMO_READY)
	$(RUN) -m graphopt demo $(ARGS)

test: $(TEST_READY)
	$(MAKE) $(BESIDE) lint test-alone

test-all: $(TEST_READY)
	$(MAKE) $(BESIDE) lint test-all-alone

check: $(TEST_READY)
	$(MAKE) $(BESIDE) lint check-alone

test-alone: $(TEST_READY)
	$(RUN) -m pytest $(PARALLEL) -m "not full"

test-all-alone: $(TEST_READY)
	$(RUN) -m pytest $(PARALLEL) --seed $(SEED)

check-alone: $(TEST_READY)
	$(RUN) -m pytest $(PARALLEL) -m "not slow and not hf and not full"

check-newest:
	.ci/check-torch newest "$(PYTHON)" "$(NEWEST_VENV)" $(PARALLEL)

check-oldest:
	.ci/check-torch oldest "$(PYTHON)" "$(OLDEST_VENV)" $(PARALLEL)

docs: $(DOCS_READY)
	rm -rf docs/api
	$(RUN) docs/reference.py $(DOCUMENTED)

lint: $(TEST_READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict $(SOURCES)

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(OLDEST_VENV) docs/api build dist graphopt.egg-info graphopt-repro .hypothesis
	find . -type d \( -name __pycache__ -o -name .pytest_cache -o -name .mypy_cache \
		-o -name .ruff_cache \) -prune -exec rm -rf {} +

$(DEMO_READY): $(LOCATION) setup.cfg pyproject.toml constraints.txt
	$(RUN) -m pip install --disable-pip-version-check -e .
	@touch $@

$(TEST_READY): $(LOCATION) setup.cfg pyproject.toml constraints.txt
	$(RUN) -m pip install --disable-pip-version-check -e '.[test,bench,triton]'
	@touch $@

$(DOCS_READY): $(LOCATION) setup.cfg pyproject.toml constraints.txt
	$(RUN) -m pip install --disable-pip-version-check -e '.[docs]'
	@touch $@

# An environment that was moved with its checkout still points to the old place, and one whose
# interpreter is gone does not start: both are seen here and repaired by the rule below.
ifneq ($(CURDIR),$(shell $(RUN) -c '' 2>/dev/null && cat $(LOCATION) 2>/dev/null))
.PHONY: $(LOCATION)
endif

$(LOCATION):
	@command -v "$(PYTHON)" >/dev/null || { \
		echo 'error: no $(PYTHON) here; name an interpreter: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo 'error: $(PYTHON) does not start or is older than Python 3.10;' \
			'name another: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@$(RUN) -c '' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@echo '$(CURDIR)' > $@

# make test     everything that needs no GPU (and, on a GPU, the same suite compiled): ruff, mypy, pytest
# make bench    compare the frameworks on this GPU; without one, the correctness matrix in the interpreters
# make locality does tile order matter, and with FP8? run again, it goes on
# make report   rewrite the tables and pictures of README and notes from the committed results
# make mutants  kernels with one planted fault each, which the suite must catch (not part of make test)
# Each sets up .venv by itself. PYTHON=... picks the interpreter, ARGS=... goes to the command behind the target.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# Test processes. A file's tests stay in one, as they share what has been compiled; long files begin first (conftest.py).
JOBS ?= 2

.PHONY: test bench locality report mutants lint style clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt tools/find-python
	"$$(tools/find-python $(PYTHON))" -m venv $(VENV)
	@# Not compiled to bytecode: a minute for all 10,000 files, of which a run imports a few.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: style
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy, a minute on one core where it has no cache, runs beside the tests; each of the two fails the target.
test: style
	$(BIN)/mypy & mypy=$$!; \
	$(BIN)/python -m pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$mypy && exit $$tests

bench: $(STAMP)
	$(BIN)/python -m bench compare $(ARGS)

locality: $(STAMP)
	$(BIN)/python -m bench locality $(ARGS)
	$(BIN)/python -m bench report

report: $(STAMP)
	$(BIN)/python -m bench report $(ARGS)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

clean:
	rm -rf $(VENV)

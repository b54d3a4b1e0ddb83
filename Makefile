# make demo   install, train on two ranks, prove it equals one
# make test   install, every CPU test
# make nightly  the tests that are too long for every change: every architecture, one by one
# make lint   ruff, mypy, import-linter
#
# PYTHON=python3.12 chooses the interpreter. On Linux, plain torch wheels bring CUDA along; to get the small CPU build
# give the CPU index of PyTorch's install page: make demo TORCH_INDEX=...

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin

.PHONY: .venv demo test nightly lint clean
.DEFAULT_GOAL := test

.venv: .venv/.installed

# Done once, and again when what is installed changes.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "longspan needs Python 3.11 or newer; $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	@touch $@

demo: .venv/.installed
	$(BIN)/longspan train examples/demo.toml --nproc 2
	$(BIN)/longspan compare runs/demo examples/demo.toml mesh.cp=1 --out runs/demo-compare

test: .venv/.installed
	@$(BIN)/python -m pytest

nightly: .venv/.installed
	@$(BIN)/python -m pytest -m nightly

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .pytest_cache src/*.egg-info

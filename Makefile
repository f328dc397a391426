# Two commands: `make demo` shows what drm-triton does, `make test` proves that it works here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes: as many as there are cores. `make test WORKERS=0` runs all tests in one process.
WORKERS ?= auto
# Where `make test-wheel` installs the wheel.
OUTSIDE ?= /tmp/drm-triton-wheel
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: demo test test-bounds test-gpu-static test-wheel coverage lint docs setup clean

demo: setup
	rm -rf runs/demo
	$(BIN)/drm-triton prepare melon --synthetic --scale 0.02 --out data/demo --overwrite
	$(BIN)/drm-triton train --dataset data/demo --run runs/demo
	$(BIN)/drm-triton evaluate runs/demo --on test
	$(BIN)/drm-triton recommend runs/demo --user 1 --k 5
	$(BIN)/python examples/side_by_side.py runs/demo

# Lint runs beside the tests. What it prints follows what they print, and a failure of either is one of the whole.
test: setup $(VENV)/.hnswlib
	@{ $(LINT); } > $(VENV)/lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests | lint))

# Larger runs of the compiled GPU kernels, in the PTX emulator of bench/ptx, and their compilation for all GPUs. They
# take minutes, and need no GPU.
test-gpu-static: setup
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu_static -n $(WORKERS) --dist worksteal \
		tests/kernels/gpu/emulator tests/kernels/gpu/test_compile.py

# The tests of the CPU kernels, compiled so that an index outside its array is an error. They take minutes to compile.
# What the intrinsics read and write through pointers is not checked.
test-bounds: setup
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/kernels/cpu tests/models

# Measures which lines the tests run; the details are in htmlcov/index.html.
coverage: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term --cov-report=html

# Runs the tests against an installed wheel, in a folder outside the repository.
test-wheel: setup
	rm -rf $(OUTSIDE) build
	$(PYTHON) -m venv $(OUTSIDE)/venv
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(OUTSIDE) .
	$(OUTSIDE)/venv/bin/python -m pip install --quiet "$$(echo $(OUTSIDE)/*.whl)[test]"
	cp -R tests $(OUTSIDE)
	cd $(OUTSIDE) && venv/bin/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir . \
		-n $(WORKERS) --dist worksteal tests --pyargs drm_triton

lint: setup
	$(LINT)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.installed

# Reinstalled only when what it depends on changes; an editable install sees every other change by itself.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# An optional package that comes as source only, so that not every machine can install it.
$(VENV)/.hnswlib: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet hnswlib || echo "hnswlib cannot be built here: its tests will be skipped"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info data runs

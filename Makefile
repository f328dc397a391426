# Two commands: `make demo` shows what drm-triton does, `make test` proves that it works here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes: as many as there are cores. `make test WORKERS=0` runs all tests in one process.
WORKERS ?= auto
# Where `make test-wheel` installs the wheel.
OUTSIDE ?= /tmp/drm-triton-wheel
# Where `make test-lowest` installs the lowest versions, and the tests that it runs.
LOWEST ?= /tmp/drm-triton-lowest
LOWEST_TESTS ?= tests drm_triton
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: demo test test-bounds test-slow test-lowest test-wheel coverage lint docs release-check setup clean

demo: setup
	rm -rf runs/demo runs/demo-final
	$(BIN)/drm-triton prepare melon --synthetic --scale 0.02 --out data/demo --overwrite
	$(BIN)/drm-triton train data/demo --out runs/demo
	$(BIN)/drm-triton evaluate runs/demo
	$(BIN)/drm-triton refit runs/demo
	$(BIN)/drm-triton recommend runs/demo-final --user 1 --k 5
	$(BIN)/python examples/side_by_side.py runs/demo

# Lint runs beside the tests. What it prints follows what they print, and a failure of either is one of the whole.
test: setup $(VENV)/.hnswlib
	@{ $(LINT); } > $(VENV)/lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((tests | lint))

# The cases that `make test` leaves out because they take long. First those in which Triton compiles its kernels, for all
# GPUs and for the PTX emulator of bench/ptx, then the others. None needs a GPU.
test-slow: setup
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal \
		tests/kernels/gpu/emulator tests/kernels/gpu/test_compile.py
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal tests \
		--ignore tests/kernels/gpu/emulator --ignore tests/kernels/gpu/test_compile.py

# The tests of the CPU kernels, compiled so that an index outside its array is an error. They take minutes to compile.
# What the intrinsics read and write through pointers is not checked.
test-bounds: setup
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/kernels tests/models \
		--ignore tests/kernels/gpu

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

# Runs the tests with each dependency at its lower bound in pyproject.toml; only torch is the newest that is allowed.
# Test packages that ask for newer versions are left out, and their tests skipped. Needs Python 3.11 or 3.12, for which
# these versions have wheels.
test-lowest:
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) bench/dependencies.py lowest > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --requirement $(LOWEST)/requirements.txt --editable .
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(LOWEST_TESTS)

# What a release needs: all tests, the wheel, the documentation, the licences of the dependencies and a bill of materials.
release-check: test test-wheel docs
	mkdir -p dist
	$(BIN)/python -m bench.dependencies licences > dist/licences.md
	$(BIN)/python -m bench.dependencies sbom > dist/sbom.json

lint: setup
	$(LINT)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.installed

# Reinstalled only when what it depends on changes; an editable install sees every other change by itself. Python compiles
# the modules that it imports; to compile all of them takes more than a minute.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@

# An optional package that comes as source only, so that not every machine can install it.
$(VENV)/.hnswlib: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet hnswlib || echo "hnswlib cannot be built here: its tests will be skipped"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info data runs

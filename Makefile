# make train | train-long | train-nvme | test | test-all | lint | bench | docs | docs-serve   each sets up .venv first, once.
# make test-torch TORCH=2.11.0   runs the tests on another torch, in an environment of its own (.venv-2.11.0).
# make compat-table CLIENTS=DIR   runs tests/compat in the environment DIR (tests/compat/README.md) and writes docs/compat.md.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RANKS ?= 2
CONFIG ?= examples/configs/zero3.json
# Wall-clock bound of a whole test run; single tests are bounded in tests/conftest.py.
TEST_LIMIT ?= 3600
# Test files run side by side in so many processes; the tests of one file stay together.
WORKERS ?= 3
TESTS ?= tests
PYTEST_ARGS ?=

.PHONY: venv train train-long train-nvme test test-all test-torch test-torches lint bench docs docs-serve compat-table clean

venv: $(STAMP)

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# torch first: it is the one large download, and resolving it together with the rest could fetch it twice.
# No build isolation, for the same reason; setuptools is the only build requirement, and torch 2.11 takes none from 82 on.
$(STAMP): pyproject.toml setup.py
	@echo "setting up $(VENV) with $(TORCH): some minutes without a word, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" "setuptools>=77"
	$(PIP) --no-build-isolation -e ".[dev]"
	touch $@

# Two minutes on two CPU cores that do nothing else, beside what pip takes.
TRAIN = $(BIN)/deepspeed --num_gpus $(RANKS) examples/train_gpt.py --deepspeed --deepspeed_config
train: venv
	$(TRAIN) $(CONFIG)

# A larger model for longer: a quarter of an hour there.
train-long: venv
	$(TRAIN) examples/configs/zero3_long.json --steps 3000 --layers 4 --width 192 --heads 6 --context 128

# One billion parameters, states on the drive, a hard limit of 3 GiB; NVME is a folder on the drive (default: a temporary one).
train-nvme: venv
	$(BIN)/python benchmarks/nvme.py train $(if $(NVME),--folder $(NVME))

# Hundreds of processes start in a run. Where nothing may write byte code (PYTHONDONTWRITEBYTECODE), each compiled the package again.
COMPILE = $(BIN)/python -m compileall -q -j 2 deepspeed op_builder tests
PYTEST = OMP_NUM_THREADS=1 timeout $(TEST_LIMIT) $(BIN)/python -m pytest $(TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Every guarantee, on the settings that differ most; all corners of the matrices are in test-all.
test: venv
	$(COMPILE)
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

# Hours, on two cores: the bound of `make test` would cut it off.
test-all: TEST_LIMIT = 18000
test-all: venv
	$(COMPILE)
	$(PYTEST) $(PYTEST_ARGS)

OTHER = $(patsubst torch==%,%,$(TORCH))
test-torch:
	$(MAKE) test VENV=.venv-$(OTHER) TORCH=torch==$(OTHER)

# The oldest and the newest torch that are tested; the wheels (with CUDA, 6 GB installed) must be within reach.
TORCHES ?= 2.11.0 $(shell sed -n "s/^torch==//p" tests/requirements-newest-torch.txt)
# Where torch's own changes are met first; a name that has gone is an error.
FIRST_MET = \
  tests/pure/test_torch_names.py \
  tests/pure/test_flops_profiler.py::test_a_decoder_counts_as_the_formula_says_within_two_percent \
  tests/pure/test_pipe_orders.py::test_a_backward_in_two_halves_loses_and_doubles_no_gradient \
  tests/dist/test_mesh_groups.py \
  tests/dist/test_parity_matrix.py::test_corner \
  tests/dist/test_released_parameters.py \
  tests/sim/test_pipelines.py

test-torches:
	for version in $(TORCHES); do \
	  $(MAKE) venv VENV=.venv-$$version TORCH=torch==$$version || exit; \
	  $(MAKE) test-torch TORCH=$$version TESTS="$(FIRST_MET)" WORKERS=2 TEST_LIMIT=300 || exit; \
	done

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy deepspeed op_builder

bench: venv
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train.py

# The site, into build/site; what it needs beside .venv is installed once.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
$(VENV)/.docs: $(STAMP)
	$(PIP) --no-build-isolation -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(MKDOCS) build --strict --clean --config-file docs/site/mkdocs.yml

docs-serve: $(VENV)/.docs
	$(MKDOCS) serve --config-file docs/site/mkdocs.yml

CLIENTS ?= clients
COMPAT ?= tests/compat
compat-table:
	OMP_NUM_THREADS=1 PYTHONPATH=. $(CLIENTS)/bin/python -m pytest -p tests.compat.table $(COMPAT)

clean:
	rm -rf $(VENV) build dist *.egg-info

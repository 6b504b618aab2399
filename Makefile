# The front door. `make` lists the targets.
#
#   make run PIPELINE=qat MODEL=path CORPUS=path -- -o Engine.max_steps=200 -o Global.seed=1

PIPELINE  ?= full
CORPUS    ?=
TOKENIZER ?=
MODEL     ?=
CLOZE     ?=
RECIPE    ?=
RUN       ?=
TARGET    ?=
BUDGET    ?=
ENGINE    ?=
PROMPT    ?= The Python interpreter
TESTS     ?=
PYTHON    ?= $(firstword $(shell command -v python3.11) python3)

BIN := .venv/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Make takes the `A.B=c` of `-o A.B=c` for a variable and `-o` for a goal: give them back.
quote    = '$(subst ','\'',$(1))'
dotted   = $(foreach v,$(.VARIABLES),$(if $(findstring .,$(v)),$(if $(filter command line,$(origin $(v))),$(v))))
override = -o $(call quote,$(1)=$(value $(1)))
option   = $(if $(value $(2)),$(1) $(call quote,$(value $(2))))

.PHONY: help
help: ## List the targets
	@echo 'usage: make TARGET [VARIABLE=value ...] [-- -o Group.key=value ...]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'run takes: PIPELINE=pretrain|prune|qat|compress|full CORPUS= TOKENIZER= MODEL= CLOZE= RECIPE= TARGET= BUDGET= RUN= ENGINE=torch|paddle'

# PaddleSlim's pruners know other criteria than the pipelines' own recipe asks for.
ifeq ($(ENGINE),paddle)
ENGINE_OPTIONS := -o Compress.engine=paddle
ifneq ($(filter full compress,$(PIPELINE)),)
ENGINE_OPTIONS += --prune-recipe tiny-prune-paddle
else ifeq ($(PIPELINE)$(RECIPE),prune)
ENGINE_OPTIONS += --recipe tiny-prune-paddle
endif
else ifneq ($(filter-out torch,$(ENGINE)),)
$(error ENGINE=$(ENGINE): take torch or paddle)
endif

.PHONY: run
run: env serve-env $(if $(filter paddle,$(ENGINE)),paddle-env) ## Run a pipeline on this machine, from text to Triton
	@$(BIN)/python -m pipelines.run $(call quote,$(PIPELINE)) \
	  $(call option,--corpus,CORPUS) $(call option,--tokenizer,TOKENIZER) \
	  $(call option,--model,MODEL) $(call option,--cloze,CLOZE) \
	  $(call option,--recipe,RECIPE) $(call option,--name,RUN) \
	  $(call option,--target,TARGET) $(call option,--budget,BUDGET) \
	  $(ENGINE_OPTIONS) \
	  $(foreach v,$(call dotted),$(call override,$(v)))

.PHONY: serve
serve: env serve-env ## Start the server on the model deployed last
	$(BIN)/lathe serve

.PHONY: stop
stop: env ## Stop the server
	$(BIN)/lathe stop

.PHONY: client
client: env ## Ask the server: make client PROMPT="Once upon"
	$(BIN)/lathe client $(call quote,$(value PROMPT))

.PHONY: test
test: dev-env serve-env paddle-env ## Run the tests but the slow ones (TESTS=path for some of them)
	$(BIN)/python -m pytest -m "not slow and not soak" $(TESTS)

.PHONY: test-all
test-all: dev-env serve-env paddle-env ## Run all tests but the soak
	$(BIN)/python -m pytest -m "not soak" $(TESTS)

.PHONY: soak
soak: dev-env serve-env ## Load a server with good and bad requests for SECONDS (half an hour)
	LATHE_SOAK_SECONDS=$(or $(SECONDS),1800) $(BIN)/python -m pytest -m soak tests/serve

.PHONY: lint
lint: dev-env ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: compile
compile: env ## Write the pipelines' IR YAML to build/
	$(BIN)/python -m pipelines.compile build

.PHONY: manifests
manifests: env ## Write the cluster's manifests, and the pipelines as objects, to build/manifests/
	$(call render,build/manifests)
	$(BIN)/python -m pipelines.objects build/manifests/pipelines.yaml $(shell git describe --always --dirty --exclude='*')

.PHONY: golden
golden: env ## Refresh the golden YAML that the tests compare with
	$(BIN)/python -m pipelines.compile tests/pipelines/golden
	$(call render,tests/manifests/golden)

define render
mkdir -p $(1)
kubectl kustomize manifests/overlays/kind -o $(1)/kind.yaml
kubectl kustomize manifests/overlays/production -o $(1)/production.yaml
endef

.PHONY: clean
clean: ## Remove build/ and caches; environments and run/ stay
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find components lathe pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments: made once, and again when a lock file changes.

.PHONY: env
env: .venv/.train ## Make .venv, in which everything but Triton runs

.PHONY: serve-env
serve-env: .venv-serve/.serve ## Make .venv-serve, in which Triton runs

.PHONY: paddle-env
paddle-env: .venv-paddle/.paddle ## Make .venv-paddle, in which the PaddleSlim engine runs

.PHONY: dev-env
dev-env: .venv/.dev ## Add the tools of test and lint to .venv

.venv/.train: images/train/requirements.lock pyproject.toml
	$(call venv,.venv)
	$(BIN)/python -m pip install -q -r $<
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

.venv/.dev: requirements-dev.lock .venv/.train
	$(BIN)/python -m pip install -q -r $<
	touch $@

.venv-serve/.serve: images/serve/requirements.lock pyproject.toml
	$(call venv,.venv-serve)
	.venv-serve/bin/python -m pip install -q -r $<
	.venv-serve/bin/python -m pip install -q --no-deps -e .
	touch $@

# Wheels of paddlepaddle 2.6.2 and what it needs are for Python 3.11 at the latest.
.venv-paddle/.paddle: PYTHON := python3.11
.venv-paddle/.paddle: images/paddle/requirements.lock pyproject.toml
	$(call venv,.venv-paddle)
	.venv-paddle/bin/python -m pip install -q -r $<
	.venv-paddle/bin/python -m pip install -q --no-deps -e .
	touch $@

define venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "error: $(PYTHON) is older than Python 3.11"; echo "  cure: make PYTHON=python3.11 ..."; exit 1; } >&2
$(PYTHON) -m venv $(1)
endef

.PHONY: -o
-o:
	@:
ifneq ($(filter -o,$(MAKECMDGOALS)),)
MAKEFLAGS += --silent
endif

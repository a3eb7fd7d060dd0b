# SFT-Play, all of it, by name. `make help` is made from this file: "##@ group", "target: ## text" and "#? knob".

.DEFAULT_GOAL := help

#? CONFIG=configs/demo.yaml         the run
#? ARGS="train.learning_rate=1e-4"  settings of it to change
#? NGPU=2                           processes
#? RUN=name                         name of the run directory
#? PROBE=search                     time some plans, take the fastest
#? NODES=2                          machines
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/demo.yaml
ARGS ?=
NGPU ?=
RUN ?=
NODES ?=
RUNS ?= runs

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Free text: the shell takes it from the environment instead of reading it.
export STYLE
# To the libraries these are the numbers of a single process.
unexport RANK MASTER_ADDR MASTER_PORT

PY = "$(VENV)/bin/python"
SFT = $(PY) -m sft_play
OVERRIDES = $(if $(RUN),"output.name=$(RUN)")$(if $(PROBE), "train.probe=$(PROBE)") $(ARGS)
WITH_CONFIG = --config "$(CONFIG)" $(OVERRIDES)
SOME = $(if $(NGPU),--processes "$(NGPU)")
ALL = --processes "$(if $(NGPU),$(NGPU),0)"
WITH_ENGINE = $(if $(ENGINE),--engine "$(ENGINE)")
MACHINE = --nodes "$(NODES)" --node-rank "$(RANK)" --master-addr "$(MASTER_ADDR)" --master-port "$(MASTER_PORT)"
CLUSTER = --nodes "$(NODES)" --gpus "$(NGPU)" --partition "$(PARTITION)" --time "$(TIME)" --account "$(ACCOUNT)" --sbatch="$(SBATCH)"
READY = $(VENV)/.ready
TOOL_CACHES = build dist .pytest_cache .ruff_cache .mypy_cache sft_play.egg-info

##@ Set up

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^#\? / {printf "%s%s\n", n++ ? "" : "Knobs\n", "  " substr($$0, 4)} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9][a-zA-Z0-9_.\/-]*:.*## / {printf "  %-21s %s\n", $$1, $$2}' "$(firstword $(MAKEFILE_LIST))"

.PHONY: install
install: $(READY) ## Make .venv with the exact versions of requirements.lock

# torch first and by itself, in the build that this machine's package index has. DeepSpeed comes as source: DS_* keeps its
# setup from looking for a CUDA compiler; what it needs compiled it compiles when used.
$(READY): requirements.lock pyproject.toml
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed: make install PYTHON=python3.12")'
	"$(PYTHON)" -m venv "$(VENV)"
	$(PY) -m pip install --constraint requirements.lock torch==2.13.0
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PY) -m pip install --no-deps --no-build-isolation --use-pep517 --requirement requirements.lock
	$(PY) -m pip install --no-deps --no-build-isolation --editable .
	touch "$@"

.PHONY: gpu-info
gpu-info: $(READY) ## Show GPUs, memory, who uses it, CPU and RAM
	$(SFT) gpu-info

.PHONY: memory-check
memory-check: $(READY) ## Show what memory is left for a run
	$(SFT) memory-check

.PHONY: check
check: $(READY) ## Check config, data, model, devices, disk, versions
	$(SFT) check $(WITH_CONFIG)

.PHONY: setup-accelerate
setup-accelerate: $(READY) ## Run accelerate's wizard; AUTO=1 writes its file unasked
	$(SFT) setup-accelerate $(if $(AUTO),--auto)

##@ Look at the data

.PHONY: prepare
prepare: $(READY) ## Tokenise and count; SHOW=3 prints rows as learned
	$(SFT) prepare $(if $(SHOW),--show "$(SHOW)") $(WITH_CONFIG)

.PHONY: process
process: $(READY) ## Step 1: rows as conversations
	$(SFT) process $(WITH_CONFIG)

.PHONY: style
style: $(READY) ## Step 2: with a system prompt STYLE="..."
	$(if $(STYLE),,$(error STYLE="..." is required, the system prompt to add))$(SFT) style --style "$$STYLE" $(WITH_CONFIG)

.PHONY: render
render: $(READY) ## Step 3: text as the model sees it
	$(SFT) render $(WITH_CONFIG)

##@ Train

.PHONY: plan
plan: $(READY) ## Predict memory and speed, also for GPU="RTX 4090" NGPU=2
	$(SFT) plan $(if $(GPU),--gpu "$(GPU)") $(if $(NGPU),--gpus "$(NGPU)") $(WITH_CONFIG)

.PHONY: probe
probe: $(READY) ## Measure the largest batch, beside the prediction
	$(SFT) probe $(SOME) $(WITH_CONFIG)

.PHONY: train
train: $(READY) ## Train on one GPU, or on the CPU (default: the demo)
	$(SFT) train $(SOME) $(WITH_CONFIG)

.PHONY: train-distributed
train-distributed: $(READY) ## Train on all GPUs with DDP (no GPU: 2 CPU processes)
	$(SFT) train $(ALL) --engine ddp $(WITH_CONFIG)

.PHONY: train-deepspeed
train-deepspeed: $(READY) ## Train on all GPUs with DeepSpeed ZeRO-2
	$(SFT) train $(ALL) --engine deepspeed_z2 $(WITH_CONFIG)

.PHONY: train-multinode
train-multinode: $(READY) ## Train on NODES machines: RANK=0 MASTER_ADDR=10.0.0.1
	$(SFT) train $(MACHINE) $(ALL) $(WITH_ENGINE) $(WITH_CONFIG)

.PHONY: train-slurm
train-slurm: $(READY) ## Train as a SLURM job: NODES=2 NGPU=4 PARTITION= TIME=
	$(SFT) slurm $(CLUSTER) $(WITH_ENGINE) $(WITH_CONFIG)

.PHONY: train-tb
train-tb: $(READY) ## train, with TensorBoard for as long as it runs
	$(SFT) train --tensorboard $(SOME) $(WITH_CONFIG)

.PHONY: train-distributed-tb
train-distributed-tb: $(READY) ## train-distributed, with TensorBoard
	$(SFT) train --tensorboard $(ALL) --engine ddp $(WITH_CONFIG)

.PHONY: train-deepspeed-tb
train-deepspeed-tb: $(READY) ## train-deepspeed, with TensorBoard
	$(SFT) train --tensorboard $(ALL) --engine deepspeed_z2 $(WITH_CONFIG)

.PHONY: resume
resume: $(READY) ## Go on from the newest checkpoint, on NGPU processes
	$(SFT) train --resume $(SOME) $(WITH_CONFIG)

.PHONY: tensorboard
tensorboard: $(READY) ## Start TensorBoard on 127.0.0.1 and a free port
	$(SFT) tensorboard --runs "$(RUNS)"

.PHONY: tb-stop
tb-stop: $(READY) ## Stop it
	$(SFT) tensorboard --runs "$(RUNS)" --stop

##@ After training

.PHONY: eval
eval: $(READY) ## Judge on held-out rows; SPLIT=val|test LIMIT=100
	$(SFT) eval --split "$(if $(SPLIT),$(SPLIT),val)" $(if $(LIMIT),--limit "$(LIMIT)") $(WITH_CONFIG)

.PHONY: infer
infer: $(READY) ## Chat with the trained model
	$(SFT) infer $(WITH_CONFIG)

.PHONY: infer-batch
infer-batch: $(READY) ## Answer a file of prompts: IN=in.jsonl OUT=out.jsonl
	$(if $(IN),,$(error IN=questions.jsonl is required))$(SFT) infer --input "$(IN)" $(if $(OUT),--output "$(OUT)") $(WITH_CONFIG)

.PHONY: merge
merge: $(READY) ## Add the adapter into its base; DTYPE=bfloat16 OUT=folder
	$(SFT) merge $(if $(DTYPE),--dtype "$(DTYPE)") $(if $(OUT),--output "$(OUT)") $(WITH_CONFIG)

.PHONY: merge-test
merge-test: $(READY) ## Compare the merged model with the adapter model
	$(SFT) merge-test $(if $(OUT),--output "$(OUT)") $(WITH_CONFIG)

##@ Develop

.PHONY: test
test: $(READY) ## Run the whole default test suite; ARGS="-k planner"
	$(PY) -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile $(ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## Run the tests that need a GPU
	$(PY) -m pytest -m gpu $(ARGS)

.PHONY: test-cluster
test-cluster: $(READY) ## Run the tests on a SLURM and two hosts made here (root)
	bash tests/cluster/install.sh
	$(PY) -m pytest -m cluster $(ARGS)

.PHONY: check-code
check-code: $(READY) ## Lint, format check, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: bench-sizing
bench-sizing: $(READY) ## Predicted against measured memory, on the CPU
	$(PY) -m benchmarks.sizing $(ARGS)

.PHONY: bench-sizing-gpu
bench-sizing-gpu: $(READY) ## The same on a GPU, planned runs too; nine minutes
	$(PY) -m benchmarks.sizing_gpu $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(READY) ## Speed on a GPU, beside plain TRL; nine minutes
	$(PY) -m benchmarks.throughput $(ARGS)

.PHONY: bench-scaling
bench-scaling: $(READY) ## Speed-up and communication on NGPU="1 2 4 8" processes
	$(PY) -m benchmarks.scaling $(if $(NGPU),--processes "$(NGPU)") $(ARGS)

.PHONY: bench-faults
bench-faults: $(READY) ## How fast a run ends after each kind of fault
	$(PY) -m benchmarks.faults $(ARGS)

.PHONY: clean
clean: ## Remove caches of the tools; data, runs and .venv stay
	rm -rf $(TOOL_CACHES)
	find sft_play tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: ## Remove also .venv, .cache and runs; needs CONFIRM=1
	$(if $(CONFIRM),,$(error this removes $(VENV), .cache, logs and $(RUNS) with all checkpoints; say CONFIRM=1))rm -rf $(TOOL_CACHES) "$(VENV)" .cache logs "$(RUNS)"

# The commands of SFT-Play. `make help` is generated from this file: "##@ group", "target: ## text", "#? SETTING" and
# "#! example".

.DEFAULT_GOAL := help

#! make train                                            the demo, no GPU needed
#! make plan MODEL=qwen3-8b GPU="RTX 4090"               what fits, and how fast
#! make train CONFIG=configs/run_lora.yaml ARGS="data.train_path=my.jsonl"
#? CONFIG=configs/demo.yaml         config of the run
#? ARGS="train.learning_rate=1e-4"  settings that override the config
#? NGPU=2                           number of GPUs or processes
#? MODEL=qwen3-8b GPU="RTX 4090"    what to plan, and on which GPU
#? CONTEXT=max                      longest row that fits, or check a length
#? ROWS=5000 TOKENS=1500            plan without data: rows, median length
#? LENGTHS=lognormal:1500:6000      or median and 95th percentile of lengths
#? IMAGES=2 PIXELS=1024x768         images of each row
#? GPU_HOUR=2.5                     price of a GPU hour, for the cost of a run
#? WHY=1                            explain every choice of a plan
#? MODE=qlora                       training method: full, lora or qlora
#? OFFLOAD=ram                      keep weights, gradients and states in RAM
#? RUN=name                         name of a run, new or trained
#? RUNS="one two"                   runs to compare; for others their folder
#? ZERO=3                           stage of DeepSpeed's ZeRO: 2 or 3
#? PROBE=search                     time several plans, use the fastest
#? ALLOW=train.max_steps            resume although this setting changed
#? NODES=2                          number of machines (multi-node)
#? EXTRAS=export,documents          optional packages to install
#? V=1                              show commands, and where a start's time goes
#? PUBLIC=1 CONFIRM=1 FORCE=1       publish, delete, overwrite
# What publishes, deletes or overwrites is typed, and never taken from the environment.
AS_TYPED = CONFIRM FORCE OUT PUBLIC REMOVE REPO
$(foreach name,$(AS_TYPED),$(if $(findstring environment,$(origin $(name))),$(eval override $(name) =)))
# From where runs would be removed because of the environment.
$(foreach name,RUNS VENV,$(if $(findstring environment,$(origin $(name))),$(eval INHERITED += $(name))))
# What a person types is taken as it is: make expands no $ in it, and the shell gets it in single quotes, so that
# neither runs any of it. Only a line break would end a recipe's line, so it is refused.
TYPED = ACCOUNT AGAINST ALLOW ARGS AUTO CHAT CONFIG CONFIRM CONTEXT DTYPE ENGINE EXTRAS FORCE FORMAT GPU GPU_HOUR IMAGES IN LENGTHS LIMIT MASTER_ADDR MASTER_PORT MINUTES MODE MODEL NGPU NODES \
        OFFLOAD OUT PARTITION PIXELS PROBE PUBLIC PYTHON RANK REMOVE REPO ROWS RUN RUNS SBATCH SHOTS SHOW SPLIT STYLE TASKS TIME TOKENS V VENV WHAT WHY ZERO
$(foreach name,$(TYPED),$(if $(filter-out undefined,$(origin $(name))),$(eval override $(name) := $$(value $(name)))))
# Any other name would change nothing, unless it is for the environment: CUDA_VISIBLE_DEVICES=0, HF_HOME=/data.
UNKNOWN = $(strip $(foreach name,$(filter-out SHELL TORCH,$(.VARIABLES)),$(if $(findstring command,$(origin $(name))),$(if $(findstring _,$(name)),,$(name)))))
$(if $(UNKNOWN),$(error no such setting: $(UNKNOWN); `make help` lists the settings, e.g. NGPU=4))

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/demo.yaml
ARGS ?=
NGPU ?=
RUN ?=
NODES ?=
RUNS ?= runs

define NEWLINE


endef
one_line = $(if $(findstring $(NEWLINE),$(1)),$(error a setting has more than one line: $(1)),$(1))
quote = '$(subst ','\'',$(call one_line,$(1)))'
flag = $(if $(2),$(1) $(call quote,$(2)))
# Nothing for no, 1 for yes.
YES = 1 yes true
NO = 0 no false
yes = $(if $(filter-out $(YES) $(NO),$($(1)))$(word 2,$($(1))),$(error $(1)=$($(1)) is neither yes (1, yes, true) nor no (0, no, false, empty)),$(if $(filter $(YES),$($(1))),1))
required = $(if $($(1)),,$(error $(1)=$(2) is required))

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Messages name targets and settings of make, not commands and flags of sft-play.
export SFT_PLAY_MAKE = 1
# Commands are not echoed, unless V=1.
export V
$(if $(call yes,V),,$(eval .SILENT:))
# Libraries would mistake these for the rank of a single process.
unexport RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

PY = $(call quote,$(VENV)/bin/python)
SFT = $(PY) -m sft_play
SETTINGS = $(if $(MODE), $(call quote,tuning.mode=$(MODE)))$(if $(OFFLOAD), $(call quote,parallel.offload=$(OFFLOAD)))$(if $(PROBE), $(call quote,train.probe=$(PROBE)))$(if $(ALLOW), $(call quote,train.allow_changed=[$(ALLOW)]))$(OF_STAGE)
OVERRIDES = $(if $(RUN), $(call quote,output.name=$(RUN)))$(SETTINGS)
# ARGS is one string: the program splits it into words like a shell, but runs nothing.
MORE = $(if $(ARGS), $(call quote,--args=$(ARGS)))
WITH_CONFIG = --config $(call quote,$(CONFIG))$(OVERRIDES)$(MORE)
# After training, RUN names a run or its folder, with the settings that it was trained with.
FOLDER = $(if $(findstring /,$(RUN)),$(RUN:%/=%),$(RUNS)/$(RUN))
OF_RUN = $(if $(and $(RUN),$(filter file,$(origin CONFIG))),--config $(call quote,$(FOLDER)/config.resolved.yaml)$(SETTINGS)$(MORE),$(WITH_CONFIG))
# A plan for MODEL takes a config only if one was typed.
PLANNED = $(if $(and $(MODEL),$(filter file,$(origin CONFIG))),,--config $(call quote,$(CONFIG)))
# What a plan is asked of rows that are not here.
UNSEEN = $(if $(CONTEXT), $(call flag,--context,$(CONTEXT)))$(if $(ROWS), $(call flag,--rows,$(ROWS)))$(if $(TOKENS), $(call flag,--tokens,$(TOKENS)))$(if $(LENGTHS), $(call flag,--lengths,$(LENGTHS)))$(if $(IMAGES), $(call flag,--images,$(IMAGES)))$(if $(PIXELS), $(call flag,--pixels,$(PIXELS)))$(if $(GPU_HOUR), $(call flag,--gpu-hour,$(GPU_HOUR)))
# The arguments of tools that do not know --args: words at spaces.
WORDS = $(foreach word,$(call one_line,$(ARGS)),$(call quote,$(word)))
# pytest splits its variable into words like a shell.
PYTEST = $(if $(ARGS),PYTEST_ADDOPTS=$(call quote,$(ARGS)))
SOME = $(call flag,--processes,$(NGPU))
ALL = --processes $(call quote,$(if $(NGPU),$(NGPU),0))
STAGE = $(if $(ZERO),$(if $(filter 2 3,$(ZERO)),$(ZERO),$(error ZERO=$(ZERO) is neither 2 nor 3)),2)
OF_STAGE = $(if $(ZERO), $(call quote,parallel.engine=deepspeed_z$(STAGE)))
WITH_ENGINE = $(call flag,--engine,$(ENGINE))
ANSWER = $(SFT) infer $(call flag,--input,$(IN)) $(call flag,--output,$(OUT)) $(if $(call yes,FORCE),--force) $(OF_RUN)
MACHINE = --nodes $(call quote,$(NODES)) --node-rank $(call quote,$(RANK)) --master-addr $(call quote,$(MASTER_ADDR)) --master-port $(call quote,$(MASTER_PORT))
CLUSTER = --nodes $(call quote,$(NODES)) --gpus $(call quote,$(NGPU)) --partition $(call quote,$(PARTITION)) --time $(call quote,$(TIME)) --account $(call quote,$(ACCOUNT)) $(call quote,--sbatch=$(SBATCH))
READY = $(VENV)/.ready
TORCH = 2.13.0
# Packages without wheels.
BUILT = deepspeed rouge-score
TOOLS = .venv-tools
COMPILE = "$(TOOLS)/bin/uv" pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --no-emit-find-links
# An extra takes the versions of the other locks, and adds what is not in them. PyTorch pins its own triton.
ADDED = --constraint requirements.lock --constraint requirements-source.lock $$(sed -n 's/==.*//p' requirements.lock requirements-source.lock | sed 's/^/--no-emit-package /') --no-emit-package torch --no-emit-package triton
FLOOR = .venv-floor
# Compares with measurements that were made with the locked versions.
RECORDED = tests/unit/sizing/test_benchmark_results.py::test_steps_of_the_cpu_are_predicted_again_within_the_targets
# Other versions of pydantic write other numbers into the schema.
GENERATED = tests/unit/test_docs.py::test_generated_pages_are_what_make_docs_writes
# Optional packages, each with a lock of what it adds: the extras of pyproject.toml, but for mlflow and trackio: these need an
# older pyarrow and an older pillow than requirements.lock has.
LOCKED_EXTRAS = browser documents export float8 kernels liger lm-eval schedulefree site wandb
COMMA = ,
CHOSEN = $(subst $(COMMA), ,$(EXTRAS))
UNKNOWN_EXTRAS = $(filter-out $(LOCKED_EXTRAS),$(CHOSEN))
$(if $(UNKNOWN_EXTRAS),$(error no such extra: $(UNKNOWN_EXTRAS); there are: $(LOCKED_EXTRAS)))
INSTALL = $(PY) scripts/pip_install.py
LOCKED = --no-deps --require-hashes --no-build-isolation --use-pep517 --requirement
TOOL_CACHES = build dist .pytest_cache .ruff_cache .mypy_cache sft_play.egg-info

##@ Setup

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^#! / {printf "%s%s\n", m++ ? "" : "Examples\n", "  " substr($$0, 4)} /^#\? / {printf "%s%s\n", n++ ? "" : "\nSettings\n", "  " substr($$0, 4)} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z0-9][a-zA-Z0-9_.\/-]*:.*## / {printf "  %-21s %s\n", $$1, $$2}' "$(firstword $(MAKEFILE_LIST))"

.PHONY: install
install: $(READY) $(CHOSEN:%=$(VENV)/.ready-%) ## Create .venv with locked versions; EXTRAS=wandb,export
	:

# Locked wheels come first; nothing of them runs while they are installed. torch comes in whatever build the package index
# of this machine provides, so without hashes; its CUDA build brings NVIDIA's libraries. What has no wheels is built last, by
# locked tools. The DS_* variables keep DeepSpeed's setup from looking for a CUDA compiler; its operators are compiled on
# first use. Liger's kernels come along with a CUDA build, also where no GPU is: on login nodes, in images.
$(READY): requirements.lock requirements-source.lock locks/liger.lock pyproject.toml
	$(call quote,$(PYTHON)) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is required: make install PYTHON=python3.12")'
	@echo $(call quote,Installing into $(VENV) (first use only): a minute or two)
	$(call quote,$(PYTHON)) -m venv $(call quote,$(VENV))
	@echo '  1 of 3: packages of requirements.lock'
	$(INSTALL) --no-deps --require-hashes --only-binary :all: --requirement requirements.lock
	@echo '  2 of 3: PyTorch $(TORCH); with CUDA several gigabytes'
	$(INSTALL) torch==$(TORCH) $$($(PY) -m scripts.torch_index)
	@echo '  3 of 3: packages that are built here'
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) $(LOCKED) requirements-source.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
	if $(PY) -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then $(INSTALL) $(LOCKED) locks/liger.lock; fi
	touch $(call quote,$@)

# Some extras have packages without wheels, which locked tools build.
$(VENV)/.ready-%: locks/%.lock $(READY)
	@echo '  extra $*'
	$(INSTALL) $(LOCKED) $<
	touch $(call quote,$@)

.PHONY: gpu-info
gpu-info: $(READY) ## Show GPUs, what uses their memory, CPU and RAM
	$(SFT) gpu-info

.PHONY: memory-check
memory-check: $(READY) ## Show how much memory is free for a run
	$(SFT) memory-check

.PHONY: device-profile
device-profile: $(READY) ## Show how fast operations are on this machine
	$(SFT) device-profile$(MORE)

.PHONY: check
check: $(READY) ## Check config, data, model, devices, disk, versions
	$(SFT) check $(WITH_CONFIG)

.PHONY: setup-accelerate
setup-accelerate: $(READY) ## Run accelerate's wizard; AUTO=1 answers for you
	$(SFT) setup-accelerate $(if $(call yes,AUTO),--auto)

.PHONY: clean-cache
clean-cache: $(READY) ## Remove tokenized rows, traces, measurements, models
	$(SFT) clean-cache

##@ Data

.PHONY: prepare
prepare: $(READY) ## Tokenize and count; SHOW=3 prints annotated rows
	$(SFT) prepare $(call flag,--show,$(SHOW)) $(WITH_CONFIG)

.PHONY: process
process: $(READY) ## Step 1: convert rows to conversations
	$(SFT) process $(WITH_CONFIG)

.PHONY: style
style: $(READY) ## Step 2: add a system prompt, STYLE="..."
	$(call required,STYLE,"system prompt to add")$(SFT) style --style $(call quote,$(STYLE)) $(WITH_CONFIG)

.PHONY: render
render: $(READY) ## Step 3: render the text as the model sees it
	$(SFT) render $(WITH_CONFIG)

.PHONY: dapt-docx
dapt-docx: $(READY) ## Documents to raw text: IN=folder OUT=text.jsonl
	$(call required,IN,folder)$(call required,OUT,text.jsonl)$(SFT) dapt-docx --input $(call quote,$(IN)) --output $(call quote,$(OUT))$(if $(call yes,FORCE), --force)

##@ Training

.PHONY: plan
plan: $(READY) ## Predict memory and speed, e.g. MODEL=qwen3-8b GPU="L40S"
	$(SFT) plan $(if $(call yes,WHY),--why )$(call flag,--model,$(MODEL)) $(call flag,--gpu,$(GPU)) $(call flag,--gpus,$(NGPU)) $(PLANNED)$(UNSEEN)$(OVERRIDES)$(MORE)

.PHONY: probe
probe: $(READY) ## Measure the largest batch, compare with the prediction
	$(SFT) probe $(SOME) $(WITH_CONFIG)

.PHONY: train
train: $(READY) ## Train on one GPU or the CPU (default: the demo)
	$(SFT) train $(SOME) $(WITH_CONFIG)

.PHONY: train-distributed
train-distributed: $(READY) ## Train on all GPUs with DDP (without GPUs: 2 on CPU)
	$(SFT) train $(ALL) --engine ddp $(WITH_CONFIG)

.PHONY: train-deepspeed
train-deepspeed: $(READY) ## Train on all GPUs with DeepSpeed: ZERO=2 or 3
	$(SFT) train $(ALL) --engine deepspeed_z$(STAGE) $(WITH_CONFIG)

.PHONY: train-fsdp
train-fsdp: $(READY) ## Train a model larger than one GPU, divided by FSDP2
	$(SFT) train $(ALL) --engine fsdp2 $(WITH_CONFIG)

.PHONY: train-multinode
train-multinode: $(READY) ## Train multi-node: NODES=2 RANK=0 MASTER_ADDR=10.0.0.1
	$(SFT) train $(MACHINE) $(ALL) $(WITH_ENGINE) $(WITH_CONFIG)

.PHONY: train-slurm
train-slurm: $(READY) ## Submit a SLURM job: NODES=2 NGPU=4 PARTITION= TIME=
	$(SFT) slurm $(CLUSTER) $(WITH_ENGINE) $(WITH_CONFIG)

.PHONY: train-tb
train-tb: $(READY) ## train, with TensorBoard while it runs
	$(SFT) train --tensorboard $(SOME) $(WITH_CONFIG)

.PHONY: train-distributed-tb
train-distributed-tb: $(READY) ## train-distributed, with TensorBoard
	$(SFT) train --tensorboard $(ALL) --engine ddp $(WITH_CONFIG)

.PHONY: train-deepspeed-tb
train-deepspeed-tb: $(READY) ## train-deepspeed, with TensorBoard
	$(SFT) train --tensorboard $(ALL) --engine deepspeed_z$(STAGE) $(WITH_CONFIG)

.PHONY: train-fsdp-tb
train-fsdp-tb: $(READY) ## train-fsdp, with TensorBoard
	$(SFT) train --tensorboard $(ALL) --engine fsdp2 $(WITH_CONFIG)

.PHONY: resume
resume: $(READY) ## Continue from the latest checkpoint (NGPU=2 for two)
	$(SFT) train --resume $(SOME) $(OF_RUN)

.PHONY: tensorboard
tensorboard: $(READY) ## Start TensorBoard on 127.0.0.1, on a free port
	$(SFT) tensorboard --runs $(call quote,$(RUNS))

.PHONY: tb-stop
tb-stop: $(READY) ## Stop TensorBoard
	$(SFT) tensorboard --runs $(call quote,$(RUNS)) --stop

.PHONY: studio
studio: $(READY) ## Show runs, live curves and plans as local web pages
	$(SFT) studio --runs $(call quote,$(RUNS))

##@ After training

.PHONY: eval
eval: $(READY) ## Compare base, adapter, merged; SPLIT=val|test LIMIT=100
	$(SFT) eval --split $(call quote,$(if $(SPLIT),$(SPLIT),val)) $(call flag,--limit,$(LIMIT)) $(OF_RUN)

.PHONY: eval-lm
eval-lm: $(READY) ## Run lm-eval: TASKS=a,b LIMIT=10 WHAT=base IN=dir CHAT=1
	$(call required,TASKS,hellaswag)$(SFT) eval-lm --tasks $(call quote,$(TASKS)) $(call flag,--what,$(WHAT)) $(call flag,--input,$(IN)) $(call flag,--limit,$(LIMIT)) $(call flag,--shots,$(SHOTS)) $(if $(call yes,CHAT),--chat) $(OF_RUN)

.PHONY: infer
infer: $(READY) ## Chat with the trained model, or as infer-batch with IN=
	$(ANSWER)

.PHONY: infer-batch
infer-batch: $(READY) ## Answer a file of prompts: IN=in.jsonl OUT=out.jsonl
	$(call required,IN,questions.jsonl)$(ANSWER)

.PHONY: merge
merge: $(READY) ## Merge the adapter into its base; DTYPE=bfloat16 OUT=dir
	$(SFT) merge $(call flag,--dtype,$(DTYPE)) $(call flag,--output,$(OUT)) $(OF_RUN)

.PHONY: merge-test
merge-test: $(READY) ## Compare the merged model with the adapter model
	$(SFT) merge-test $(call flag,--output,$(OUT)) $(OF_RUN)

.PHONY: report
report: $(READY) ## Write a run as an HTML page: RUN=name (default: latest)
	$(SFT) report --runs $(call quote,$(RUNS)) $(if $(RUN),$(call quote,$(RUN)))

.PHONY: compare
compare: $(READY) ## Put runs side by side on an HTML page: RUNS="one two"
	$(if $(filter file,$(origin RUNS)),$(error RUNS="one two" is required))$(SFT) compare $(call flag,--output,$(OUT)) $(if $(call yes,FORCE),--force )$(foreach name,$(call one_line,$(RUNS)),$(call quote,$(name)))

.PHONY: runs
runs: $(READY) ## List runs, with scores and notes; REMOVE="old older"
	$(if $(and $(REMOVE),$(filter RUNS,$(INHERITED))),$(error REMOVE takes no RUNS from the environment; type it: make runs RUNS=<folder> REMOVE=<name>))$(SFT) runs --runs $(call quote,$(RUNS))$(if $(REMOVE), $(if $(call yes,CONFIRM),--yes )-- remove $(foreach name,$(call one_line,$(REMOVE)),$(call quote,$(name))))

.PHONY: export
export: $(READY) ## Write a GGUF and a Modelfile; DTYPE=q8_0 OUT=dir
	$(SFT) export $(call flag,--format,$(FORMAT)) $(call flag,--dtype,$(DTYPE)) $(call flag,--output,$(OUT)) $(OF_RUN)

.PHONY: push
push: $(READY) ## Upload to REPO=user/name, private; WHAT=merged PUBLIC=1
	$(call required,REPO,user/name)$(SFT) push --repo $(call quote,$(REPO)) $(call flag,--what,$(WHAT)) $(if $(call yes,PUBLIC),--public) $(OF_RUN)

##@ Development

# In the order of folders, so that the long tests of tests/integration come early; xdist would begin with the files that
# have the most tests, and end with minutes of one long test while the other workers have nothing to do.
SIDE_BY_SIDE = --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
WHOLE = not cluster and not faults and not slow and not browser
.PHONY: test
test: $(READY) ## Run the everyday tests; ARGS="-k planning"
	$(PYTEST) $(PY) -m pytest $(SIDE_BY_SIDE)

.PHONY: test-all
test-all: $(READY) ## Run these tests and the thorough ones
	$(PYTEST) $(PY) -m pytest -m '$(WHOLE)' $(SIDE_BY_SIDE)

.PHONY: test-thorough
test-thorough: $(READY) ## Run only the tests that test-all adds to make test
	$(PYTEST) $(PY) -m pytest -m 'thorough and $(WHOLE)' $(SIDE_BY_SIDE)

.PHONY: test-changed
test-changed: $(READY) ## Run the unit tests closest to a change; AGAINST=main
	$(PYTEST) $(PY) -m scripts.changed_tests $(call flag,--against,$(AGAINST))

.PHONY: test-floor
test-floor: $(FLOOR)/.ready ## Run the unit tests with the lowest allowed versions
	$(PYTEST) "$(FLOOR)/bin/python" -m pytest tests/unit --deselect $(RECORDED) --deselect $(GENERATED)

$(FLOOR)/.ready: $(READY) pyproject.toml scripts/floor_requirements.py
	rm -rf "$(FLOOR)"
	$(call quote,$(PYTHON)) -m venv "$(FLOOR)"
	$(PY) scripts/floor_requirements.py >"$(FLOOR)/floor.txt"
	"$(FLOOR)/bin/python" -m pip install --constraint "$(FLOOR)/floor.txt" "setuptools>=77" torch
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$(FLOOR)/bin/python" -m pip install --no-build-isolation --use-pep517 --requirement "$(FLOOR)/floor.txt"
	"$(FLOOR)/bin/python" -m pip install --no-deps --no-build-isolation --editable .
	touch "$@"

.PHONY: test-gpu
test-gpu: $(READY) ## Run the tests that need a GPU
	PYTEST_ADDOPTS=$(call quote,-m gpu $(ARGS)) $(PY) -m pytest tests/gpu

.PHONY: test-cluster
test-cluster: $(READY) ## Test on a local SLURM and two virtual hosts (as root)
	bash tests/cluster/install.sh
	PYTEST_ADDOPTS=$(call quote,-m cluster $(ARGS)) $(PY) -m pytest

.PHONY: test-faults
test-faults: $(READY) ## Run the long tests; continues where it was interrupted
	PYTEST_ADDOPTS=$(call quote,-m "(faults or slow) and not cluster and not browser" $(ARGS)) $(PY) -m pytest -p tests.resumed

.PHONY: test-browser
test-browser: $(READY) ## Test pages in Chromium, if it is installed
	PYTEST_ADDOPTS=$(call quote,-m browser $(ARGS)) $(PY) -m pytest tests/integration/test_browser.py

.PHONY: check-code
check-code: $(READY) ## Lint, check formatting, check types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: docs
docs: $(READY) ## Write the generated pages, tables and the JSON schema
	$(PY) -m scripts.docs

# The pages as they are, with the files that they link to: links work in the site as in the repository.
.PHONY: site
site: $(READY) $(VENV)/.ready-site ## Build the documentation as a website, in build/site
	rm -rf build/pages
	mkdir -p build/pages
	cp -R --parents *.md Dockerfile examples docs build/pages
	$(PY) -m zensical build --clean --strict
	@echo 'wrote       build/site/index.html'

.PHONY: report-image
report-image: $(READY) ## Draw the README's picture of RUN=name in Chromium
	$(PY) -m scripts.docs.report_image $(call quote,$(RUNS)/$(if $(RUN),$(RUN),demo))

.PHONY: cookbook
cookbook: $(READY) ## Plan the cookbook's tables; WHAT=fewest|longest
	$(if $(filter longest,$(WHAT)),,$(PY) -m scripts.docs.cookbook $(if $(filter fewest,$(WHAT)),--fewest))
	$(if $(filter fewest,$(WHAT)),,$(PY) -m scripts.docs.longest_rows)

.PHONY: lock
lock: $(TOOLS)/.ready ## Update the locks from pyproject.toml; ARGS=--upgrade
	$(COMPILE) --extra dev $(foreach name,torch $(BUILT),--no-emit-package $(name)) $(WORDS) --output-file requirements.lock pyproject.toml
	"$(TOOLS)/bin/python" scripts/requirements_of.py $(BUILT) | $(COMPILE) --no-deps $(WORDS) --output-file requirements-source.lock -
	$(foreach extra,$(LOCKED_EXTRAS),$(COMPILE) --extra $(extra) $(ADDED) $(WORDS) --output-file locks/$(extra).lock pyproject.toml$(NEWLINE)	):

.PHONY: audit
audit: $(TOOLS)/.ready ## Look for known vulnerabilities in locked packages
	"$(TOOLS)/bin/python" scripts/audit.py "$(TOOLS)/bin/pip-audit" --disable-pip --no-deps --requirement requirements.lock --requirement requirements-source.lock

$(TOOLS)/.ready: requirements-tools.txt
	$(call quote,$(PYTHON)) -m venv "$(TOOLS)"
	"$(TOOLS)/bin/python" -m pip install --requirement requirements-tools.txt
	touch "$@"

.PHONY: check-style
check-style: $(READY) ## Measure readability; AGAINST=main fails if it got worse
	$(PY) scripts/check_style.py $(call flag,--against,$(AGAINST)) $(WORDS)

.PHONY: bench-sizing
bench-sizing: $(READY) ## Compare predicted with measured memory on the CPU
	$(PY) -m benchmarks.sizing $(WORDS)

.PHONY: bench-context
bench-context: $(READY) ## Measure memory, or regret, of activation options
	$(PY) -m benchmarks.context $(WORDS)

.PHONY: bench-random
bench-random: $(READY) ## Compare predicted with measured memory of random runs
	$(PY) -m benchmarks.random_runs $(WORDS)

.PHONY: bench-sharding
bench-sharding: $(READY) ## Measure sharded steps: memory, seconds, regret
	$(PY) -m benchmarks.sharding $(WORDS)
	$(if $(ARGS),,$(PY) -m benchmarks.sharding_time)

.PHONY: bench-models
bench-models: $(READY) ## Train two steps of every architecture; write the page
	$(PY) -m benchmarks.architectures $(WORDS)

.PHONY: bench-sizing-gpu
bench-sizing-gpu: $(READY) ## Compare predicted with measured memory on a GPU
	$(PY) -m benchmarks.sizing_gpu $(WORDS)

.PHONY: bench-evidence
bench-evidence: $(READY) ## Compare predictions with steps others ran on GPUs
	$(PY) -m benchmarks.evidence $(WORDS)

.PHONY: bench-prepare
bench-prepare: $(READY) ## Measure memory of preparing data; ARGS=speed, ARGS=long
	$(PY) -m benchmarks.prepare $(WORDS)

.PHONY: bench-planner
bench-planner: $(READY) ## Compare the planner's choice with every other plan
	$(PY) -m benchmarks.planner $(WORDS)

.PHONY: bench-step
bench-step: $(READY) ## Show where a step's time goes, next to a bare loop
	$(PY) -m benchmarks.step_parts $(WORDS)

.PHONY: bench-step-time
bench-step-time: $(READY) ## Compare predicted with measured step time on the CPU
	$(PY) -m benchmarks.step_time $(WORDS)

.PHONY: bench-gpu
bench-gpu: $(READY) ## Compare speed on a GPU with plain TRL
	$(PY) -m benchmarks.throughput $(WORDS)

.PHONY: bench-sharded-gpu
bench-sharded-gpu: $(READY) ## Measure models that are divided among GPUs
	$(PY) -m benchmarks.sharded_gpu $(WORDS)

.PHONY: gpu-proof
gpu-proof: $(READY) $(VENV)/.ready-liger $(VENV)/.ready-kernels $(VENV)/.ready-float8 ## Measure runs, speed, memory and tests on a GPU
	$(PY) -m benchmarks.gpu_proof $(WORDS)

.PHONY: bench-scaling
bench-scaling: $(READY) ## Measure speed-up on NGPU="1 2 4 8" processes
	$(PY) -m benchmarks.scaling $(call flag,--processes,$(NGPU)) $(WORDS)

.PHONY: bench-peers
bench-peers: $(READY) ## Compare speed with other toolkits on the CPU; hours
	$(PY) -m benchmarks.peers $(WORDS)

.PHONY: bench-faults
bench-faults: $(READY) ## Measure how fast a run ends after each kind of fault
	$(PY) -m tests.stress.faults $(WORDS)

.PHONY: soak
soak: $(READY) ## Train under random faults for MINUTES=60
	$(PY) -m tests.stress.soak $(call flag,--minutes,$(MINUTES)) $(WORDS)

.PHONY: fuzz
fuzz: $(READY) ## Check that 10,000 broken inputs end in one error each
	$(PY) -m tests.stress.fuzz $(WORDS)

# A target that does not exist.
.DEFAULT:
	$(call quote,$(PYTHON)) -c 'import difflib, re, sys; names = re.findall(r"^([a-z][\w-]*): ", open(sys.argv[1]).read(), re.M); near = difflib.get_close_matches(sys.argv[2], names, 1); sys.exit("error: there is no target " + sys.argv[2] + ("; did you mean `make " + near[0] + "`?" if near else ";") + " `make help` lists all targets")' "$(firstword $(MAKEFILE_LIST))" $(call quote,$@)

.PHONY: clean
clean: ## Remove tool caches; keep data, runs and .venv
	rm -rf $(TOOL_CACHES)
	find sft_play tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: ## Also remove .venv, .cache and runs; needs CONFIRM=1
	$(if $(INHERITED),$(error clean-all takes no $(INHERITED) from the environment; type it: make clean-all $(firstword $(INHERITED))=<folder> CONFIRM=1))$(if $(call yes,CONFIRM),,$(error this removes $(VENV), .cache, logs and $(RUNS) with all checkpoints; add CONFIRM=1 to proceed))rm -rf $(TOOL_CACHES) $(call quote,$(VENV)) .cache logs $(call quote,$(RUNS))

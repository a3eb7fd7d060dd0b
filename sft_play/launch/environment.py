"""Variables of the environment that would change a run behind its plan: none of them reaches the libraries.

accelerate, transformers, DeepSpeed and PyTorch read them wherever nobody passed a value, and `accelerate
launch` sets some from its config file. What is removed is named by the banner of the run.
"""

import logging
import os
import sys
from collections.abc import Iterable, MutableMapping
from fnmatch import fnmatchcase
from pathlib import Path

from sft_play.machine.host import asked_threads

IGNORED_VARIABLE = "SFT_PLAY_IGNORED"  # names of the removed variables, for the ranks and the banner

PRECISION = "train.mixed_precision decides"
COMPILATION = "train.compile decides"
PLAN = "the plan decides"
DEEPSPEED = "the DeepSpeed config of the run decides"
ENGINE = "parallel.engine decides"
WITHOUT_CODE = "files of tensors are loaded without running code in them"
ONE_PROCESS = "WORLD_SIZE is not set, so this process is the only one"
NOT_MPI = "RANK and WORLD_SIZE decide, not a launcher of MPI"
PUBLISHES = "only `make push` publishes weights"

# The first pattern that matches a name counts.
SETTLED_ELSEWHERE = {
    "ACCELERATE_MIXED_PRECISION": PRECISION,
    "ACCELERATE_DOWNCAST_BF16": PRECISION,
    "ACCELERATE_FP8_*": PRECISION,
    "XLA_USE_BF16": PRECISION,
    "XLA_DOWNCAST_BF16": PRECISION,
    "NVIDIA_TF32_OVERRIDE": PRECISION,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": PRECISION,
    "ONEDNN_DEFAULT_FPMATH_MODE": PRECISION,
    "DNNL_DEFAULT_FPMATH_MODE": PRECISION,
    "ACCELERATE_DYNAMO_*": COMPILATION,
    "ACCELERATE_DEEPSPEED_*": DEEPSPEED,
    "ACCELERATE_CONFIG_DS_FIELDS": DEEPSPEED,
    "ACCELERATE_USE_CPU": "CUDA_VISIBLE_DEVICES decides",
    "ACCELERATE_USE_*": ENGINE,
    "FSDP_*": ENGINE,
    "MEGATRON_LM_*": ENGINE,
    "PARALLELISM_CONFIG_*": ENGINE,
    "ACCELERATE_*": PLAN,  # accumulation, clipping, the device
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "the plan counts on the allocator of PyTorch",
    "DEEPSPEED_TIMEOUT": "parallel.timeout_s decides",
    "PMI_RANK": NOT_MPI,
    "PMI_SIZE": NOT_MPI,
    "OMPI_COMM_WORLD_*": NOT_MPI,
    "MV2_COMM_WORLD_*": NOT_MPI,
    "MPI_LOCAL*": NOT_MPI,
    "LOCAL_SIZE": NOT_MPI,
    "WANDB_LOG_MODEL": PUBLISHES,
    "HF_MLFLOW_LOG_ARTIFACTS": PUBLISHES,
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": WITHOUT_CODE,
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": WITHOUT_CODE,
}
# accelerate's own, which change what it checks and says, and where its threads run.
KEPT = ("ACCELERATE_DEBUG_MODE", "ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH", "ACCELERATE_CPU_AFFINITY")
# A rank learns of DeepSpeed from its launcher; that they agree with the plan is checked (train/verify.py).
KEPT_BY_RANKS = ("ACCELERATE_USE_DEEPSPEED",)
# Defaults of torchrun's flags, such as PET_MAX_RESTARTS, and DeepSpeed's device; ours sets one of each for
# the ranks.
OF_THE_LAUNCHER = {"PET_*": "our launcher decides", "DS_ACCELERATOR": "CUDA_VISIBLE_DEVICES decides"}
# With one of them, accelerate joins a process group of one.
OF_A_RANK = dict.fromkeys(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ONE_PROCESS)
# What `accelerate launch` sets if nobody asked for anything, and what changes nothing.
NEUTRAL = {"", "no", "false", "none", "default", "auto", "0"}

# How OpenMP's threads wait for the next operation: they spin for a moment, and then sleep. How long is a
# compromise between an idle CPU and a shared one (benchmarks/results/thread_waiting_cpu.json). The policy is
# for other libraries than libgomp.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "6000"}


def set_environment(*, rank: bool = False) -> None:
    """Library settings that must be set before the libraries are imported; `rank`: in a rank of a run.

    Raises:
        ConfigError: the environment asks for more threads than a process can have.
    """
    asked_threads()
    settle_environment(os.environ, rank=rank)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL reports every run
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks processes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # names a package that nobody needs here
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers match nvidia-smi and gpu-info
    find_own_programs()


def find_own_programs() -> None:
    """Puts the folder of this Python on the PATH, last, where it is not: DeepSpeed builds with ninja."""
    programs, found = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if programs not in found.split(os.pathsep):
        os.environ["PATH"] = f"{found}{os.pathsep}{programs}"


def settle_environment(environment: MutableMapping[str, str], *, rank: bool) -> None:
    """Removes what would change the run behind the plan, and notes the names in IGNORED_VARIABLE.

    `rank` says whether this process is one, started by a launcher, and not the command itself.
    """
    reasons = _reasons(alone=environment.get("WORLD_SIZE", "1") == "1", rank=rank)
    kept = KEPT + (KEPT_BY_RANKS if rank else ())
    known = environment.get(IGNORED_VARIABLE, "").split(",") if rank else []
    found = [name for name in environment if name not in kept and _reason(name, reasons)]
    values = {name: environment.pop(name) for name in found}
    told = [name for name, value in values.items() if value.lower() not in NEUTRAL]
    if rank:  # `accelerate launch` sets these for its DeepSpeed config, which is ours
        told = [name for name in told if _reason(name, reasons) != DEEPSPEED]
    environment[IGNORED_VARIABLE] = ",".join(sorted({*filter(None, known), *told}))


def _reasons(*, alone: bool, rank: bool) -> dict[str, str]:
    return SETTLED_ELSEWHERE | ({} if rank else OF_THE_LAUNCHER) | (OF_A_RANK if alone else {})


def _reason(name: str, reasons: dict[str, str]) -> str | None:
    return next((text for pattern, text in reasons.items() if fnmatchcase(name, pattern)), None)


def ignored_lines(names: Iterable[str]) -> list[str]:
    """What the banner says about these removed variables: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name in names:
        reason = _reason(name, SETTLED_ELSEWHERE | OF_THE_LAUNCHER | OF_A_RANK)
        by_reason.setdefault(reason or PLAN, []).append(name)
    return [f"Ignored: {', '.join(found)}, since {reason}" for reason, found in by_reason.items()]

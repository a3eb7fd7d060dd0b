"""Variables of the environment that would change a run behind its plan: none of them reaches the libraries.

accelerate, transformers, DeepSpeed and PyTorch read them wherever nobody passed a value, and `accelerate
launch` sets some from its config file. What is removed is named by the banner of the run.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from sft_play.machine.allocator import set_allocator
from sft_play.machine.host import asked_threads, compilers_of, usable_cores
from sft_play.upstream.patching import lasting

IGNORED_VARIABLE = "SFT_PLAY_IGNORED"  # names of the removed variables, for the ranks and the banner

# What decides instead of each is in docs/reference/environment.md.
SETTLED_ELSEWHERE = (
    "ACCELERATE_*",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "FSDP_*",
    "MEGATRON_LM_*",
    "PARALLELISM_CONFIG_*",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "DEEPSPEED_TIMEOUT",
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_*",
    "MV2_COMM_WORLD_*",
    "MPI_LOCAL*",
    "LOCAL_SIZE",
    "WANDB_LOG_MODEL",
    "HF_MLFLOW_LOG_ARTIFACTS",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
)
# accelerate's own, which change what it checks and says, and where its threads run.
KEPT = ("ACCELERATE_DEBUG_MODE", "ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH", "ACCELERATE_CPU_AFFINITY")
# A rank learns of DeepSpeed from its launcher; that they agree with the plan is checked (train/verify.py).
KEPT_BY_RANKS = ("ACCELERATE_USE_DEEPSPEED",)
# `accelerate launch` sets these for its DeepSpeed config, which is ours.
OF_OUR_CONFIG = ("ACCELERATE_DEEPSPEED_*", "ACCELERATE_CONFIG_DS_FIELDS")
# Defaults of torchrun's flags, such as PET_MAX_RESTARTS, and DeepSpeed's device; ours sets one of each for
# the ranks.
OF_THE_LAUNCHER = ("PET_*", "DS_ACCELERATOR")
# With one of them and no WORLD_SIZE, accelerate joins a process group of one.
OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
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
    lasting(_as_it_was)
    settle_environment(os.environ, rank=rank)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL reports every run
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # and datasets and evaluate report what they load
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare() forks processes
    set_allocator()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # names a package that nobody needs here
    logging.getLogger("DeepSpeed").addFilter(_of_use)  # which sets its level itself
    if rank:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiling_processes(os.environ)))
    if not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers match nvidia-smi and gpu-info
    find_own_programs()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """After the block, variables and loggers are as before it."""
    before, said = dict(os.environ), logging.getLogger("bitsandbytes").level
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        logging.getLogger("bitsandbytes").setLevel(said)
        logging.getLogger("DeepSpeed").removeFilter(_of_use)


def _of_use(record: logging.LogRecord) -> bool:
    """Not that DeepSpeed, which is imported with other libraries, found no GPU: a notebook would show it."""
    return "Setting accelerator to CPU" not in record.getMessage()


def compiling_processes(environment: Mapping[str, str]) -> int:
    """How many this rank compiles in."""
    return compilers_of(usable_cores(), int(environment.get("LOCAL_WORLD_SIZE", "1")))


def find_own_programs() -> None:
    """Puts the folder of this Python on the PATH, last, where it is not: DeepSpeed builds with ninja."""
    programs, found = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if programs not in found.split(os.pathsep):
        os.environ["PATH"] = f"{found}{os.pathsep}{programs}"


def settle_environment(environment: MutableMapping[str, str], *, rank: bool) -> None:
    """Removes what would change the run behind the plan, and notes the names in IGNORED_VARIABLE.

    `rank` says whether this process is one, started by a launcher, and not the command itself.
    """
    patterns = SETTLED_ELSEWHERE + (() if rank else OF_THE_LAUNCHER)
    patterns += OF_A_RANK if environment.get("WORLD_SIZE", "1") == "1" else ()
    kept = KEPT + (KEPT_BY_RANKS if rank else ())
    values = {name: environment.pop(name) for name in list(environment) if _is_any(name, patterns, kept)}
    unasked = OF_OUR_CONFIG if rank else ()
    told = {name for name, value in values.items() if value.lower() not in NEUTRAL}
    known = environment.get(IGNORED_VARIABLE, "").split(",") if rank else []
    told = {*filter(None, known), *(name for name in told if not _is_any(name, unasked))}
    environment[IGNORED_VARIABLE] = ",".join(sorted(told))


def _is_any(name: str, patterns: Iterable[str], kept: Iterable[str] = ()) -> bool:
    return name not in kept and any(fnmatchcase(name, pattern) for pattern in patterns)

"""DeepSpeed's config, and the locks of its compiled extensions."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import psutil

from sft_play.resources import CONFIGS

AUTO = "auto"  # the trainer fills it in from its own arguments
BUCKET = 50_000_000  # elements
EVERY_STAGE = {"contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": BUCKET}
OF_STAGE: dict[int, dict[str, Any]] = {
    2: {"allgather_partitions": True, "allgather_bucket_size": BUCKET},
    3: {
        "sub_group_size": 10**9,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 0,
    },
}
BUILD_BEGINS_WITHIN_S = 30  # the most time between the creation of a lock and the start of the compiler


def config_file(stage: int) -> Path:
    """The shipped file of a stage of ZeRO, for `accelerate launch`: a copy of its `configuration`."""
    return CONFIGS / f"deepspeed_z{stage}.json"


def configuration(stage: int, trained_parameters: int | None = None) -> dict[str, Any]:
    """DeepSpeed's config for the trainer, with buckets no larger than the trained parameters, if known.

    With LoRA that matters: a bucket is allocated in full, so DeepSpeed's default of 5e8 elements wastes 1 to
    2 GB. If one bucket holds all gradients, communication starts when the backward pass ends, and overlapping
    would only cost a second bucket.
    """
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, **EVERY_STAGE, **OF_STAGE[stage]}
    if trained_parameters:
        zero["overlap_comm"] = zero["reduce_bucket_size"] < trained_parameters
        for name in {"reduce_bucket_size", "allgather_bucket_size"} & zero.keys():
            zero[name] = min(zero[name], trained_parameters)
    return {
        "zero_optimization": zero,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO} | ({"check_grad_overflow": True} if stage == 2 else {}),
        "fp16": {"enabled": AUTO},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def extensions_folder() -> Path:
    """Where PyTorch stores compiled extensions (torch.utils.cpp_extension)."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()


def clear_abandoned_locks(folder: Path) -> list[Path]:
    """Removes the locks of builds whose process was killed; returns the removed files.

    A build runs ninja in the folder of its lock, so a lock is stale if no process has that working directory.
    A recent lock is kept, since its build may not have started yet.
    """
    removed = []
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            is_old = time.time() - lock.stat().st_mtime > BUILD_BEGINS_WITHIN_S
            if is_old and not _is_working_directory(lock.parent):
                lock.unlink()
                removed.append(lock)
    return removed


def _is_working_directory(folder: Path) -> bool:
    """Whether some process has this working directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()) == folder.resolve():
                return True
    return False

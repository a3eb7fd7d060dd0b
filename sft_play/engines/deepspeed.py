"""DeepSpeed's JSON config, checked against the plan, and the locks of its compiled extensions."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import psutil

from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.resources import CONFIGS

UNPLANNED = ("zero_hpz_partition_size", "zero_quantized_weights", "mics_shard_size")  # settings of stage 3
AUTO = "auto"  # the trainer fills it in from its own arguments
BUILD_IS_SLOW_S = 2.0  # to load one that was compiled before takes less
BUILD_BEGINS_WITHIN_S = 30  # the most time between the creation of a lock and the start of the compiler


def config_file(stage: int) -> Path:
    """The shipped DeepSpeed config of a stage of ZeRO."""
    return CONFIGS / f"deepspeed_z{stage}.json"


def read_config(path: Path) -> dict[str, Any]:
    """Reads the JSON file.

    Raises:
        ConfigError: it does not exist, or is not a JSON object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"DeepSpeed config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"DeepSpeed config {path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"DeepSpeed config {path}: expected a JSON object; see {config_file(2)} for an example"
        )
    return tree


def check_config(
    tree: dict[str, Any], plan: Plan, stage: int, *, max_grad_norm: float, source: str = "DeepSpeed config"
) -> None:
    """Compares the file with the plan.

    Args:
        tree: the parsed file.
        plan: the plan of the run.
        stage: of ZeRO.
        max_grad_norm: train.max_grad_norm of the run.
        source: name of the file for messages.

    Raises:
        ConfigError: lists every field that contradicts the plan, or that DeepSpeed would misread.
    """
    problems = [*_quoted_numbers(tree, ""), *_contradictions(tree, plan, stage, max_grad_norm)]
    problems += _unsupported(tree, stage)
    if problems:
        raise ConfigError("\n  ".join([f"{source} does not match the run:", *problems]))


def checked_config(
    path: Path, plan: Plan, stage: int, *, max_grad_norm: float, trainable_parameters: int | None = None
) -> dict[str, Any]:
    """The checked file, ready for the trainer, with buckets no larger than the number of trained parameters.

    With LoRA that matters: a bucket is allocated in full, so DeepSpeed's default of 5e8 elements wastes 1 to
    2 GB. If one bucket holds all gradients, communication starts when the backward pass ends, and overlapping
    would only cost a second bucket.

    Args:
        path: the file.
        plan: the plan of the run.
        stage: of ZeRO.
        max_grad_norm: train.max_grad_norm of the run.
        trainable_parameters: number of trained parameters; None leaves the buckets as they are.

    Raises:
        ConfigError: the file cannot be read, or contradicts the plan.
    """
    tree = read_config(path)
    check_config(tree, plan, stage, max_grad_norm=max_grad_norm, source=str(path))
    zero = dict(tree["zero_optimization"])
    if trainable_parameters:
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            if isinstance(zero.get(name), int):
                zero[name] = min(zero[name], trainable_parameters)
        zero["overlap_comm"] = (
            bool(zero.get("overlap_comm")) and zero.get("reduce_bucket_size", 0) < trainable_parameters
        )
    return {**tree, "zero_optimization": zero}


def _quoted_numbers(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _quoted_numbers(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _quoted_numbers(item, f"{name}[{index}]")
    elif isinstance(value, str) and re.fullmatch(r"\s*[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?\s*", value):
        yield f'{name}: "{value}" is a string; write the number without quotes: {value.strip()}'


def _contradictions(tree: dict[str, Any], plan: Plan, stage: int, max_grad_norm: float) -> Iterator[str]:
    expected = {
        "train_micro_batch_size_per_gpu": (
            1,
            "DeepSpeed is handed one micro-batch at a time, its rows joined",
        ),
        "gradient_accumulation_steps": (plan.batch.accumulation, "the plan's accumulation steps"),
        "train_batch_size": (
            plan.batch.accumulation * plan.sharing.world_size,
            f"1 x {plan.batch.accumulation} x {plan.sharing.world_size} processes",
        ),
        "gradient_clipping": (max_grad_norm, "train.max_grad_norm"),
        "bf16.enabled": (plan.precision.autocast == "bf16", f"mixed precision is {plan.precision.autocast}"),
        "fp16.enabled": (plan.precision.autocast == "fp16", f"mixed precision is {plan.precision.autocast}"),
        "zero_optimization.stage": (stage, f"the engine {plan.sharing.engine} is ZeRO stage {stage}"),
    }
    for name, (value, reason) in expected.items():
        found = _at(tree, name)
        if found not in (AUTO, None, value) and not _is_quoted_number(found):
            yield f'{name} is {found}, but must be {value} ({reason}) or "{AUTO}"'
    if _at(tree, "zero_optimization.stage") is None:
        yield f"zero_optimization.stage is missing; it must be {stage}"


def _is_quoted_number(value: Any) -> bool:
    return isinstance(value, str) and any(_quoted_numbers(value, ""))


def _unsupported(tree: dict[str, Any], stage: int) -> Iterator[str]:
    for section, key in (("optimizer", "train.optimizer"), ("scheduler", "train.lr_schedule")):
        if section in tree:
            yield f"{section}: remove this section and set {key} in the run's config instead"
    for name in ("offload_optimizer", "offload_param"):
        path = _at(tree, f"zero_optimization.{name}.nvme_path")
        if isinstance(path, str) and not Path(path).is_dir():
            yield f"zero_optimization.{name}.nvme_path: {path} is not a folder"
        elif stage == 3 and _at(tree, f"zero_optimization.{name}") is not None:
            yield f"zero_optimization.{name}: remove it; parallel.offload=ram does that"
    for name in UNPLANNED if stage == 3 else ():
        if _at(tree, f"zero_optimization.{name}") is not None:
            yield f"zero_optimization.{name}: remove it; no plan knows what it does to memory"


def _at(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def extensions_folder() -> Path:
    """Where PyTorch stores compiled extensions (torch.utils.cpp_extension)."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()


@contextlib.contextmanager
def slow_builds_told(say: Callable[[str], None]) -> Iterator[None]:
    """Within it, an extension that DeepSpeed has not loaded after BUILD_IS_SLOW_S is said to be compiled."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    def told(builder: Any, *args: Any, **kwargs: Any) -> Any:
        text = f"DeepSpeed compiles its extension {builder.name}, once, which may take minutes"
        timer = Timer(BUILD_IS_SLOW_S, say, [text])
        timer.daemon = True
        timer.start()
        try:
            return load(builder, *args, **kwargs)
        finally:
            timer.cancel()

    OpBuilder.jit_load = told
    try:
        yield
    finally:
        OpBuilder.jit_load = load


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

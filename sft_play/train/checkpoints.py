"""Finds the checkpoint that a run resumes from, and checks that it can."""

import json
import re
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.plan import Plan
from sft_play.runlog import RunDir

STATE, WEIGHTS = (
    "trainer_state.json",
    ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"),
)


def step_of(path: Path) -> int | None:
    """The optimizer step in a folder name of the form checkpoint-<step>."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else None


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None if it can.

    An interrupted save lacks the trainer state, which is written last.
    """
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return f"{STATE} is missing or truncated"
    if state.get("global_step") != step_of(checkpoint):
        return f"{STATE} is from step {state.get('global_step')}"
    if not any((checkpoint / name).is_file() for name in WEIGHTS):
        return "there are no weights"
    if not (checkpoint / "optimizer.pt").is_file() and not list(checkpoint.glob("global_step*")):
        return "there is no optimizer state"
    return None


def shards_of(checkpoint: Path) -> list[Path]:
    """The files of ZeRO-2's optimizer state, one per rank that saved it, in rank order; else empty."""
    files = checkpoint.glob("global_step*/*zero_pp_rank_*_optim_states.pt")
    return sorted(files, key=lambda path: int(re.search(r"zero_pp_rank_(\d+)", path.name)[1]))  # type: ignore[index]


def is_split_as(checkpoint: Path, engine: str, processes: int) -> bool:
    """Whether the optimizer state is split as a run on this engine would save it.

    ZeRO-2 splits it by process; the other engines do not split it.

    Args:
        checkpoint: the folder.
        engine: none, ddp or deepspeed_z2.
        processes: number of processes that save into this folder: all of the run, or those of one machine
            if each has a run directory of its own.
    """
    return len(shards_of(checkpoint)) == (processes if engine == "deepspeed_z2" else 0)


def require_movable(checkpoint: Path, config: RunConfig, plan: Plan, processes: int) -> bool:
    """Whether the optimizer state must be converted while loading (convert.py).

    That is the case if another engine or world size saved it.

    Args:
        checkpoint: the folder.
        config: of the run that resumes.
        plan: of the run that resumes.
        processes: as for `is_split_as`.

    Raises:
        CheckpointError: its optimizer state cannot be converted; says how to resume.
    """
    if is_split_as(checkpoint, plan.engine, processes):
        return False
    if config.train.optimizer == "adamw":
        return True
    shards = len(shards_of(checkpoint))
    found = f"with ZeRO-2 on {shards} processes" if shards else "without ZeRO-2"
    command = f"train-deepspeed NGPU={shards}" if shards else f"train-distributed NGPU={plan.world_size}"
    raise CheckpointError(
        f"{checkpoint} was saved {found}, and the 8-bit state of train.optimizer={config.train.optimizer} "
        f'cannot be converted.\nResume with: make {command} ARGS="train.resume=auto"'
    )


def find_checkpoint(run: RunDir, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint that train.resume selects, and which newer ones were skipped and why.

    Raises:
        CheckpointError: train.resume is a path that cannot be resumed from.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = what_is_missing(Path(resume))
        if problem:
            raise CheckpointError(
                f"train.resume={resume}: {problem}; choose another one, or train.resume=auto for the newest"
            )
        return Path(resume), []
    passed_over: list[str] = []
    folders = [path for path in run.checkpoints.glob("checkpoint-*") if step_of(path) is not None]
    for path in sorted(folders, key=lambda path: step_of(path) or 0, reverse=True):
        problem = what_is_missing(path)
        if problem is None:
            return path, passed_over
        passed_over.append(f"{path.name} skipped: {problem}")
    return None, passed_over

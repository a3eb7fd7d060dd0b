"""Which checkpoint a run goes on from."""

import json
import re
from pathlib import Path

from sft_play.errors import CheckpointError
from sft_play.runlog import RunDir
from sft_play.sizing.planner import Plan

STATE, WEIGHTS = "trainer_state.json", ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")


def step_of(path: Path) -> int | None:
    """The optimizer step in a folder name of the form checkpoint-<step>."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else None


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None if it can. A save that was cut short lacks its state, written last."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return f"{STATE} is missing or cut"
    if state.get("global_step") != step_of(checkpoint):
        return f"{STATE} is of step {state.get('global_step')}"
    if not any((checkpoint / name).is_file() for name in WEIGHTS):
        return "there are no weights"
    if not (checkpoint / "optimizer.pt").is_file() and not list(checkpoint.glob("global_step*")):
        return "there is no optimizer state"
    return None


def require_same_split(checkpoint: Path, plan: Plan) -> None:
    """Optimizer state of ZeRO-2 is split by process; DDP and one process have it whole. Neither is converted into the other.

    Raises:
        CheckpointError: the checkpoint is of another engine, or of ZeRO-2 on another number of processes; says how to go on.
    """
    shards = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    wanted = plan.world_size if plan.engine == "deepspeed_z2" else 0
    if shards == wanted:
        return
    if shards:
        raise CheckpointError(
            f"{checkpoint} was saved with ZeRO-2 on {shards} processes, and its optimizer state cannot be read otherwise.\n"
            f'Go on with: make train-deepspeed NGPU={shards} ARGS="train.resume=auto"'
        )
    raise CheckpointError(
        f"{checkpoint} was saved without ZeRO-2, which cannot read its optimizer state.\n"
        f'Go on with: make train-distributed NGPU={plan.world_size} ARGS="train.resume=auto"'
    )


def find_checkpoint(run: RunDir, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint that train.resume means, and what was passed over and why.

    Raises:
        CheckpointError: a path was given that cannot be resumed from.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = what_is_missing(Path(resume))
        if problem:
            raise CheckpointError(f"train.resume={resume}: {problem}; take another one, or train.resume=auto for the newest")
        return Path(resume), []
    passed_over: list[str] = []
    folders = [path for path in run.checkpoints.glob("checkpoint-*") if step_of(path) is not None]
    for path in sorted(folders, key=lambda path: step_of(path) or 0, reverse=True):
        problem = what_is_missing(path)
        if problem is None:
            return path, passed_over
        passed_over.append(f"{path.name} passed over: {problem}")
    return None, passed_over

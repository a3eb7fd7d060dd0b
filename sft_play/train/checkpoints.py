"""The checkpoints of a run: which are whole, which one a run resumes from, and which are deleted."""

import contextlib
import re
import shutil
from pathlib import Path

from transformers import TrainerState

from sft_play.config.schema import RunConfig
from sft_play.errors import CheckpointError
from sft_play.manifest import find_damage, has_manifest
from sft_play.plan import Plan
from sft_play.runlog import RunDir
from sft_play.train.pickles import find_refused

STATE, WEIGHTS = (
    "trainer_state.json",
    ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json"),
)
INCOMPLETE = "incomplete"  # folder in which a checkpoint is written, and from which old ones are deleted
DAMAGED, STALE = "damaged", "stale"  # endings of the names of checkpoints that were set aside
KEPT_AT_LEAST = 2  # if the newest is damaged, there is one before it


def step_of(path: Path) -> int | None:
    """The optimizer step in a folder name of the form checkpoint-<step>."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else None


def by_step(run: RunDir) -> list[Path]:
    """The checkpoint folders of a run, oldest first; links are not followed."""
    found = [path for path in run.checkpoints.glob("checkpoint-*") if step_of(path) is not None]
    return sorted((path for path in found if not path.is_symlink()), key=lambda path: step_of(path) or 0)


def find_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None if it can.

    Checkpoints of earlier versions have no manifest: of these, only the structure is checked.
    """
    damage = find_damage(checkpoint) if has_manifest(checkpoint) else None
    return damage or what_is_missing(checkpoint) or find_refused(checkpoint)


def what_is_missing(checkpoint: Path) -> str | None:
    """Which part a checkpoint lacks; None if it has all."""
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, RecursionError):
        return f"{STATE} is missing or truncated"
    if state.global_step != step_of(checkpoint):
        return f"{STATE} is from step {state.global_step}"
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
        f"{checkpoint} was saved {found}, and the state of train.optimizer={config.train.optimizer} "
        f'cannot be converted.\nResume with: make {command} ARGS="train.resume=auto"'
    )


def newest_whole(run: RunDir, at_most: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be resumed from; damaged ones on the way to it are set aside.

    Args:
        run: its run directory.
        at_most: ignore those of later steps.

    Returns:
        The checkpoint, None if the run has saved none; and a line for each folder that was passed over.

    Raises:
        CheckpointError: the run has saved checkpoints, but none is left that can be resumed from.
    """
    passed_over = _ignored(run)
    for path in reversed(by_step(run)):
        if at_most is not None and (step_of(path) or 0) > at_most:
            continue
        problem = find_problem(path)
        if problem is None:
            return path, passed_over
        passed_over.append(f"{path.name} is damaged: {problem}; it was moved to {set_aside(path, DAMAGED)}")
    damaged = sorted(path.name for path in run.checkpoints.glob(f"checkpoint-*.{DAMAGED}*"))
    if at_most is None and (damaged or passed_over):
        reasons = "\n  ".join(["no checkpoint is left to resume from:", *(passed_over or damaged)])
        raise CheckpointError(
            f"{run.checkpoints}: {reasons}\nCopy a whole checkpoint there, or start again with `make train`, "
            "which moves this run aside"
        )
    return None, passed_over


def _ignored(run: RunDir) -> list[str]:
    """A line for each entry that looks like a checkpoint and is not looked into."""
    lines = []
    for path in sorted(run.checkpoints.glob("checkpoint-*")):
        if path.is_symlink():
            lines.append(f"{path.name} ignored: it is a symbolic link (train.resume=<its path> follows it)")
        elif not re.fullmatch(rf"checkpoint-\d+(\.({DAMAGED}|{STALE})(-\d+)?)?", path.name):
            lines.append(f"{path.name} ignored: its name is not checkpoint-<step>")
    return lines


def set_aside(checkpoint: Path, ending: str) -> str:
    """Renames a checkpoint, so that it is kept but not used; returns its new name."""
    count, target = 1, checkpoint.with_name(f"{checkpoint.name}.{ending}")
    while target.exists():
        count += 1
        target = checkpoint.with_name(f"{checkpoint.name}.{ending}-{count}")
    with contextlib.suppress(OSError):  # on a read-only disk it stays
        checkpoint.rename(target)
    return target.name


def set_aside_stale(run: RunDir, resumed: Path) -> list[str]:
    """Sets aside the checkpoints that a run resumed from an earlier or a foreign one would collide with.

    Returns:
        Their new names.
    """
    own = resumed.resolve().parent == run.checkpoints.resolve()
    step = step_of(resumed) or 0
    return [set_aside(path, STALE) for path in by_step(run) if not own or (step_of(path) or 0) > step]


def delete_old(run: RunDir, keep: int, best: Path | None) -> None:
    """Deletes all but the newest checkpoints and the best one.

    They are moved first, so that a process that is killed meanwhile leaves no part of a checkpoint.

    Args:
        run: its run directory.
        keep: number of the newest; at least two are kept.
        best: never deleted.
    """
    leaving = run.checkpoints / INCOMPLETE
    for path in by_step(run)[: -max(keep, KEPT_AT_LEAST)]:
        if best is None or path.name != best.name:
            leaving.mkdir(exist_ok=True)
            path.rename(leaving / path.name)
    shutil.rmtree(leaving, ignore_errors=True)

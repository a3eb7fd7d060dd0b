"""The checkpoints of a run: written whole or not at all; which are whole, and which are deleted.

Staged in checkpoints/incomplete/ -> every rank hashes its files while they are flushed to the disk
-> manifest -> one rename -> only then are older checkpoints deleted.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.engines.base import FILE_OF_RANK, Engine
from sft_play.engines.registry import ALONE, ENGINES, engine_of
from sft_play.errors import CheckpointError
from sft_play.files import publish
from sft_play.fingerprints import installed_versions
from sft_play.job import Job
from sft_play.manifest import (
    CARD,
    Entries,
    files_in,
    find_damage,
    has_manifest,
    hash_files,
    read_manifest,
    write_manifest,
)
from sft_play.model.weights.files import foreign_weights
from sft_play.plan import Plan
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make
from sft_play.train.pickles import UNUSED, find_refused
from sft_play.train.ranks import from_all
from sft_play.ui.console import warn

STATE = "trainer_state.json"
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
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


def going_on(run: RunDir, command: str) -> str:
    """What continues a run that has ended: this command, from its last checkpoint if it has one."""
    start = "continue from the last checkpoint" if by_step(run) else "start again, as there is no checkpoint"
    return f"{start}: {command}"


def find_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from; None if it can.

    Checkpoints of earlier versions have no manifest: of these, only the structure is checked.
    """
    damage = find_damage(checkpoint) if has_manifest(checkpoint) else None
    if damage:
        return damage
    try:
        engine = saved_by(checkpoint)
    except CheckpointError as error:
        return str(error)
    if foreign := foreign_weights(checkpoint):
        return f"{foreign}, no *.safetensors beside it"
    return what_is_missing(checkpoint, engine) or find_refused(checkpoint, engine)


def what_is_missing(checkpoint: Path, engine: Engine) -> str | None:
    """Which part a checkpoint that this engine saved lacks; None if it has all."""
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, RecursionError):
        return f"{STATE} is missing or truncated"
    if state.global_step != step_of(checkpoint):
        return f"{STATE} is from step {state.global_step}"
    if not any((checkpoint / name).is_file() for name in WEIGHTS):
        return "there are no weights"
    if not engine.state_files(checkpoint):
        return "there is no optimizer state"
    return None


def saved_by(checkpoint: Path) -> Engine:
    """The engine that saved a checkpoint: its manifest says so; of earlier versions, its files do.

    Raises:
        CheckpointError: this version has no such engine.
    """
    name = read_manifest(checkpoint).get("engine")
    if name is None:
        sharded = (engine for engine in ENGINES if engine.shards_state and engine.state_files(checkpoint))
        return next(sharded, ALONE)
    known = {engine.name: engine for engine in ENGINES}
    if name not in known:
        raise CheckpointError(f"{checkpoint} was saved with the engine {name}, which this version lacks")
    return known[name]


def is_split_as(checkpoint: Path, engine: Engine, processes: int) -> bool:
    """Whether the optimizer state is split as a run on this engine would save it.

    Some engines split it by process (`shards_state`): by those of the run, or of one machine if each has a
    run directory of its own. Errors are those of `saved_by`.
    """
    saved = saved_by(checkpoint)
    if not saved.loads_own_state:
        return False
    if not engine.shards_state:
        return not saved.shards_state
    return saved.name == engine.name and len(engine.state_files(checkpoint)) == processes


def require_movable(checkpoint: Path, config: RunConfig, plan: Plan, processes: int) -> bool:
    """Whether the optimizer state must be converted while loading: another engine or world size saved it.

    Raises:
        CheckpointError: its optimizer state cannot be converted; says how to resume.
    """
    if is_split_as(checkpoint, engine_of(plan.sharing.engine), processes):
        return False
    if "cut" in OPTIMIZERS[config.train.optimizer].divided:
        return True
    saved, found = saved_by(checkpoint), "in one piece"
    count, engine = plan.sharing.world_size, next(known for known in ENGINES if known.distributes)
    if saved.shards_state:
        count, engine = len(saved.state_files(checkpoint)), saved
        found = f"with {saved.label} on {count} processes"
    raise CheckpointError(
        f"{checkpoint} was saved {found}, and the state of train.optimizer={config.train.optimizer} "
        "cannot be converted.\nResume with: "
        + make("train", NGPU=count, ARGS=f"parallel.engine={engine.name} train.resume=auto")
    )


def newest_whole(run: RunDir, at_most: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be resumed from, up to a step; None if the run has saved none.

    Damaged ones on the way to it are set aside; there is a line for each folder that was passed over.

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
            f"{run.checkpoints}: {reasons}\nCopy a whole checkpoint there, or start again with "
            f"`{make('train')}`, which moves this run aside"
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
    """Sets aside what a run resumed from an earlier or a foreign checkpoint would collide with; new names."""
    own = resumed.resolve().parent == run.checkpoints.resolve()
    step = step_of(resumed) or 0
    return [set_aside(path, STALE) for path in by_step(run) if not own or (step_of(path) or 0) > step]


def delete_old(run: RunDir, keep: int, best: Path | None) -> None:
    """Deletes all but the newest checkpoints, at least two, and the best one.

    They are moved first, so that a process that is killed meanwhile leaves no part of a checkpoint.
    """
    leaving = run.checkpoints / INCOMPLETE
    for path in by_step(run)[: -max(keep, KEPT_AT_LEAST)]:
        if best is None or path.name != best.name:
            leaving.mkdir(exist_ok=True)
            path.rename(leaving / path.name)
    shutil.rmtree(leaving, ignore_errors=True)


class CheckpointWriter:
    """Publishes the checkpoints of a run. All ranks call its methods together."""

    def __init__(self, job: Job, settings: dict[str, object]) -> None:
        """`settings`: what decides the result of the run, which a resume compares (resume.py)."""
        self._job, self._engine = job, engine_of(job.plan.sharing.engine)
        self._facts = {
            "engine": job.plan.sharing.engine,
            "world_size": job.plan.sharing.world_size,
            "versions": installed_versions(),
            "settings": settings,
        }
        self.staging = job.run.checkpoints / INCOMPLETE
        """Folder in which the trainer writes checkpoint-<step>."""

    @contextlib.contextmanager
    def staged(self, state: TrainerState) -> Iterator[None]:
        """In the block, the trainer writes its files into the staging folder; after it they are published."""
        if self._job.keeps_files:
            shutil.rmtree(self.staging, ignore_errors=True)  # of a process that was killed
        from_all(None)
        yield
        self._publish(state)

    def _publish(self, state: TrainerState) -> None:
        job, name = self._job, f"checkpoint-{state.global_step}"
        staged, target = self.staging / name, job.run.checkpoints / name
        if state.best_model_checkpoint and Path(state.best_model_checkpoint).parent == self.staging:
            state.best_model_checkpoint = str(target)
        from_all(None)  # what a rank is still writing may have a temporary name
        if job.keeps_files:
            self._complete(staged, state)
        entries = self._entries_of_all(staged)
        if job.keeps_files:
            rest = [path for path in files_in(staged) if path not in entries]
            facts = {"step": state.global_step, **self._facts}
            write_manifest(staged, facts, entries | hash_files(staged, rest, flush=True))
            if target.exists():
                set_aside(target, STALE)
            publish(staged, target)
        from_all(None)  # no machine deletes its older ones before all have the new one
        if job.keeps_files:
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            delete_old(job.run, job.config.train.keep_checkpoints, best)

    def _complete(self, staged: Path, state: TrainerState) -> None:
        """Adds to the trainer's files what it does not write right, and removes what nobody reads."""
        state.save_to_json(str(staged / STATE))  # again: with the final path of the best checkpoint
        for name in (UNUSED, CARD):  # a card of PEFT or TRL has nothing but placeholders
            (staged / name).unlink(missing_ok=True)
        if not self._job.run.shared:
            self._engine.complete_checkpoint(staged)

    def _entries_of_all(self, staged: Path) -> Entries:
        """The entries of the files that each rank of this folder wrote, hashed and flushed by that rank."""
        ranks = self._job.ranks
        mine = [path for path in files_in(staged) if self._wrote(path)]
        machine = None if self._job.run.shared else ranks.rank // ranks.local_world_size
        everyone = from_all((machine, hash_files(staged, mine, flush=True)))
        return {path: entry for where, found in everyone if where == machine for path, entry in found.items()}

    def _wrote(self, path: str) -> bool:
        rank = FILE_OF_RANK.search(path)
        return int(rank[1]) == self._job.ranks.rank if rank else self._job.keeps_files

    def best_is_whole(self, state: TrainerState) -> bool:
        """Whether the weights of the best checkpoint are undamaged; if not, it says so and forgets it."""
        best = Path(str(state.best_model_checkpoint))
        damage = None
        if self._job.keeps_files and has_manifest(best):
            damage = find_damage(best, only=lambda name: name.endswith(".safetensors"))
        damage = next((found for found in from_all(damage) if found), None)
        if damage is None:
            return True
        state.best_model_checkpoint = None
        warn(f"the best checkpoint {best} is damaged: {damage}; the weights of the last step are kept")
        return False


class BestOfThisRun(TrainerCallback):
    """Looks for the best checkpoint of a resumed run beside the resumed one, wherever that is now."""

    def __init__(self, resumed: Path) -> None:
        recorded = read_json(resumed / STATE).get("best_model_checkpoint")
        self._best = resumed.parent / Path(recorded).name if recorded else None
        here = self._best is not None and (self._best / STATE).is_file() and not self._best.is_symlink()
        self._exists = all(from_all(here))  # on every machine

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Replaces the path that the checkpoint has; forgets the best one if it is gone."""
        best = self._best
        if best is None:
            return
        if self._exists:
            state.best_model_checkpoint = str(best)
            return
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None
        warn(f"the best checkpoint so far, {best.name}, is gone; a new one is chosen")

"""How a checkpoint is written: whole, or not at all.

Staged in checkpoints/incomplete/ -> every rank hashes its files while they are flushed to the disk
-> manifest -> one rename -> only then are older checkpoints deleted.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

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
    write_manifest,
)
from sft_play.runlog import console, read_json
from sft_play.train.checkpoints import INCOMPLETE, STALE, STATE, delete_old, set_aside
from sft_play.train.identity import settings_of
from sft_play.train.pickles import UNUSED
from sft_play.train.ranks import from_all

OF_A_RANK = re.compile(r"(?:zero_pp_rank_|rng_state_)(\d+)")  # in the names of files that each rank writes


class CheckpointWriter:
    """Publishes the checkpoints of a run. All ranks call its methods together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._facts = {
            "engine": job.plan.engine,
            "world_size": job.plan.world_size,
            "versions": installed_versions(),
            "settings": settings_of(job),
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
            # DeepSpeed writes it on the main rank only
            for folder in staged.glob("global_step*"):
                (staged / "latest").write_text(folder.name, encoding="utf-8")

    def _entries_of_all(self, staged: Path) -> Entries:
        """The entries of the files that each rank of this folder wrote, hashed and flushed by that rank."""
        ranks = self._job.ranks
        mine = [path for path in files_in(staged) if self._wrote(path)]
        machine = None if self._job.run.shared else ranks.rank // ranks.local_world_size
        everyone = from_all((machine, hash_files(staged, mine, flush=True)))
        return {path: entry for where, found in everyone if where == machine for path, entry in found.items()}

    def _wrote(self, path: str) -> bool:
        rank = OF_A_RANK.search(path)
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
        text = f"the best checkpoint {best} is damaged: {damage}; the weights of the last step are kept"
        console().print(f"  [yellow]{text}[/]")
        return False


class BestOfThisRun(TrainerCallback):
    """Looks for the best checkpoint of a resumed run beside the resumed one, wherever that is now."""

    def __init__(self, resumed: Path) -> None:
        recorded = read_json(resumed / STATE).get("best_model_checkpoint")
        self._best = resumed.parent / Path(recorded).name if recorded else None
        here = self._best is not None and (self._best / STATE).is_file() and not self._best.is_symlink()
        self._exists = all(from_all(here))  # on every machine

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Replaces the path that the checkpoint has; forgets the best one if it is gone."""
        best = self._best
        if best is None:
            return
        if self._exists:
            state.best_model_checkpoint = str(best)
            return
        state.best_model_checkpoint = state.best_metric = state.best_global_step = None
        console().print(f"  [yellow]the best checkpoint so far, {best.name}, is gone; a new one is chosen[/]")

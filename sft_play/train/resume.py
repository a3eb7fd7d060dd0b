"""The checkpoint that a run resumes from, verified and agreed on by all machines before it is loaded."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.errors import CheckpointError
from sft_play.job import Job
from sft_play.manifest import has_manifest
from sft_play.runlog import console, read_json
from sft_play.train.checkpoints import STATE, find_problem, newest_whole, require_movable, set_aside_stale
from sft_play.train.identity import require_same_run
from sft_play.train.ranks import from_all


@dataclass(frozen=True)
class Offer:
    """The newest whole checkpoint that a machine holds; step 0 if it holds none."""

    rank: int
    path: Path | None
    step: int = 0
    losses: str = ""  # digest of what the run has logged, the same on all machines that saved it
    lines: tuple[str, ...] = ()


def checkpoint_to_resume(job: Job) -> Path | None:
    """The checkpoint that train.resume selects; all ranks must call it. None to start from scratch.

    Raises:
        CheckpointError: there should be one, but none can be used.
        ConfigError: it belongs to a run with other settings or other rows.
    """
    if job.config.train.resume == "never":
        return None
    offers = _agreed_offers(job)
    for line in (line for offer in offers for line in offer.lines):
        console().print(f"  [yellow]{line}[/]")
    mine = next(offer for offer in reversed(offers) if offer.rank <= job.ranks.rank)
    checkpoint = mine.path
    if checkpoint is None:
        return None
    if not has_manifest(checkpoint):
        console().print(
            f"  [yellow]{checkpoint.name} has no manifest: an earlier version saved it, and damage to its "
            "files would not be noticed[/]"
        )
    for line in require_same_run(job, checkpoint):
        console().print(f"  [dim]changed since {checkpoint.name}: {line}[/]")
    moved = require_movable(checkpoint, job.config, job.plan, job.checkpoint_parts)
    note = "; optimizer state is converted while loading" if moved else ""
    console().print(f"  resuming from {checkpoint}{note}")
    return checkpoint


def clear_way(job: Job, checkpoint: Path | None) -> None:
    """Sets aside newer checkpoints than the resumed one; those that the run saves would collide with them."""
    if checkpoint is None or not job.keeps_files:
        return
    for name in set_aside_stale(job.run, checkpoint):
        console().print(f"  [yellow]{name}: set aside, since the run resumes from {checkpoint.name}[/]")


def _agreed_offers(job: Job) -> list[Offer]:
    """One offer of each folder, all of the same step.

    Machines with run directories of their own may have been killed while some had already published a
    checkpoint: then the newest one that all of them hold is taken.
    """
    first = offers = _offers(job, None)
    lines = [offer.lines for offer in offers]
    while job.config.train.resume == "auto" and len({offer.step for offer in offers}) > 1:
        offers = _offers(job, min(offer.step for offer in offers))
        lines = [said + offer.lines for said, offer in zip(lines, offers, strict=True)]
    same = len({(offer.step, offer.losses) for offer in offers}) == 1
    lost = offers[0].step == 0 and any(offer.step for offer in first)
    if lost or not same:
        held = [f"rank {offer.rank}: {offer.path or 'none'} ({offer.losses})" for offer in first]
        raise CheckpointError(
            "\n  ".join(["the machines do not hold the same checkpoint:", *held])
            + f"\nCopy what is missing in {job.run.checkpoints} from one machine to the others (with ZeRO-2 "
            "each has a part: add the files of the others, without overwriting), or put output.dir on a "
            "shared disk"
        )
    return [replace(offer, lines=said) for offer, said in zip(offers, lines, strict=True)]


def _offers(job: Job, at_most: int | None) -> list[Offer]:
    mine = _offer(job, at_most) if job.keeps_files else None
    return [offer for offer in from_all(mine) if offer is not None]


def _offer(job: Job, at_most: int | None) -> Offer:
    rank, resume = job.ranks.rank, job.config.train.resume
    if resume == "auto":
        path, lines = newest_whole(job.run, at_most)
    else:
        path, lines = Path(resume), []
        problem = find_problem(path)
        if problem:
            raise CheckpointError(
                f"train.resume={resume}: {problem}; choose another one, or train.resume=auto for the newest"
            )
    if path is None:
        return Offer(rank, None, lines=tuple(lines))
    state = read_json(path / STATE)
    history = state.get("log_history") or []
    losses = [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in history]
    digest = hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:8]
    return Offer(rank, path, state["global_step"], digest, tuple(lines))

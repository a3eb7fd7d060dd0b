"""The checkpoint that a run resumes from: verified, of the same run, and agreed on by all machines."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.data.stats import SPLITS
from sft_play.errors import CheckpointError, ConfigError
from sft_play.fingerprints import installed_versions
from sft_play.job import Job
from sft_play.manifest import has_manifest, read_manifest
from sft_play.model.weights.base_files import require_same_base
from sft_play.runlog import read_json
from sft_play.spelling import var
from sft_play.train.checkpoints import (
    STATE,
    by_step,
    find_problem,
    newest_whole,
    require_movable,
    set_aside_stale,
    step_of,
)
from sft_play.train.ranks import from_all
from sft_play.ui.console import console, warn


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
        ConfigError: it belongs to a run with other settings, other rows or another base.
    """
    if job.config.train.resume == "never":
        return None
    offers = _agreed_offers(job)
    mine = next(offer for offer in reversed(offers) if offer.rank <= job.ranks.rank)
    checkpoint = mine.path
    if checkpoint is None:
        console().print(f"  no checkpoint in {job.run.checkpoints}: training from the beginning")
        return None
    if not has_manifest(checkpoint):
        warn(
            f"{checkpoint.name} has no manifest: an earlier version saved it, and damage to its files would "
            "not be noticed"
        )
    if job.keeps_files:
        require_same_base(job.config.model, job.run)
    for line in require_same_run(job, checkpoint):
        console().print(f"  changed since {checkpoint.name}: {line}", style="dim")
    _require_steps_left(job, checkpoint)
    moved = require_movable(checkpoint, job.config, job.plan, job.checkpoint_parts)
    note = "; optimizer state is converted while loading" if moved else ""
    console().print(f"  resuming from {checkpoint}{note}")
    return checkpoint


def _require_steps_left(job: Job, checkpoint: Path) -> None:
    """Refuses a checkpoint of a later step than the run now has: its summary would be that of no training."""
    done, total = step_of(checkpoint) or 0, job.plan.schedule.total_steps
    if done > total:
        earlier = [each.name for each in by_step(job.run) if (step_of(each) or 0) <= total]
        other = f", or resume {earlier[-1]}: train.resume={earlier[-1]}" if earlier else ""
        raise ConfigError(
            f"{checkpoint} has {done:,} steps, and the run now ends after {total:,} (train.max_steps or "
            f"train.epochs): nothing is left to train. Set them to more{other}"
        )


def clear_way(job: Job, checkpoint: Path | None) -> None:
    """Sets aside newer checkpoints than the resumed one; those that the run saves would collide with them."""
    if checkpoint is None or not job.keeps_files:
        return
    for name in set_aside_stale(job.run, checkpoint):
        warn(f"{name}: set aside, since the run resumes from {checkpoint.name}")


def _agreed_offers(job: Job) -> list[Offer]:
    """One offer of each folder, all of the same step.

    Machines with run directories of their own may have been killed while some had already published a
    checkpoint: then the newest one that all of them hold is taken.
    """
    first = offers = _offers(job, None)
    while job.config.train.resume == "auto" and len({offer.step for offer in offers}) > 1:
        offers = _offers(job, min(offer.step for offer in offers))
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
    return offers


def _offers(job: Job, at_most: int | None) -> list[Offer]:
    """One offer of each folder, of a step up to this one; prints what was passed over."""
    mine = _offer(job, at_most) if job.keeps_files else None
    offers = [offer for offer in from_all(mine) if offer is not None]
    for line in (line for offer in offers for line in offer.lines):
        warn(line)
    return offers


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


# Of the train section; the plan decides further ones.
TRAIN = (
    "lr_schedule",
    "warmup_ratio",
    "decay_ratio",
    "max_grad_norm",
    "seed",
    "optimizer",
    "weight_decay",
    "neftune_noise_alpha",
    "router_aux_loss_coef",
    "float8",
)
ROWS = tuple(f"data.{split}_path" for split in SPLITS)  # compared by a hash
# The state of the checkpoint does not fit another value of these.
FIXED = ("model.name", "model.new_tokens", "tuning.", "train.optimizer", "train.weight_decay")


def settings_of(job: Job) -> dict[str, object]:
    """What decides the result of a run, by the setting that changes it; rows are there as their hash.

    How a step is cut, the engine, intervals and paths do not decide it.
    """
    config, plan = job.config, job.plan
    tuning: dict[str, object] = {"tuning.mode": config.tuning.mode}
    if config.tuning.mode != "full":
        tuning |= {f"tuning.lora.{name}": value for name, value in config.tuning.lora.model_dump().items()}
        if config.tuning.lora.init != "default":  # computed again, with the numbers of such a device
            tuning["tuning.lora.init"] = f"{config.tuning.lora.init} on {plan.device}"
    rows = {f"data.{split}_path": digest for split, digest in job.data.digests().items()}
    train = {f"train.{name}": getattr(config.train, name) for name in TRAIN}
    found = {
        "model.name": Path(config.model.name).name,  # its folder may have been moved
        "model.revision": config.model.revision,
        "model.new_tokens": config.model.new_tokens,
        "model.rope_scaling": config.model.model_dump()["rope_scaling"],
        "model.dtype": plan.precision.dtype,
        **rows,
        "data.sources": [share.weight for share in job.data.shares],
        **tuning,
        **train,
        "train.learning_rate": plan.schedule.learning_rate,
        "train.effective_batch_size": plan.batch.effective,
        "train.max_steps": plan.schedule.total_steps,
        "train.packing": plan.rows.packing,
        "train.mixed_precision": plan.precision.autocast,
    }
    return json.loads(json.dumps(found))


def differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Setting -> "1e-4 -> 2e-4", for those of both that differ."""
    changed = {name: (saved[name], now[name]) for name in saved if name in now and saved[name] != now[name]}
    return {
        name: "the rows are not the same" if name in ROWS else f"{was} -> {value}"
        for name, (was, value) in changed.items()
    }


def require_same_run(job: Job, checkpoint: Path) -> list[str]:
    """Checks that settings and rows are those of the checkpoint, except for train.allow_changed.

    Returns:
        What is different and allowed, for people; and versions of libraries.

    Raises:
        ConfigError: something else differs, or train.allow_changed names nothing that is compared.
    """
    manifest, now = read_manifest(checkpoint), settings_of(job)
    allowed = set(job.config.train.allow_changed)
    unknown = sorted(allowed - set(now))
    if unknown:
        raise ConfigError(
            f"train.allow_changed ({var(ALLOW='')}): {', '.join(unknown)} is not compared; allowed: "
            + ", ".join(now)
        )
    changed = differences(manifest.get("settings", {}), now)
    fixed = [name for name in changed if name.startswith(FIXED)]
    refused = [name for name in changed if name not in allowed or name in fixed]
    if refused:
        lines = [f"{name}: {changed[name]}" for name in refused]
        head = f"{checkpoint} belongs to a run with different settings:"
        remedy = f"Set them back, or continue with the new ones: {var(ALLOW=','.join(refused))}"
        if fixed:
            remedy = (
                f"Set them back, or start a new run ({var(RUN='<name>')}): {', '.join(fixed)} cannot change"
            )
        raise ConfigError("\n  ".join([head, *lines]) + f"\n{remedy}")
    here = installed_versions()
    versions = {name: here.get(name, "none") for name in manifest.get("versions", {})}
    upgrades = differences(manifest.get("versions", {}), versions)
    return [f"{name}: {text}" for name, text in (changed | upgrades).items()]

"""Whether a checkpoint belongs to the run that resumes from it: what decides the result is compared."""

import json
from pathlib import Path
from typing import Any

from sft_play.data.splits import SPLITS
from sft_play.errors import ConfigError
from sft_play.fingerprints import installed_versions
from sft_play.job import Job
from sft_play.manifest import read_manifest

# Of the train section; the plan decides further ones.
TRAIN = (
    "lr_schedule",
    "warmup_ratio",
    "max_grad_norm",
    "seed",
    "optimizer",
    "weight_decay",
    "neftune_noise_alpha",
)
ROWS = tuple(f"data.{split}_path" for split in SPLITS)  # compared by a hash
# The state of the checkpoint does not fit another value of these.
FIXED = ("model.name", "model.new_tokens", "tuning.", "train.optimizer", "train.weight_decay")


def settings_of(job: Job) -> dict[str, Any]:
    """What decides the result of a run, by the setting that changes it; rows are there as their hash.

    How a step is cut, the engine, intervals and paths do not decide it.
    """
    config, plan = job.config, job.plan
    tuning: dict[str, Any] = {"tuning.mode": config.tuning.mode}
    if config.tuning.mode != "full":
        tuning |= {f"tuning.lora.{name}": value for name, value in config.tuning.lora.model_dump().items()}
        if config.tuning.lora.init != "default":  # computed again, with the numbers of such a device
            tuning["tuning.lora.init"] = f"{config.tuning.lora.init} on {plan.device}"
    found = {
        "model.name": Path(config.model.name).name,  # its folder may have been moved
        "model.revision": config.model.revision,
        "model.new_tokens": config.model.new_tokens,
        "model.dtype": plan.dtype,
        **{f"data.{split}_path": digest for split, digest in job.data.digests().items()},
        "data.sources": [share.weight for share in job.data.shares],
        **tuning,
        **{f"train.{name}": getattr(config.train, name) for name in TRAIN},
        "train.learning_rate": plan.learning_rate,
        "train.effective_batch_size": plan.effective_batch_size,
        "train.max_steps": plan.total_steps,
        "train.packing": plan.packing,
        "train.mixed_precision": plan.mixed_precision,
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
            f"train.allow_changed (ALLOW=): {', '.join(unknown)} is not compared; allowed: {', '.join(now)}"
        )
    changed = differences(manifest.get("settings", {}), now)
    fixed = [name for name in changed if name.startswith(FIXED)]
    refused = [name for name in changed if name not in allowed or name in fixed]
    if refused:
        lines = [f"{name}: {changed[name]}" for name in refused]
        head = f"{checkpoint} belongs to a run with other settings:"
        remedy = f"Set them back, or continue with the new ones: ALLOW={','.join(refused)}"
        if fixed:
            remedy = f"Set them back, or start a new run (RUN=<name>): {', '.join(fixed)} cannot change"
        raise ConfigError("\n  ".join([head, *lines]) + f"\n{remedy}")
    here = installed_versions()
    versions = {name: here.get(name, "none") for name in manifest.get("versions", {})}
    upgrades = differences(manifest.get("versions", {}), versions)
    return [f"{name}: {text}" for name, text in (changed | upgrades).items()]

"""Loads a checkpoint's training state into another engine or world size than those that saved it.

Both engines speak of full tensors by the name of the parameter (engines/state.py). A checkpoint is never
rewritten: the ranks memory-map its files and read what they need parameter by parameter. fp32 master weights
are converted too.
"""

import pickle
from pathlib import Path
from typing import Any

from transformers import Trainer

from sft_play.engines.base import Engine
from sft_play.errors import CheckpointError
from sft_play.runlog import read_json
from sft_play.train.checkpoints import STATE, saved_by
from sft_play.train.pickles import load_mapped, only_tensors
from sft_play.upstream.torch import LAST_RATES


def load_moved(trainer: Trainer, checkpoint: Path, engine: Engine) -> None:
    """Loads optimizer state and schedule from a checkpoint of another engine or world size.

    The trainer's model, optimizer and schedule must exist already, as in a run from scratch.

    Raises:
        CheckpointError: it does not hold the state of this model, or one of its files is damaged.
    """
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer.optimizer  # type: ignore[union-attr]  # without accelerate's wrapper
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = {names[parameter]: parameter for parameter in engine.trained_by(optimizer)}
    saved = saved_by(checkpoint)
    try:
        with only_tensors(saved):
            state_of = saved.read_state(checkpoint, list(parameters), load_mapped)
        _load_schedule(trainer, checkpoint, optimizer.param_groups)
        engine.set_state(optimizer, parameters, state_of)
    except (KeyError, IndexError, RuntimeError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be converted for this run: {type(error).__name__} {error}\n"
            "Check that it was saved with the same model and tuning.mode; if so, resume from an earlier one "
            "with train.resume=<its folder>"
        ) from error
    engine.go_on_from(trainer.model_wrapped, read_json(checkpoint / STATE)["global_step"])


def rate_factors(schedule: Any) -> list[float]:
    """How many times the learning rate of the first group each group of parameters has."""
    first = schedule.base_lrs[0]
    return [base / first for base in schedule.base_lrs]


def use_own_rate(trainer: Trainer) -> None:
    """Puts the run's learning rate in place of the checkpoint's, at the same place of the schedule.

    They differ only if train.allow_changed has train.learning_rate.
    """
    schedule: Any = trainer.lr_scheduler
    rate = trainer.args.learning_rate
    if schedule.base_lrs[0] == rate:
        return
    bases = [rate * factor for factor in rate_factors(schedule)]
    share = schedule.lr_lambdas[0](schedule.last_epoch)
    schedule.base_lrs = bases
    setattr(schedule, LAST_RATES, [base * share for base in bases])
    for group, base in zip(trainer.optimizer.param_groups, bases, strict=False):  # type: ignore[union-attr]
        group["initial_lr"], group["lr"] = base, base * share


def _load_schedule(trainer: Trainer, checkpoint: Path, groups: list[dict[str, Any]]) -> None:
    """Restores the schedule, and the current learning rate of each group.

    The number of groups differs between engines, since DeepSpeed drops a group without parameters. The first
    group always has some, and the rates of the others are multiples of its own.
    """
    schedule: Any = trainer.lr_scheduler
    factors = rate_factors(schedule)[: len(groups)]
    saved = load_mapped(checkpoint / "scheduler.pt")
    rates = {key: [saved[key][0] * factor for factor in factors] for key in ("base_lrs", LAST_RATES)}
    lambdas = {"lr_lambdas": saved["lr_lambdas"][:1] * len(factors)}
    schedule.load_state_dict({**saved, **rates, **lambdas})
    for group, rate in zip(groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate

"""Converts a checkpoint's training state for another engine or world size while loading it.

It may come from a single process, DDP or ZeRO-2 on any number of processes, and go to any of these.

A checkpoint is never rewritten. The ranks memory-map its files and read what they need parameter by
parameter, by name: from ZeRO-2, a parameter is joined from the fragments that the saving ranks held; into
ZeRO-2, DeepSpeed takes this rank's fragment of it. fp32 master weights are converted too.
"""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Trainer

from sft_play.errors import CheckpointError
from sft_play.runlog import read_json
from sft_play.train.checkpoints import STATE, shards_of
from sft_play.train.pickles import load_mapped, only_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter, besides the number of steps

# parameter name -> {"weight", "exp_avg", "exp_avg_sq"} in the parameter's shape, fp32, and "step", a scalar
StateOf = Callable[[str], dict[str, Tensor]]


def load_moved(trainer: Trainer, checkpoint: Path) -> None:
    """Loads weights, optimizer state and schedule from a checkpoint of another engine or world size.

    The trainer's model, optimizer and schedule must exist already, as in a run from scratch.

    Raises:
        CheckpointError: it does not hold the state of this model, or one of its files is damaged.
    """
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer.optimizer  # type: ignore[union-attr]  # without accelerate's wrapper
    sharded = trainer.is_deepspeed_enabled
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimizer.bit16_groups if sharded else [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    try:
        state_of = (
            _read_zero2(checkpoint)
            if shards_of(checkpoint)
            else _read_whole(checkpoint, [names[p] for p in parameters])
        )
        _load_schedule(trainer, checkpoint, optimizer.param_groups)
        load = _into_zero2 if sharded else _into_whole
        load(optimizer, {names[parameter]: parameter for parameter in parameters}, state_of)
    except (KeyError, IndexError, RuntimeError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be converted for this run: {type(error).__name__} {error}\n"
            "Check that it was saved with the same model and tuning.mode; if so, resume from an earlier one "
            "with train.resume=<its folder>"
        ) from error
    if sharded:
        trainer.model_wrapped.global_steps = read_json(checkpoint / STATE)[
            "global_step"
        ]  # names the next save


def _read_zero2(checkpoint: Path) -> StateOf:
    """Joins the fragments that the ranks saved.

    DeepSpeed stores which part of a parameter lies where in each rank's partition.
    """
    files = shards_of(checkpoint)
    with only_tensors(deepspeed=True):
        shards = [load_mapped(path)["optimizer_state_dict"] for path in files]
    if len(shards) != max(shards[0]["partition_count"]):
        raise KeyError(f"found {len(shards)} of {max(shards[0]['partition_count'])} optimizer state files")
    shapes = load_mapped(files[0].parent / "mp_rank_00_model_states.pt")["param_shapes"]
    found = {name: (index, shape) for index, group in enumerate(shapes) for name, shape in group.items()}

    def state_of(name: str) -> dict[str, Tensor]:
        group, shape = found[name]
        held = [(shard, shard["param_slice_mappings"][group].get(name)) for shard in shards]
        fragments = [(shard, address) for shard, address in held if address is not None]

        def join(parts: list[Tensor]) -> Tensor:
            cuts = [
                part.narrow(0, at.start, at.numel) for part, (_, at) in zip(parts, fragments, strict=True)
            ]
            return torch.cat(cuts).view(shape)

        adam = [shard["base_optimizer_state"]["state"][group] for shard, _ in fragments]
        weight = join([shard["single_partition_of_fp32_groups"][group] for shard, _ in fragments])
        state = {"weight": weight, "step": adam[0]["step"]}
        for key in MOMENTS:
            state[key] = join([own[key] for own in adam])
        return state

    return state_of


def _read_whole(checkpoint: Path, names: Sequence[str]) -> StateOf:
    """Reads the state that a single process or DDP saved.

    It is keyed by the parameter's index in the optimizer, which is the same in every engine.
    """
    state = load_mapped(checkpoint / "optimizer.pt")["state"]
    if len(state) != len(names):
        raise KeyError(f"optimizer state for {len(state)} parameters, but this run trains {len(names)}")
    numbers = {name: number for number, name in enumerate(names)}
    files = [safe_open(path, "pt") for path in checkpoint.glob("*model*.safetensors")]
    found = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - not a dictionary

    def state_of(name: str) -> dict[str, Tensor]:
        # PEFT leaves out the adapter's name, and that a module is trained whole
        saved = name if name in found else name.replace(".modules_to_save", "").replace(".default", "")
        saved = saved if saved in found else saved.removesuffix(".weight")
        own = state[numbers[name]]
        return {
            "weight": found[saved].get_tensor(saved).float(),
            "step": own["step"],
            **{key: own[key] for key in MOMENTS},
        }

    return state_of


def _into_whole(optimizer: Any, parameters: dict[str, Tensor], state_of: StateOf) -> None:
    """Sets parameters of any shape, and their states of the same shape in torch's own AdamW."""
    whole = optimizer.state_dict()
    for number, (name, parameter) in enumerate(parameters.items()):
        state = state_of(name)
        parameter.data.copy_(state.pop("weight"))
        # copied, so that nothing refers to the mapped file
        whole["state"][number] = {key: value.clone() for key, value in state.items()}
    optimizer.load_state_dict(whole)


def _into_zero2(optimizer: Any, parameters: dict[str, Tensor], state_of: StateOf) -> None:
    """Sets parameters of any shape, and this rank's part of their states, which ZeRO-2 keeps flat."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    inner = optimizer.optimizer  # torch's, over one flat parameter per group: this rank's partition
    flats = [group["params"][0] for group in inner.param_groups]
    step = state_of(next(iter(parameters)))["step"]

    def empty(flat: Tensor) -> dict[str, Tensor]:
        return {"step": step.clone()} | {key: torch.zeros_like(flat) for key in MOMENTS}

    states = {number: empty(flat) for number, flat in enumerate(flats)}
    inner.load_state_dict({**inner.state_dict(), "state": states})
    # as after the first step: ties each parameter to its part of the state
    optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in parameters.items():
        state = {key: value.to(parameter.device) for key, value in state_of(name).items()}
        parameter.data.copy_(state["weight"])
        safe_set_full_fp32_param(parameter, state["weight"])
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, state[key], key)


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
    schedule._last_lr = [base * share for base in bases]
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
    rates = {key: [saved[key][0] * factor for factor in factors] for key in ("base_lrs", "_last_lr")}
    lambdas = {"lr_lambdas": saved["lr_lambdas"][:1] * len(factors)}
    schedule.load_state_dict({**saved, **rates, **lambdas})
    for group, rate in zip(groups, schedule._last_lr, strict=True):
        group["lr"] = rate

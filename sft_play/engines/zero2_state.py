"""ZeRO-2's part of AdamW's state, to and from the form that all engines share (state.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sft_play.engines.state import MOMENTS, Load, StateOf
from sft_play.upstream.deepspeed import tie_states


def read_parts(files: Sequence[Path], load: Load) -> StateOf:
    """Joins the fragments that the ranks saved, from the files of all of them in rank order.

    DeepSpeed stores which part of a parameter lies where in each rank's partition.
    """
    shards = [load(path)["optimizer_state_dict"] for path in files]
    if len(shards) != max(shards[0]["partition_count"]):
        raise KeyError(f"found {len(shards)} of {max(shards[0]['partition_count'])} optimizer state files")
    shapes = load(files[0].parent / "mp_rank_00_model_states.pt")["param_shapes"]
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


def set_part(optimizer: Any, parameters: Mapping[str, Tensor], state_of: StateOf) -> None:
    """Sets parameters of any shape, and this rank's part of their states, which ZeRO-2 keeps flat."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    inner = optimizer.optimizer  # torch's, over one flat parameter per group: this rank's partition
    flats = [group["params"][0] for group in inner.param_groups]
    step = state_of(next(iter(parameters)))["step"]

    def empty(flat: Tensor) -> dict[str, Tensor]:
        return {"step": step.clone()} | {key: torch.zeros_like(flat) for key in MOMENTS}

    states = {number: empty(flat) for number, flat in enumerate(flats)}
    inner.load_state_dict({**inner.state_dict(), "state": states})
    tie_states(optimizer)
    for name, parameter in parameters.items():
        state = {key: value.to(parameter.device) for key, value in state_of(name).items()}
        parameter.data.copy_(state["weight"])
        safe_set_full_fp32_param(parameter, state["weight"])
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, state[key], key)

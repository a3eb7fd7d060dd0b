"""FSDP2's torch half: a model divided among processes, its weights gathered again, and AdamW's state.

Parameters are split along their first dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from sft_play.engines.state import MOMENTS, StateOf, saved_weights
from sft_play.engines.stored import give_back_freed_memory, put_to_use, require_one_type
from sft_play.upstream.torch import dividing_integers, forget_shardings

FILE = "optimizer_shard_{rank}.safetensors"


def shard(
    units: Sequence[torch.nn.Module],
    device: str,
    *,
    gathered_dtype: str | None = None,
    from_first_rank: bool = False,
    replicas: int = 1,
    offload: bool = False,
    defers_exchange: bool = False,
    regathers: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Divides a model among all processes, in place; unit by unit, so that a device never holds all of it.

    With several replicas, the processes of each machine divide one, and gradients are reduced over machines.

    Args:
        units: gathered one at a time, the whole model last; on any device, the same in all processes.
        device: where its shards go, "cuda" or "cpu".
        gathered_dtype: that weights are gathered in; default their own.
        from_first_rank: take the weights of the first process, where others may have found different ones.
        replicas: how often the model is held, by as many processes each, which have consecutive ranks.
        offload: keep shards, their gradients and states in RAM, and copy a unit to the device for use.
        defers_exchange: whether gradients stay whole until the last micro-batch of a step.
        regathers: free the last unit after the forward pass, too, as ZeRO-3 does.
        reshard_after_forward: free the others; else all stay gathered until the backward pass is over.

    Raises:
        ConfigError: what is trained in a unit has several types, as torch finds out in the first pass.
    """
    mesh = process_mesh(device, replicas)
    policy = MixedPrecisionPolicy()
    if gathered_dtype:
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gathered_dtype), reduce_dtype=torch.float32)
    # from pinned memory, which a CPU has no use for, a GPU copies while it computes
    away = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    for unit in units:
        _put_to_use(unit, device, from_first_rank)
        require_one_type(each for each in unit.parameters() if not isinstance(each, DTensor))
        with dividing_integers():
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=away,
                reshard_after_forward=None if reshard_after_forward else False,
            )
        give_back_freed_memory()
    # accelerate enters it in all micro-batches of a step but the last
    units[-1].no_sync = partial(_without_exchange, units[-1], defers_exchange)  # type: ignore[assignment]
    if regathers:
        units[-1].set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]
    # an adapter around a model generates without the forward pass that would gather the last unit
    register_fsdp_forward_method(units[-1], "generate")
    # what stays gathered waits for a backward pass, which an evaluation does not have
    for unit in units[-1:] if reshard_after_forward else units:
        unit.register_forward_hook(lambda module, *_: None if torch.is_grad_enabled() else module.reshard())


@contextmanager
def _without_exchange(model: Any, whole: bool) -> Iterator[None]:
    """In the block, gradients are not reduced or, unless they are kept whole, not among replicas."""
    exchange = model.set_requires_gradient_sync if whole else model.set_requires_all_reduce
    exchange(False)
    try:
        yield
    finally:
        exchange(True)


def process_mesh(device: str, replicas: int = 1) -> DeviceMesh:
    """All processes [processes], or [replicas, processes that divide one]."""
    forget_shardings()  # of another mesh, such as a trace's
    return mesh_of(device, replicas)


def mesh_of(device: str, replicas: int) -> DeviceMesh:
    """The same, if its groups have the names that those of an earlier mesh of this shape had."""
    processes = distributed.get_world_size()
    if replicas == 1:
        return init_device_mesh(device, (processes,))
    return init_device_mesh(device, (replicas, processes // replicas), mesh_dim_names=("replica", "shard"))


def _put_to_use(unit: torch.nn.Module, device: str, from_first_rank: bool) -> None:
    """Makes what is not divided yet of a unit ready to be: cast, quantized, and as in the first process."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):
            put_to_use(parameter, device)
            if from_first_rank:
                sent = parameter.data.to(device)
                distributed.broadcast(sent, src=0)
                parameter.data.copy_(sent)


@contextmanager
def gathered(value: Tensor) -> Iterator[Tensor]:
    """In the block, a weight whole on the device; all processes enter it. What is not divided as it is."""
    if isinstance(value, DTensor):
        # torch gathers where the mesh is, which is not where offloaded parts are
        there: Any = value.detach().to(value.device_mesh.device_type)
        yield there.full_tensor()
    else:
        yield value.detach()


def save_parts(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], folder: Path) -> None:
    """Writes this process's part of AdamW's state, an empty part too; only the first of several replicas."""
    mesh = optimizer.param_groups[0]["params"][0].device_mesh
    if mesh.ndim > 1 and mesh.get_local_rank(0):
        return
    parts = {}
    for parameter in (weight for group in optimizer.param_groups for weight in group["params"]):
        state = optimizer.state[parameter]
        parts[f"{names[parameter]}:step"] = state["step"].reshape(1).cpu()
        for key in MOMENTS:
            parts[f"{names[parameter]}:{key}"] = state[key].to_local().contiguous().cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(parts, folder / FILE.format(rank=distributed.get_rank()))


def read_shards(files: Sequence[Path]) -> StateOf:
    """Joins the parts that the processes saved, from the files of all of them in rank order.

    Parts are cut along the first dimension, or flat. They have fp32 weights if the model's are 16-bit copies.

    Raises:
        KeyError: a file lacks a parameter.
    """
    parts = [safe_open(path, "pt") for path in files]
    saved = set(parts[0].keys())
    weight_of = saved_weights(files[0].parent)

    def state_of(name: str) -> dict[str, Tensor]:
        weight = weight_of(name).float()
        keys = ("weight", *MOMENTS) if f"{name}:weight" in saved else MOMENTS
        try:
            joined = {
                key: torch.cat([part.get_tensor(f"{name}:{key}") for part in parts]).view(weight.shape)
                for key in keys
            }
            step = parts[0].get_tensor(f"{name}:step")[0]
        except Exception as error:  # safetensors raises an error of its own
            raise KeyError(f"{name}: {error}") from error
        return {"weight": weight, "step": step, **joined}

    return state_of


def set_parts(optimizer: torch.optim.Optimizer, parameters: Mapping[str, DTensor], state_of: StateOf) -> None:
    """Sets this process's part of parameters and of their states, from whole tensors."""
    for name, parameter in parameters.items():
        state = state_of(name)
        set_weight(parameter, state["weight"])
        moments = {key: _part_of(parameter, state[key]) for key in MOMENTS}
        held = optimizer.state[parameter]
        held["step"] = state["step"].to(parameter.device, torch.float32, copy=True)  # as fused AdamW wants it
        for key, moment in moments.items():
            if key in held:
                held[key].copy_(moment)  # it may be on a disk
            else:
                held[key] = moment


@torch.no_grad()
def set_weight(parameter: DTensor, whole: Tensor) -> None:
    """Sets this process's part of a parameter from a whole tensor of its shape."""
    parameter.copy_(_part_of(parameter, whole))


def _part_of(like: DTensor, whole: Tensor) -> DTensor:
    """A tensor of the same shape, divided and placed as `like` is; nothing is sent."""
    whole = whole.detach().to(like.device, like.dtype)
    # torch divides tensors where the mesh is, which is not where offloaded ones are
    part: Any = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)

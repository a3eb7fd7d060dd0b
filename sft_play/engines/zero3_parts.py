"""ZeRO-3's torch half: a model divided by DeepSpeed, its weights gathered again, and AdamW's state.

A parameter is flattened, filled up, and cut into as many parts as there are processes. What a process holds
is `parameter.ds_tensor`; `parameter.data` is empty unless it is gathered.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, register_external_parameter
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from sft_play.engines.on_disk import moment_like, put_on_disk
from sft_play.engines.shards import FILE
from sft_play.engines.state import MOMENTS, StateOf
from sft_play.engines.stored import give_back_freed_memory, put_to_use, require_one_type
from sft_play.upstream.accelerate import forget_state
from sft_play.upstream.bitsandbytes import weights_saved_themselves
from sft_play.upstream.deepspeed import (
    forget_hooks,
    make_next_optimizer,
    units_hooked_alone,
    units_reduced_when_computed,
)
from sft_play.upstream.patching import lasting

# Of a launcher; ports and addresses are not needed in a group that is there already.
VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
BY_ACCELERATE = ("ACCELERATE_USE_DEEPSPEED", "MASTER_ADDR", "MASTER_PORT")  # that it sets
OPTIMIZER: Any = stage3.DeepSpeedZeroOptimizer_Stage3


def partition(
    units: Sequence[torch.nn.Module],
    device: str,
    cast_to: str | None,
    *,
    offload: bool = False,
    folder: str | None = None,
) -> None:
    """Divides a model among all processes, in place; tensor by tensor, each as the first process has it.

    Args:
        units: gathered one at a time, the whole model last; on any device, the same in all processes.
        device: where its parts go, "cuda" or "cpu".
        cast_to: 16-bit type of all weights; default their own.
        offload: keep its parts in RAM.
        folder: its parts are in mapped files there, not in RAM, and so is what is updated.

    Raises:
        ConfigError: what is trained has several types.
        StorageError: the folder has no room.
    """
    unset_hf_deepspeed_config()  # transformers would load the next model in a way of its own
    *inner, whole = units
    for unit in units:
        for parameter in unit.parameters():
            if hasattr(parameter, "ds_id"):
                continue
            put_to_use(parameter, device)
            parameter.data = parameter.to(device).data.contiguous()  # with the scales of 4-bit weights
            if cast_to and parameter.is_floating_point():
                parameter.data = parameter.data.to(getattr(torch, cast_to))
        undivided: list[Any] = [each for each in unit.parameters() if not hasattr(each, "ds_id")]
        # DeepSpeed moves what is trained to pinned memory of its own
        frozen = any(not each.requires_grad for each in undivided)
        pinned = offload and device == "cuda" and frozen and not folder
        Init(module=unit, remote_device="cpu" if offload else None, pin_memory=pinned)
        if folder:
            for each in undivided:
                each.ds_tensor.data = _on_disk(each.ds_tensor, Path(folder))
        give_back_freed_memory()
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, buffer.to(device))
    require_one_type(whole.parameters())
    in_units = {parameter for unit in inner for parameter in unit.parameters()}
    for unit in inner:
        set_z3_leaf_module(unit, True)
    for parameter in whole.parameters():
        if parameter not in in_units:
            register_external_parameter(whole, parameter)
    lasting(units_reduced_when_computed)
    lasting(units_hooked_alone)
    lasting(weights_saved_themselves)
    make_next_optimizer(TrainsFromFiles.of(Path(folder)) if folder else None)


def _on_disk(part: Tensor, folder: Path, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in a mapped file."""
    return put_on_disk(torch.empty_like(part, dtype=dtype), folder).copy_(part)


class TrainsFromFiles(OPTIMIZER):  # type: ignore[misc, valid-type]
    """DeepSpeed's optimizer, with the weights that it trains in mapped files, in their type and in fp32."""

    folder: Path

    @classmethod
    def of(cls, folder: Path) -> type:
        """The class for a folder: DeepSpeed calls it without one."""
        return type(cls.__name__, (cls,), {"folder": folder})

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """A vector for each group, which DeepSpeed would pin in RAM, and to which it moves the weights."""
        for group in self.trainable_param_groups:
            elements = sum(parameter.partition_numel() for parameter in group["params"])
            vector = put_on_disk(torch.empty(elements, dtype=self.dtype), self.folder)
            self.param_groups_fp16_flat_cpu_memory.append(vector)

    @torch.no_grad()
    def _create_fp32_partitions(self) -> None:
        """Copies of these in fp32, which are updated."""
        parts = zip(self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups_flat_id, strict=True)
        for part, ids in parts:
            updated = _on_disk(part, self.folder, torch.float32).requires_grad_()
            updated.ds_id = f"{ids[0]}_{ids[-1]}"  # type: ignore[attr-defined]
            self.fp32_partitioned_groups_flat.append(updated)
        self.subgroup_to_device = dict.fromkeys(range(len(self.fp32_partitioned_groups_flat)), "cpu")


@contextmanager
def alone() -> Iterator[None]:
    """A block in which this process, which no launcher has started, may train with DeepSpeed."""
    linear, given = torch.nn.functional.linear, set(os.environ)
    os.environ.update(VARIABLES)
    try:
        yield
    finally:
        torch.nn.functional.linear = linear  # in whose place Init has put its own, for good
        for name in {*VARIABLES, *BY_ACCELERATE} - given:
            os.environ.pop(name, None)
        forget_state()
        if comm.is_initialized():
            comm.destroy_process_group()  # with DeepSpeed's names for it


@contextmanager
def gathering(model: torch.nn.Module) -> Iterator[None]:
    """In the block, units gather their weights for a pass, if the model is not in training."""
    if "pre_bwd_fn" in vars(model):
        yield
        return
    hooks = DeepSpeedZeRoOffload(
        model,
        timers=None,
        ds_config=None,
        overlap_comm=False,
        prefetch_bucket_size=0,
        max_reuse_distance=0,
        param_persistence_threshold=0,
    )
    try:
        yield
    finally:
        hooks.destroy()
        forget_hooks(model)


@contextmanager
def gathered(value: Any) -> Iterator[Tensor]:
    """In the block, a weight whole on the device; all processes enter it. What is not divided as it is."""
    with GatheredParameters([value] if hasattr(value, "ds_id") else []):
        yield value.detach()


def save_parts(optimizer: Any, names: Mapping[Tensor, str], folder: Path) -> None:
    """Writes this process's part of AdamW's state and of the fp32 weights, an empty part too."""
    parts = {}
    steps = {key: state["step"] for key, state in optimizer.optimizer.state.items()}
    for number, group in enumerate(optimizer.fp16_groups):
        step = steps[optimizer.fp32_partitioned_groups_flat[number]]
        for parameter in group:
            held = _held(parameter)
            parts[f"{names[parameter]}:step"] = step.reshape(1).cpu().clone()
            parts[f"{names[parameter]}:weight"] = safe_get_local_fp32_param(parameter)[:held].cpu().clone()
            for key in MOMENTS:
                value = safe_get_local_optimizer_state(parameter, key)
                parts[f"{names[parameter]}:{key}"] = value[:held].cpu().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(parts, folder / FILE.format(rank=distributed.get_rank()))


def _held(parameter: Any) -> int:
    """Elements of a parameter that this process holds, without what its part is filled up with."""
    part = parameter.ds_tensor.ds_numel
    return max(0, min(part, parameter.ds_numel - distributed.get_rank() * part))


def set_parts(optimizer: Any, parameters: Mapping[str, Any], state_of: StateOf) -> None:
    """Sets this process's part of parameters and of their states, from whole tensors."""
    inner = optimizer.optimizer  # torch's, over one vector for each group
    step = state_of(next(iter(parameters)))["step"].float()
    for flat in optimizer.fp32_partitioned_groups_flat:
        zeros = {key: moment_like(inner, flat) for key in MOMENTS}
        inner.state[flat] = {"step": step.to(flat.device, copy=True), **zeros}  # as fused AdamW wants it
    for name, parameter in parameters.items():
        state = state_of(name)
        set_weight(parameter, state["weight"])
        safe_set_local_fp32_param(parameter, _part_of(parameter, state["weight"]))
        for key in MOMENTS:
            safe_set_local_optimizer_state(parameter, _part_of(parameter, state[key]), key)


@torch.no_grad()
def set_weight(parameter: Any, whole: Tensor) -> None:
    """Sets this process's part of a parameter from a whole tensor of its shape."""
    parameter.ds_tensor.copy_(_part_of(parameter, whole))


def _part_of(parameter: Any, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor, filled up with zeros; [part]."""
    size, held = parameter.ds_tensor.ds_numel, _held(parameter)
    part = whole.new_zeros(size)
    first = distributed.get_rank() * size
    part[:held] = whole.flatten()[first : first + held]
    return part.to(parameter.ds_tensor.device)

"""Weights that stay as their files have them, mapped, until a process keeps its part of them.

The processes of a machine share mapped pages, and the system can drop them, so the RAM that a model takes is
what has been cast or quantized of it. A parameter says by an attribute what it is to become.
"""

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from sft_play.errors import ConfigError

TYPE = "type_in_use"


def say_types(model: torch.nn.Module, dtype: torch.dtype, others: Mapping[str, torch.dtype]) -> None:
    """Notes the type that each floating-point parameter of a model, as it is stored, is to be used in.

    `others` are the types, by pattern of names, of weights that have another one.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            setattr(parameter, TYPE, type_of(name, dtype, others))


def type_of(name: str, dtype: torch.dtype, others: Mapping[str, torch.dtype]) -> torch.dtype:
    """The type of the weight of this name; arguments as in `say_types`."""
    return next((other for pattern, other in others.items() if re.search(pattern, name)), dtype)


def type_in_use(parameter: torch.Tensor) -> torch.dtype:
    """The type that a parameter of any shape is to be used in: unless one was noted, its own."""
    return getattr(parameter, TYPE, parameter.dtype)


@contextmanager
def looking_as_used(model: torch.nn.Module) -> Iterator[None]:
    """In the block, parameters have the type that they will be used in, and no values.

    PEFT makes adapters in the type of the weights, and rounds their random numbers to it.
    """
    stored = {}
    for parameter in model.parameters():
        dtype = type_in_use(parameter)
        if dtype != parameter.dtype:
            stored[parameter] = parameter.data
            parameter.data = torch.zeros((), dtype=dtype).expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, values in stored.items():  # no others: PiSSA takes its part out of the weights
            parameter.data = values


def put_to_use(parameter: torch.Tensor, device: str) -> None:
    """Casts a parameter of any shape on the device, and quantizes it if it is to be in 4 bits; in place."""
    dtype = type_in_use(parameter)
    if dtype != parameter.dtype:
        parameter.data = parameter.data.to(device, dtype)
    if not getattr(parameter, "bnb_quantized", True):
        parameter.to(device)  # bitsandbytes quantizes what is moved


def require_one_type(joined: Iterable[torch.Tensor]) -> None:
    """Raises ConfigError if what is trained of these weights has several types.

    FSDP2 joins what it divides of a unit, DeepSpeed all that is trained; both find out in the first pass.
    """
    types = {str(each.dtype).removeprefix("torch.") for each in joined if each.requires_grad}
    if len(types) > 1:
        raise ConfigError(
            "An engine that divides weights needs one data type for all trained weights, found: "
            f"{', '.join(sorted(types))}. Without autocast, tuning.lora.modules_to_save stay in model.dtype; "
            "set train.mixed_precision=bf16 or model.dtype=float32"
        )


def give_back_freed_memory() -> None:
    """Returns what was freed to the system; glibc keeps chunks of up to 32 MiB, as many as there are layers.

    Other C libraries are left alone.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def part_of(weight: torch.Tensor) -> torch.Tensor:
    """What this process holds of a weight of any shape: all of it, unless an engine has divided it."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    return getattr(weight, "ds_tensor", weight)  # ZeRO-3's


def whole_elements(weight: torch.Tensor) -> int:
    """The elements of a weight, whichever part of it this process holds."""
    return getattr(weight, "ds_numel", weight.numel())

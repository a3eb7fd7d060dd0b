"""Whole weights, as they are saved: gathered from where an engine keeps them, and cast."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed


def as_it_is(value: Tensor) -> AbstractContextManager[Tensor]:
    """A block with a weight that is not divided."""
    return nullcontext(value.detach())


def whole_weights(
    model: Any, gathered: Callable[[Tensor], AbstractContextManager[Tensor]], types: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Copies tensor by tensor, in the memory of the first process's machine; others get nothing.

    Only what is trained, if there is an adapter around the model. Tied weights are one tensor, by which
    transformers knows that it shall save them once. All processes call it, the model not wrapped, and enter
    each block of `gathered`, in which a weight is whole. `types`: as in `Engine.full_weights`.
    """
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    only_trained = hasattr(model, "get_base_model")
    found: dict[str, Any] = {}
    copies: dict[Any, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if only_trained and not value.requires_grad:
            continue
        if value not in copies:
            with gathered(value) as whole:
                copies[value] = whole.to("cpu", types.get(name), copy=True) if is_first else None
        found[name] = copies[value]
    return found if is_first else {}

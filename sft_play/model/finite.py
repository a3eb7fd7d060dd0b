"""Finds weights that are NaN or infinite."""

from collections.abc import Iterable

import torch


def first_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first of these named tensors that has a NaN or infinite value; None if all are finite.

    A sum is not finite if a value is not, and needs no copy of the tensor. The converse may fail, so what the
    sums point out is looked at value by value.
    """
    floating = [(name, weight.detach()) for name, weight in weights if weight.is_floating_point()]
    sums = [weight.sum(dtype=torch.float32) for _, weight in floating]
    if not sums or torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all():
        return None
    for name, weight in floating:
        if not torch.isfinite(weight).all():
            return name
    return None

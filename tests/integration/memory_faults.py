"""Memory that runs out at chosen moments, injected from outside: by hooks on the model and the optimizer."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sft_play.train.verify import ISOLATION_TOKENS

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError(TEXT)


def failing(build: Callable, where: str, passes: set[int]) -> Callable:
    """`build_model`, with memory that runs out in the middle of some passes of the model.

    Args:
        build: the function itself.
        where: "forward", "backward" or "evaluation".
        passes: numbers of the training passes (or evaluation passes), from 0, in which it runs out.
    """
    count = itertools.count()

    def hook(module: Any, inputs: Any, outputs: torch.Tensor) -> None:
        if outputs.shape[-2] == 2 * ISOLATION_TOKENS:  # a check of the model before training
            return
        if outputs.requires_grad == (where == "evaluation") or next(count) not in passes:
            return
        if where != "backward":
            run_out()
        outputs.register_hook(run_out)

    def make(*args: Any) -> Any:
        model = build(*args)
        layers = [module for name, module in model.named_modules() if name.endswith("down_proj")]
        layers[0 if where == "backward" else -1].register_forward_hook(hook)
        return model

    return make


def failing_optimizer(updates: set[int]) -> Any:
    """Memory runs out at the beginning of these updates of the weights, counted from 0; returns a handle."""
    count = itertools.count()
    return register_optimizer_step_pre_hook(lambda *_: run_out() if next(count) in updates else None)

"""Steps whose loss or gradients are not finite: they update nothing, and several in a row end the run."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from sft_play.errors import NonFiniteError
from sft_play.model.layers.loss_head import score_batch
from sft_play.model.weights.finished import first_not_finite
from sft_play.spelling import make, var
from sft_play.train.ranks import from_all
from sft_play.units import listed

SHOWN_ROWS, SHOWN_TOKENS = 3, 12  # of the rows that a message names


class SkippedSteps:
    """Counts the steps that were skipped, and corrects the loss that is logged.

    The trainer averages the loss over all steps since the last record.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: so many skipped steps in a row end the run."""
        self.limit, self.total, self.in_a_row = limit, 0, 0
        self._window = self._skipped_in_window = 0

    def count(self, *, finite: bool) -> None:
        """Counts a step."""
        self._window += 1
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self._skipped_in_window += not finite
        self.total += not finite

    def corrected(self, logs: dict[str, float]) -> dict[str, float]:
        """The record with the mean loss of the steps that were not skipped, and without infinite values."""
        if "loss" not in logs:
            return logs
        steps, learned = self._window, self._window - self._skipped_in_window
        self._window = self._skipped_in_window = 0
        record = {k: v for k, v in logs.items() if not isinstance(v, float) or math.isfinite(v)}
        if not learned:
            del record["loss"]
        elif learned < steps:
            record["loss"] *= steps / learned
        return record

    def message(self, step: int, rows: Sequence[str]) -> str:
        """What is printed about a skipped step and its rows whose loss is not finite."""
        cause = "each of its rows has a finite loss on its own"
        if rows:
            cause = f"not finite by itself: {listed(rows, SHOWN_ROWS)}"
        return (
            f"step {step} was skipped: its loss or its gradients are NaN or infinite "
            f"({self.in_a_row} in a row; {self.limit} end the run); {cause}"
        )


def poisoned_if_not_finite(loss: torch.Tensor) -> torch.Tensor:
    """The scalar loss itself if it is finite; else its gradients become NaN, which all ranks notice."""
    return loss * (1 + 0 * loss.detach())


def rows_not_finite(model: torch.nn.Module, rows: Sequence[int], batch_of: Callable[[int], Any]) -> list[int]:
    """The rows whose loss is not finite by themselves; all ranks call it.

    The model is not wrapped by an engine; the rows are those of this rank.
    """
    was_training = model.training
    model.eval()
    # an engine that shards weights needs as many passes of all ranks
    repeated = islice(cycle(rows), max(from_all(len(rows))))
    found = {row for row in repeated if not torch.isfinite(score_batch(model, batch_of(row))).all()}
    model.train(was_training)
    return [row for row in rows if row in found]


def ended(message: str) -> NonFiniteError:
    """The error that ends the run."""
    return NonFiniteError(
        f"{message}.\nNothing of this step was saved. Look at the rows, or continue from the last checkpoint "
        f"with a lower learning rate: `{make('resume')}` with the {var(CONFIG=None)} of the run and "
        f"{var(ALLOW='train.learning_rate', ARGS='train.learning_rate=<lower>')}"
    )


def check_weights(model: torch.nn.Module) -> None:
    """Raises a NonFiniteError if a trained weight, which is to be written, is NaN or infinite."""
    name = first_not_finite(item for item in model.named_parameters() if item[1].requires_grad)
    if name:
        raise ended(f"the trained weight {name} is NaN or infinite")


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raises a NonFiniteError if the optimizer's state is broken: one step later, the weights would be too.

    ZeRO-2's has a part of all weights, joined.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    moments = (
        (f"{kind} of {names.get(id(weight), 'a part of the weights')}", value)
        for weight, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, torch.Tensor)
    )
    broken = first_not_finite(moments)
    if broken:
        raise ended(f"the optimizer's {broken} is NaN or infinite")

"""Which micro-batches of a run can have the highest peak, and what the trainer holds beside them.

Those that no other one exceeds in everything can have it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from sft_play.plan import Plan
from sft_play.sizing.step import JoinedRows, MicroBatch, RunBatches, StepSpec
from sft_play.timeline import Buffer, Step


def front(columns: np.ndarray) -> np.ndarray:
    """Indices of the points, [points, sizes], that no other one is as large as in all sizes; of equals, one.

    The largest first, by their sum.
    """
    points, first_of = np.unique(columns, axis=0, return_index=True)
    order = np.argsort(-points.astype(float).sum(axis=1), kind="stable")
    points, first_of = points[order], first_of[order]
    found: list[int] = []
    while len(points):
        found.append(int(first_of[0]))
        stays = (points > points[0]).any(axis=1)
        points, first_of = points[stays], first_of[stays]
    return np.array(found, dtype=np.int64)


def heaviest(batches: Sequence[MicroBatch], *, by_length: bool = False) -> list[MicroBatch]:
    """Those of which one has the highest peak, by falling number of tokens.

    Those that are the first of their steps are compared with each other only, since no gradients exist yet.

    Args:
        batches: all that come into question.
        by_length: whether attention over joined sequences takes memory with the square of their lengths. Such
            a step takes a trace of its own, so only those with most of something are looked at. With
            pictures, what waits beside a step may decide, and most need no trace (`MicroBatch.covers`).
    """
    found: list[MicroBatch] = []
    for first in (False, True):
        found += _heaviest([each for each in batches if each.first == first], by_length)
    return sorted(found, key=lambda each: -each.tokens)


def _heaviest(batches: Sequence[MicroBatch], by_length: bool) -> list[MicroBatch]:
    if not batches:
        return []
    padded = not isinstance(batches[0].batch, JoinedRows)
    sizes = [
        (
            each.tokens,
            each.supervised,
            *([each.squares] * by_length),
            *(each.batch.shape if padded else ()),
            each.units,
            each.held_units,
            each.carried,
        )
        for each in batches
    ]
    if (by_length or padded) and not any(each.units for each in batches):
        columns = range(len(sizes[0]))
        most = [max(sizes, key=itemgetter(at, *columns)) for at in columns[:-1]]
        return [batches[sizes.index(size)] for size in dict.fromkeys(most)]
    return [batches[index] for index in front(np.array(sizes))]


def anywhere(batches: Sequence[MicroBatch], plan: Plan) -> list[MicroBatch]:
    """Micro-batches that are not the first of their steps, in every place where their peaks differ.

    Where gradients wait for the last one of a step, those in between leave them whole.
    """
    waits = plan.sharing.defers_exchange or plan.sharing.replicas > 1
    between = plan.batch.accumulation > 2 and waits
    return [replace(each, last=last) for each in batches for last in ((True, False) if between else (True,))]


def with_held(
    step: Step,
    spec: StepSpec,
    plan: Plan,
    batches: RunBatches,
    micro: MicroBatch | None,
    evaluated: MicroBatch | None,
) -> Step:
    """A step of a run, with the batches that the trainer holds beside the one that the step is of.

    Without `micro`, that is one at which no other holds more; without `evaluated`, the evaluation's is one
    that another of its size follows.
    """
    most = (batches.held or spec.tokens * (plan.batch.accumulation + 1)) - spec.tokens
    ahead = evaluated.held if evaluated else math.prod(spec.evaluated.shape)
    sizes = [(max(0, most) if micro is None else micro.held), max(0, most), ahead]
    most_units = max(0, batches.held_units - sum(fit.units for fit in spec.fits))
    units = [most_units if micro is None else micro.held_units, most_units]
    units += [evaluated.held_units if evaluated else 0]
    phases = [("forward", "backward"), ("optimizer", "evaluation"), ("evaluation", "evaluation")]
    held = map(batches.bytes_of, sizes, units)
    return step.with_buffers(
        *(Buffer("activations", size, *ends) for size, ends in zip(held, phases, strict=True))
    )

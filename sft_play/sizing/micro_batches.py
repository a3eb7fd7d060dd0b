"""Which micro-batches of a run can have the highest peak: those that no other one exceeds in everything."""

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from sft_play.sizing.step import JoinedRows, MicroBatch


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
            a step takes a trace of its own, so only those with most of something are looked at.
    """
    found: list[MicroBatch] = []
    for first in (False, True):
        found += _heaviest([each for each in batches if each.first == first], by_length)
    return sorted(found, key=lambda each: -each.tokens)


def _heaviest(batches: Sequence[MicroBatch], by_length: bool) -> list[MicroBatch]:
    if not batches:
        return []
    sizes = [(each.tokens, each.supervised, *([each.squares] * by_length)) for each in batches]
    if by_length or not isinstance(batches[0].batch, JoinedRows):
        most = [max(sizes, key=itemgetter(at, *range(len(sizes[0])))) for at in range(len(sizes[0]))]
        return [batches[sizes.index(size)] for size in dict.fromkeys(most)]
    return [batches[index] for index in front(np.array(sizes))]

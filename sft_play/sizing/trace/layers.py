"""Which decoder layers a trace needs, and which of them stands for each layer of the model. Pure.

Layers of one kind allocate the same. Where the last layers keep their activations and the others recompute
them, there are twice as many kinds, and one trace gives every number of layers that are kept.
"""

from collections.abc import Sequence
from dataclasses import replace

from sft_play.timeline import StepTrace


def choose_layers(kinds: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Which layers to trace: the first and the last one, and one of each kind between them.

    `choose_layers([0, 0, 1, 0, 1, 0])` is ([0, 1, 2, 5], (0, 1, 2, 1, 2, 3)).

    Returns:
        The traced layers, and for each layer the position among them of the one that represents it.
    """
    layers = range(len(kinds))
    first, inner, last = layers[:1], layers[1:-1], layers[max(1, len(kinds) - 1) :]
    middle: dict[int, int] = {}
    for index in inner:
        middle.setdefault(kinds[index], index)
    kept = sorted({*first, *middle.values(), *last})
    represented_by = [*first, *(middle[kinds[index]] for index in inner), *last]
    return kept, tuple(map(kept.index, represented_by))


def told_apart(kinds: Sequence[int], apart: int) -> list[int]:
    """Other numbers for the last layers, which keep their activations, and for the one before them.

    What a layer hands on lives until the next one is recomputed, or no longer than that one needs it.
    """
    first, other = len(kinds) - apart, max(kinds, default=0) + 1
    if not apart:
        return list(kinds)
    return [kind + other * ((index >= first) + 2 * (index == first - 1)) for index, kind in enumerate(kinds)]


def stand_ins_of(kinds: Sequence[int], apart: int) -> tuple[int, ...]:
    """The traced layer that represents each layer if so many of the last ones keep their activations."""
    return choose_layers(told_apart(kinds, apart))[1]


def fewest_apart(kinds: Sequence[int], apart: int) -> int:
    """The smallest number of kept layers of which the same layers are traced, in the same order."""

    def traced(kept: int) -> list[int]:
        mixed = told_apart(kinds, kept)
        return [mixed[index] for index in choose_layers(mixed)[0]]

    wanted = traced(apart)
    return next(kept for kept in range(1, apart + 1) if traced(kept) == wanted)


def standing_for(trace: StepTrace, stand_ins: tuple[int, ...]) -> StepTrace:
    """The trace as that of a model whose layers are represented like this; () leaves it as it is.

    What it computes stays that of the model that was traced.
    """
    return replace(trace, stand_ins=stand_ins) if stand_ins else trace

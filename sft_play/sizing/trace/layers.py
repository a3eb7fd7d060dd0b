"""Which decoder layers a trace needs, and which of them stands for each layer of the model. Pure.

Layers of one kind allocate the same.
"""

from collections.abc import Sequence


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

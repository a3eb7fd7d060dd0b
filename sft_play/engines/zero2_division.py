"""Which elements each process of ZeRO-2 has: DeepSpeed cuts each group of parameters into equal parts.

A tensor on the border of two parts is kept whole by both processes until the optimizer step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 2  # elements, of each part


@dataclass
class Part:
    """What one process has of all groups."""

    sizes: list[int]  # elements of each group, padded to the same number in all processes
    whole: int = 0  # elements of all tensors that are in it, if only in part
    largest: int = 0  # elements of the largest piece of a tensor in it


def parts_of(groups: Sequence[Sequence[int]], processes: int) -> list[Part]:
    """The part of each process.

    Args:
        groups: elements of the parameters of each group, in the optimizer's order.
        processes: how many share them.
    """
    sizes = [-(-sum(group) // (ALIGNMENT * processes)) * ALIGNMENT for group in groups if sum(group)]
    parts = [Part(sizes) for _ in range(processes)]
    for group, size in zip(filter(sum, groups), sizes, strict=True):
        start = 0
        for elements in group:
            stop = start + elements
            for rank in range(start // size, -(-stop // size)):
                piece = min(stop, (rank + 1) * size) - max(start, rank * size)
                parts[rank].whole += elements
                parts[rank].largest = max(parts[rank].largest, piece)
            start = stop
    return parts

"""Packs rows into sequences by best-fit decreasing, the classic bin-packing heuristic (Johnson 1974)."""

import bisect
from collections.abc import Sequence

from sft_play.data.batching import Share


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups row indices so that the lengths of each group sum to at most `capacity`.

    Rows are placed longest first, each into the fullest group that still has room. The result is
    deterministic, and rows of a group keep their order.

    Example: `pack([5, 3, 3, 2], 8)` is `[[0, 1], [2, 3]]`.

    Raises:
        ValueError: a row is longer than `capacity`.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, group), sorted
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[row] > capacity:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, more than a packed sequence of {capacity}"
            )
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place == len(room):
            groups.append([])
            free, group = capacity, len(groups) - 1
        else:
            free, group = room.pop(place)
        groups[group].append(row)
        bisect.insort(room, (free - lengths[row], group))
    return [sorted(group) for group in groups]


def pack_shares(
    lengths: Sequence[int], capacity: int, shares: Sequence[Share]
) -> tuple[list[list[int]], list[Share]]:
    """Packs the rows of each share by themselves, as `pack` does, so that a sequence has one weight.

    Returns:
        The groups of row indices, and the shares of the groups.
    """
    groups: list[list[int]] = []
    packed, first = [], 0
    for share in shares:
        own = pack(lengths[first : first + share.rows], capacity)
        groups += [[first + row for row in group] for group in own]
        packed.append(Share(len(own), share.weight))
        first += share.rows
    return groups, packed

"""PyTorch's caching allocator as a model: from a sequence of allocations to the memory that it reserves. Pure.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13: sizes are multiples of 512 bytes; small blocks (up to 1 MiB) and large
ones live apart; a request takes the smallest free block that holds it, split where the rest is worth keeping; freed
blocks merge with free neighbours; what was taken from the device is not given back.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from sft_play.units import MIB

ROUND = 512
SMALL = MIB  # largest request that is served from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # taken from the device for requests below LARGE_REQUEST
LARGE_REQUEST = 10 * MIB
LARGE_ROUND = 2 * MIB


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed sequence, in bytes."""

    allocated: int
    reserved: int


class _Block:
    """A stretch of device memory; neighbours are those of its segment."""

    __slots__ = ("address", "after", "before", "free", "size")

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """The blocks of one size class. Addresses order blocks of one size; who touches whom is kept apart."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.reserved = 0
        self.free: list[tuple[int, int]] = []  # (size, address), smallest first
        self.blocks: dict[int, _Block] = {}
        self.tail: _Block | None = None  # last block of the expandable segment

    def take(self, size: int) -> _Block:
        position = bisect_left(self.free, (size, 0))
        block = self.blocks[self.free.pop(position)[1]] if position < len(self.free) else self._grow(size)
        rest = block.size - size
        if rest >= ROUND if self.small or self.expandable else rest > SMALL:
            self._split(block, size)
        block.free = False
        return block

    def give(self, block: _Block) -> None:
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget_free(neighbour)
                block = self._join(neighbour, block) if neighbour is block.before else self._join(block, neighbour)
        insort(self.free, (block.size, block.address))

    def _grow(self, size: int) -> _Block:
        if self.expandable:
            return self._extend(size)
        if self.small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // LARGE_ROUND) * LARGE_ROUND
        block = _Block(self.reserved, segment)
        self.blocks[block.address] = block
        self.reserved += segment
        return block

    def _extend(self, size: int) -> _Block:
        """Maps pages after the last block of the one segment; what is free at its end counts."""
        tail = self.tail
        joined = tail is not None and tail.free
        missing = size - (tail.size if tail is not None and joined else 0)
        page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        mapped = -(-missing // page) * page
        block = _Block(self.reserved, mapped)
        self.reserved += mapped
        self.blocks[block.address] = block
        block.before, self.tail = tail, block
        if tail is not None:
            tail.after = block
            if joined:
                self._forget_free(tail)
                block = self._join(tail, block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size)
        rest.before, rest.after, block.after, block.size = block, block.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        if self.tail is block:
            self.tail = rest
        self.blocks[rest.address] = rest
        insort(self.free, (rest.size, rest.address))

    def _join(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if self.tail is right:
            self.tail = left
        del self.blocks[right.address]
        left.free = True
        return left

    def _forget_free(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


def replay(changes: Iterable[tuple[int, int]], *, expandable: bool = True) -> Replay:
    """Runs a sequence through the allocator.

    Args:
        changes: (number of the block, bytes asked for), or (number, 0) where it is freed.
        expandable: PYTORCH_ALLOC_CONF=expandable_segments:True; without it each segment has a fixed size.
    """
    pools = {True: _Pool(True, expandable), False: _Pool(False, expandable)}
    held: dict[int, tuple[_Pool, _Block, int]] = {}
    allocated = most_allocated = most_reserved = 0
    for number, size in changes:
        if size:
            rounded = -(-size // ROUND) * ROUND
            pool = pools[rounded <= SMALL]
            block = pool.take(rounded)
            held[number] = pool, block, block.size
            allocated += block.size
            most_allocated = max(most_allocated, allocated)
            most_reserved = max(most_reserved, pools[True].reserved + pools[False].reserved)
        else:
            pool, block, taken = held.pop(number)
            pool.give(block)
            allocated -= taken
    return Replay(most_allocated, most_reserved)

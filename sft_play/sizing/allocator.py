"""A model of PyTorch's caching allocator: what it reserves for a sequence of allocations. Pure.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13: sizes are multiples of 512 bytes; small blocks (up to
1 MiB) and large ones come from separate pools; a request takes the smallest free block that is large enough,
and splits it if the remainder is worth keeping; freed blocks merge with free neighbors; memory that was
reserved from the device is returned to it only by torch.cuda.empty_cache().

Of equally large free blocks, the one with the lowest address is taken. The driver gives a new segment a lower
address than those before it, as the reserved bytes of published runs show (docs/reference/evidence.md).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from sft_play.units import MIB

ROUND = 512
SMALL = MIB  # the largest request that is served from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # reserved from the device for requests below LARGE_REQUEST
LARGE_REQUEST = 10 * MIB
LARGE_ROUND = 2 * MIB
EMPTY_CACHE = (0, 0)  # a change that returns free segments to the device


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed sequence, in bytes."""

    allocated: int  # as PyTorch counts it: blocks that are given whole count whole
    reserved: int
    requested: int  # rounded up to the allocator's unit only


class _Block:
    """A range of device memory; `before` and `after` are its neighbors within the segment."""

    __slots__ = ("address", "after", "before", "free", "size")

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """The blocks of one size class. The free list is sorted by size, then by address."""

    def __init__(self, small: bool, expandable: bool):
        self.small, self.expandable = small, expandable
        self.reserved = self.mapped = 0  # bytes now, and in total
        self.free: list[tuple[int, int]] = []  # (size, address), smallest first
        self.blocks: dict[int, _Block] = {}
        self.tail: _Block | None = None  # last block of the expandable segment

    def take(self, size: int) -> _Block:
        position = bisect_left(self.free, (size, -self.mapped))
        block = self.blocks[self.free.pop(position)[1]] if position < len(self.free) else self._grow(size)
        if self._is_worth_splitting(block.size - size):
            self._split(block, size)
        block.free = False
        return block

    def _is_worth_splitting(self, rest: int) -> bool:
        if self.small or self.expandable:
            return rest >= ROUND
        return rest > SMALL

    def give_back(self, block: _Block) -> None:
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove_from_free(before)
            block = self._merge(before, block)
        if after is not None and after.free:
            self._remove_from_free(after)
            block = self._merge(block, after)
        insort(self.free, (block.size, block.address))

    def _grow(self, size: int) -> _Block:
        if self.expandable:
            return self._extend(size)
        if self.small:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUND) * LARGE_ROUND
        self.reserved += segment
        self.mapped += segment
        block = self.blocks[-self.mapped] = _Block(-self.mapped, segment)
        return block

    def empty_cache(self) -> None:
        """Returns segments that are entirely free. An expandable one keeps its pages: at most too much."""
        whole = (block for _, address in self.free if self._is_segment(block := self.blocks[address]))
        for block in tuple(whole):
            self._remove_from_free(block)
            del self.blocks[block.address]
            self.reserved -= block.size

    def _is_segment(self, block: _Block) -> bool:
        return not self.expandable and block.before is None and block.after is None

    def _extend(self, size: int) -> _Block:
        """Maps pages at the end of the expandable segment; a free last block becomes part of the new one."""
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
                self._remove_from_free(tail)
                block = self._merge(tail, block)
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

    def _merge(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if self.tail is right:
            self.tail = left
        del self.blocks[right.address]
        left.free = True
        return left

    def _remove_from_free(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


def replay(changes: Iterable[tuple[int, int]], *, expandable: bool = True) -> Replay:
    """Replays a sequence of allocations and frees.

    Args:
        changes: (block number, requested bytes) for an allocation, (block number, 0) for a free, and
            EMPTY_CACHE.
        expandable: whether PYTORCH_ALLOC_CONF has expandable_segments:True; otherwise segments have a fixed
            size.
    """
    pools = {True: _Pool(True, expandable), False: _Pool(False, expandable)}
    held: dict[int, tuple[_Pool, _Block, int]] = {}
    allocated = requested = most_allocated = most_reserved = most_requested = 0
    for number, size in changes:
        if (number, size) == EMPTY_CACHE:
            for pool in pools.values():
                pool.empty_cache()
        elif size:
            rounded = -(-size // ROUND) * ROUND
            pool = pools[rounded <= SMALL]
            block = pool.take(rounded)
            held[number] = pool, block, rounded
            allocated, requested = allocated + block.size, requested + rounded
            most_allocated, most_requested = max(most_allocated, allocated), max(most_requested, requested)
            most_reserved = max(most_reserved, pools[True].reserved + pools[False].reserved)
        else:
            pool, block, rounded = held.pop(number)
            allocated, requested = allocated - block.size, requested - rounded
            pool.give_back(block)
    return Replay(most_allocated, most_reserved, most_requested)

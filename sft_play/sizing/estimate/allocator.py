"""A model of PyTorch's caching allocator: what it reserves for the first steps of a run. Pure.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13: sizes are multiples of 512 bytes; small blocks (up to
1 MiB) and large ones come from separate pools; a request takes the smallest free block that is large enough,
and splits it if the remainder is worth keeping; freed blocks merge with free neighbors; memory that was
reserved from the device is returned to it by torch.cuda.empty_cache(), or when the device is full. Each
stream has pools of its own: what was freed on one is not given to another.

Of equally large free blocks, the one with the lowest address is taken. The driver gives a new segment a lower
address than those before it, as the reserved bytes of published runs show (docs/reference/evidence.md).
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sft_play.timeline import PHASES, TERMS, Step
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
        least = ROUND if self.small or self.expandable else SMALL + 1
        if block.size - size >= least:  # worth keeping
            self._split(block, size)
        block.free = False
        return block

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
        segment = self.segment(size)
        self.reserved += segment
        self.mapped += segment
        block = self.blocks[-self.mapped] = _Block(-self.mapped, segment)
        return block

    def missing(self, size: int) -> int:
        """The bytes of the segment that a request needs; 0 if a free block is large enough."""
        return 0 if self.free and self.free[-1][0] >= size else self.segment(size)

    def segment(self, size: int) -> int:
        """The bytes of a segment of fixed size that is made for a request."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // LARGE_ROUND) * LARGE_ROUND

    def empty_cache(self) -> int:
        """Gives segments back that are entirely free, and says how many bytes that was.

        An expandable one keeps its pages, which is at most too much.
        """
        before = self.reserved
        for block in [self.blocks[address] for _, address in self.free]:
            if not self.expandable and block.before is None and block.after is None:
                self._remove_from_free(block)
                del self.blocks[block.address]
                self.reserved -= block.size
        return before - self.reserved

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


def replay(
    changes: Iterable[tuple[int, int]],
    *,
    expandable: bool = True,
    streams: Mapping[int, int] | None = None,
    capacity: float = math.inf,
) -> Replay:
    """Replays a sequence of allocations and frees.

    A change is (block number, requested bytes) for an allocation, (block number, 0) for a free, or
    EMPTY_CACHE. Segments are `expandable` if PYTORCH_ALLOC_CONF says so; otherwise they have a fixed size.
    `streams` are those of the blocks that are not on the first one. A device has `capacity` bytes: before a
    segment of fixed size would exceed them, those that are entirely free are returned. What does not fit even
    then is reserved all the same.
    """
    streams, pools = streams or {}, dict[tuple[int, bool], _Pool]()
    held: dict[int, tuple[_Pool, _Block, int]] = {}
    allocated = requested = reserved = most_allocated = most_reserved = most_requested = 0
    for number, size in changes:
        if (number, size) == EMPTY_CACHE:
            reserved -= sum(pool.empty_cache() for pool in pools.values())
        elif size:
            rounded = -(-size // ROUND) * ROUND
            key = streams.get(number, 0), rounded <= SMALL
            pool = pools[key] = pools.get(key) or _Pool(key[1], expandable)
            if capacity < math.inf and pool.missing(rounded) > max(capacity - reserved, 0):
                reserved -= sum(each.empty_cache() for each in pools.values())
            before = pool.reserved
            block = pool.take(rounded)
            reserved += pool.reserved - before
            held[number] = pool, block, rounded
            allocated, requested = allocated + block.size, requested + rounded
            most_allocated, most_requested = max(most_allocated, allocated), max(most_requested, requested)
            most_reserved = max(most_reserved, reserved)
        else:
            pool, block, rounded = held.pop(number)
            allocated, requested = allocated - block.size, requested - rounded
            pool.give_back(block)
    return Replay(most_allocated, most_reserved, most_requested)


def replay_steps(
    step: Step, *, workspace_bytes: int = 0, warmup_bytes: int = 0, expandable: bool = True
) -> Replay:
    """What PyTorch's caching allocator reserves for loading and two such steps.

    The order decides which freed blocks can be reused: optimizer states are born in the first optimizer step,
    when the memory of the backward pass is free, and the second step finds the cached blocks of the first.
    Arguments are those of `first_steps` and `replay`.
    """
    key = (step.sizes.tobytes(), workspace_bytes, warmup_bytes, expandable)
    known = step.timeline.replays
    if key not in known:  # plans for several numbers of processes often have the same step
        sizes, parts = first_steps(step, workspace_bytes, warmup_bytes)
        known[key] = replay(as_changes(sizes, parts), expandable=expandable, streams=_streams_of(step))
    return known[key]


def _streams_of(step: Step) -> dict[int, int]:
    """The streams of the blocks, by the numbers that `first_steps` gives them, that are not on the first."""
    streams = step.timeline.streams[step.timeline.source]
    return {int(block) + 1: int(streams[block]) for block in np.flatnonzero(streams)}


def first_steps(
    step: Step, workspace_bytes: int = 0, warmup_bytes: int = 0
) -> tuple[dict[int, int], list[list[int]]]:
    """The first steps of a run as its allocator sees them.

    cuBLAS keeps a workspace from its first product in either direction. The bytes of the warm-up are
    allocated and freed before the weights are loaded.

    Returns:
        The bytes of each block by its number, which is positive in an event that allocates it and negative in
        one that frees it, and the events in parts: loading; forward pass, backward pass and the rest of the
        first step; and the four phases of the second one.
    """
    sizes = dict(enumerate(step.sizes[step.timeline.source].tolist(), start=1))
    events, states = events_by_phase(step)
    forward, backward, warmup = (len(sizes) + more for more in (1, 2, 3))
    sizes |= {forward: workspace_bytes, backward: workspace_bytes, warmup: warmup_bytes}
    first = [
        [warmup, -warmup, *events["load"]],
        [forward, *events["forward"]],
        [backward, *events["backward"], *states],
        [*events["optimizer"], *events["evaluation"]],
    ]
    return sizes, first + _again(events)


def as_changes(sizes: dict[int, int], parts: Iterable[list[int]]) -> Iterator[tuple[int, int]]:
    """The events as `replay` takes them; blocks without bytes are left out."""
    for event in itertools.chain.from_iterable(parts):
        if sizes[abs(event)]:
            yield abs(event), sizes[event] if event > 0 else 0


def events_by_phase(step: Step) -> tuple[dict[str, list[int]], list[int]]:
    """The events of each phase, and the blocks of the optimizer's states, which they do not have."""
    line = step.timeline
    terms = line.terms[line.source].tolist()
    events: dict[str, list[int]] = {phase: [] for phase in PHASES}
    states = []
    for event, number in zip(line.events.tolist(), line.phases.tolist(), strict=True):
        if PHASES[number] == "forward" and TERMS[terms[abs(event) - 1]] == "optimizer":
            states.append(event)
        else:
            events[PHASES[number]].append(event)
    return events, states


def _again(events: dict[str, list[int]]) -> list[list[int]]:
    """The events of another step, by phase: of blocks that a step both allocates and frees."""
    parts = [events[phase] for phase in PHASES if phase != "load"]
    every = set(itertools.chain.from_iterable(parts))
    return [[event for event in part if -event in every] for part in parts]

"""A model of PyTorch's caching allocator: what it reserves for the first steps of a run. Pure.

After c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13: sizes are multiples of 512 bytes; small blocks (up to
1 MiB) and large ones come from separate pools; a request takes the smallest free block that is large enough,
and splits it if the remainder is worth keeping; freed blocks merge with free neighbors; memory that was
reserved from the device is returned to it by torch.cuda.empty_cache(), or when the device is full. Each
stream has pools of its own: what was freed on one is not given to another.

Of equally large free blocks, the one with the lowest address is taken. The driver gives a new segment a lower
address than those before it, as the reserved bytes of published runs show (docs/reference/evidence.md).
"""

import hashlib
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
ADDRESS_BITS = 50  # of an address, beside which a free block's size is kept in one number
ADDRESSES = (1 << ADDRESS_BITS) - 1


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed sequence, in bytes."""

    allocated: int  # as PyTorch counts it: blocks that are given whole count whole
    reserved: int
    requested: int  # rounded up to the allocator's unit only


class _Pool:
    """The blocks of one size class, in segments of fixed size.

    Of the free ones, three views: sorted by size, then by address, as one number each, which is faster to
    compare than a pair; and by where they begin and end, so that those that are freed find their neighbors.
    """

    def __init__(self, small: bool):
        self.small = small
        self.least = ROUND if small else SMALL + 1  # of a remainder that is worth keeping
        self.reserved = 0
        self.lowest = 1 << ADDRESS_BITS - 1  # address of a segment
        self.free: list[int] = []
        self.sizes: dict[int, int] = {}  # of those that begin at an address
        self.starts: dict[int, int] = {}  # of those that end at an address
        self.segments: dict[int, int] = {}  # address -> bytes

    def take(self, size: int) -> tuple[int, int]:
        """The address and the size of the block that a request gets."""
        free, place = self.free, bisect_left(self.free, size << ADDRESS_BITS)
        if place < len(free):
            found = free.pop(place)
            given, address = found >> ADDRESS_BITS, found & ADDRESSES
            del self.sizes[address]
        else:
            given = self.segment(size)
            self.reserved += given
            self.lowest -= given + ROUND  # a gap, since blocks of two segments are never merged
            address = self.lowest
            self.segments[address] = given
        if given - size < self.least:
            self.starts.pop(address + given, None)
            return address, given
        self._add(address + size, given - size)
        return address, size

    def give_back(self, address: int, size: int) -> None:
        free, sizes = self.free, self.sizes
        if (before := self.starts.pop(address, None)) is not None:
            own = sizes[before]
            del free[bisect_left(free, own << ADDRESS_BITS | before)]
            address, size = before, size + own
        if (after := sizes.pop(address + size, None)) is not None:
            del free[bisect_left(free, after << ADDRESS_BITS | address + size)]
            size += after
        # `_add`, without a call
        insort(free, size << ADDRESS_BITS | address)
        sizes[address], self.starts[address + size] = size, address

    def missing(self, size: int) -> int:
        """The bytes of the segment that a request needs; 0 if a free block is large enough."""
        return 0 if self.free and self.free[-1] >> ADDRESS_BITS >= size else self.segment(size)

    def segment(self, size: int) -> int:
        """The bytes of a segment that is made for a request."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // LARGE_ROUND) * LARGE_ROUND

    def empty_cache(self) -> int:
        """Gives segments back that are entirely free, and says how many bytes that was."""
        unused = [start for start, size in self.segments.items() if self.sizes.get(start) == size]
        for start in unused:
            del self.segments[start]
        returned = sum(map(self._remove, unused))
        self.reserved -= returned
        return returned

    def _add(self, address: int, size: int) -> None:
        insort(self.free, size << ADDRESS_BITS | address)
        self.sizes[address], self.starts[address + size] = size, address

    def _remove(self, address: int) -> int:
        size = self.sizes.pop(address)
        del self.starts[address + size]
        del self.free[bisect_left(self.free, size << ADDRESS_BITS | address)]
        return size


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
    streams = streams or {}
    if expandable:
        numbers, sizes = np.array([*changes], dtype=np.int64).reshape(-1, 2).T
        return _in_expandable_segments(numbers, sizes, streams)
    pools, held = dict[tuple[int, bool], _Pool](), dict[int, tuple[_Pool, int, int, int]]()
    allocated = requested = reserved = most_allocated = most_reserved = most_requested = 0
    for number, size in changes:
        if size:
            rounded = -(-size // ROUND) * ROUND
            key = streams.get(number, 0), rounded <= SMALL
            if (pool := pools.get(key)) is None:
                pool = pools[key] = _Pool(key[1])
            if capacity < math.inf and pool.missing(rounded) > max(capacity - reserved, 0):
                reserved -= sum(each.empty_cache() for each in pools.values())
            before = pool.reserved
            address, given = pool.take(rounded)
            held[number] = pool, address, given, rounded
            allocated, requested = allocated + given, requested + rounded
            if pool.reserved > before:
                reserved += pool.reserved - before
                most_reserved = max(most_reserved, reserved)
            if requested > most_requested:
                most_requested = requested
            if allocated > most_allocated:
                most_allocated = allocated
        elif number:
            pool, address, given, rounded = held.pop(number)
            allocated, requested = allocated - given, requested - rounded
            pool.give_back(address, given)
        else:
            reserved -= sum(pool.empty_cache() for pool in pools.values())
    return Replay(most_allocated, most_reserved, most_requested)


def _in_expandable_segments(numbers: np.ndarray, sizes: np.ndarray, streams: Mapping[int, int]) -> Replay:
    """As `replay`, of the numbers and sizes of changes, [changes] each: no segment gives pages back."""
    rounded = -(-sizes // ROUND) * ROUND
    count = 1 + max(numbers.max(initial=0), *streams, 0)
    bytes_of, stream_of = np.zeros((2, count), dtype=np.int64)
    bytes_of[numbers[sizes > 0]] = rounded[sizes > 0]
    changes = np.where(sizes > 0, rounded, -bytes_of[numbers])
    for block, stream in streams.items():
        stream_of[block] = stream
    segments = 2 * stream_of[numbers] + (bytes_of[numbers] <= SMALL)
    reserved = 0
    for segment in np.unique(segments[numbers > 0]):
        here = (segments == segment) & (numbers > 0)
        page = SMALL_SEGMENT if segment % 2 else LARGE_SEGMENT
        reserved += _expanded(numbers[here].tolist(), changes[here].tolist(), page)
    requested = int(changes.cumsum().max(initial=0))
    return Replay(requested, reserved, requested)


def _expanded(numbers: Sequence[int], changes: Sequence[int], page: int) -> int:
    """The bytes of a segment that grows by pages; a change is what is allocated, or freed if negative.

    The free blocks are kept as in a `_Pool`, without its calls: most of a replay's time is spent here.
    """
    free, sizes, starts = list[int](), dict[int, int](), dict[int, int]()
    end, address_of = 0, dict[int, int]()
    for number, size in zip(numbers, changes, strict=True):
        if size > 0:
            place = bisect_left(free, size << ADDRESS_BITS)
            if place < len(free):
                found = free.pop(place)
                address, given = found & ADDRESSES, found >> ADDRESS_BITS
                del sizes[address]
            else:  # the end grows, with what is free there
                address = starts.pop(end, end)
                if address < end:
                    del free[bisect_left(free, sizes.pop(address) << ADDRESS_BITS | address)]
                end += -(-(address + size - end) // page) * page
                given = end - address
            address_of[number] = address
            if given == size:
                starts.pop(address + size, None)
                continue
            address, size = address + size, given - size
        else:
            address, size = address_of.pop(number), -size
            if (before := starts.pop(address, None)) is not None:
                del free[bisect_left(free, address - before << ADDRESS_BITS | before)]
                address, size = before, address - before + size
            if (after := sizes.pop(address + size, None)) is not None:
                del free[bisect_left(free, after << ADDRESS_BITS | address + size)]
                size += after
        insort(free, size << ADDRESS_BITS | address)
        sizes[address], starts[address + size] = size, address
    return end


def replay_steps(
    step: Step,
    *,
    workspace_bytes: int = 0,
    warmup_bytes: int = 0,
    expandable: bool = True,
    first: Step | None = None,
) -> Replay:
    """What PyTorch's caching allocator reserves for loading and two such steps.

    The order decides which freed blocks can be reused: optimizer states are born in the first optimizer step,
    when the memory of the backward pass is free, and the second step finds the cached blocks of the first.
    Arguments are those of `first_steps`, `accumulated_steps` and `replay`.
    """
    digests = tuple(map(_digest, filter(None, (step, first))))
    key = digests, workspace_bytes, warmup_bytes, expandable
    if key not in _REPLAYED:  # plans for several numbers of processes often have the same step
        found, streams = first_steps(step, workspace_bytes, warmup_bytes), _streams_of(step)
        if first:
            found = accumulated_steps(first, step, workspace_bytes, warmup_bytes)
        if expandable:
            _REPLAYED[key] = _in_expandable_segments(*_changes(*found), streams)
        else:
            _REPLAYED[key] = replay(as_changes(*found), expandable=False, streams=streams)
    return _REPLAYED[key]


_REPLAYED: dict[tuple[tuple[bytes, ...], int, int, bool], Replay] = {}


def _digest(step: Step) -> bytes:
    """A key for the events of a step, with the bytes and all else of their blocks that is replayed."""
    line, digest = step.timeline, hashlib.blake2b(digest_size=16)
    for each in (step.sizes, line.terms, line.streams):
        digest.update(each[line.source].tobytes())
    for each in (line.events, line.phases):
        digest.update(each.tobytes())
    return digest.digest()


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
    sizes = dict(enumerate(_block_sizes(step), start=1))
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


def accumulated_steps(
    first: Step, later: Step, workspace_bytes: int = 0, warmup_bytes: int = 0
) -> tuple[dict[int, int], list[list[int]]]:
    """As `first_steps`, for steps of two micro-batches on one stream.

    The gradients are born in the backward pass of the `first` one, between activations that it frees, and die
    in the optimizer's phase. So they lie otherwise than those that the `later` one finds from the start.
    """
    sizes, parts = first_steps(first, workspace_bytes, warmup_bytes)
    offset = max(sizes)
    sizes |= {offset + number: size for number, size in enumerate(_block_sizes(later), start=1)}
    (_, states), (events, _) = events_by_phase(first), events_by_phase(later)
    passes = _again({phase: events[phase] for phase in ("forward", "backward")})
    forward, backward = (_renumbered(part, offset) for part in passes)
    load, ahead, back, rest, *again = parts
    back = back[: len(back) - len(states)]
    again[2:2] = [forward, backward]
    return sizes, [load, ahead, back, forward, [*backward, *states], rest, *again]


def _renumbered(events: Sequence[int], offset: int) -> list[int]:
    numbers = np.array(events, dtype=np.int64)
    return (numbers + np.sign(numbers) * offset).tolist()


def _block_sizes(step: Step) -> list[int]:
    return step.sizes[step.timeline.source].tolist()


def as_changes(sizes: Mapping[int, int], parts: Iterable[list[int]]) -> Iterator[tuple[int, int]]:
    """The events as `replay` takes them; blocks without bytes are left out."""
    return zip(*(each.tolist() for each in _changes(sizes, parts)), strict=True)


def _changes(sizes: Mapping[int, int], parts: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of all changes and what each allocates, [changes] each."""
    events = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64)
    numbers, bytes_of = np.abs(events), np.zeros(max(sizes) + 1, dtype=np.int64)
    bytes_of[list(sizes)] = list(sizes.values())
    there = bytes_of[numbers] > 0
    return numbers[there], np.where(events > 0, bytes_of[numbers], 0)[there]


def events_by_phase(step: Step) -> tuple[dict[str, list[int]], list[int]]:
    """The events of each phase, and the blocks of the optimizer's states, which they do not have."""
    line = step.timeline
    is_state = (line.terms[line.source] == TERMS.index("optimizer"))[np.abs(line.events) - 1]
    is_state &= line.phases == PHASES.index("forward")
    here = {phase: (line.phases == number) & ~is_state for number, phase in enumerate(PHASES)}
    events = {phase: line.events[chosen].tolist() for phase, chosen in here.items()}
    return events, line.events[is_state].tolist()


def _again(events: dict[str, list[int]]) -> list[list[int]]:
    """The events of another step, by phase: of blocks that a step both allocates and frees."""
    parts = [events[phase] for phase in PHASES if phase != "load" and phase in events]
    every = set(itertools.chain.from_iterable(parts))
    return [[event for event in part if -event in every] for part in parts]

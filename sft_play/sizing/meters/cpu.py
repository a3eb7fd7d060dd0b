"""Measures memory on a CPU, whose allocator keeps no statistics, by the events that the profiler collects.

An event of this thread tells how much all threads hold: gloo's threads, too, free what this one allocates.
"""

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from sft_play.upstream.torch import begin_profile, is_fake

MARK, MEMORY = "sft-play ", "[memory]"
ANCHOR = "anchor"
BEFORE_ANCHOR = ("forward", "backward")  # phases of a step
# Lets threads that are not profiled count, too (c10/core/CPUAllocator.cpp).
ALLOCATOR, COUNT_EVERYWHERE = "libc10.so", "FLAGS_caffe2_report_cpu_memory_usage"


class Event(NamedTuple):
    """A block that was allocated or freed, or a mark of ours."""

    time: int  # ns
    name: str
    size: int = 0  # bytes, negative when freed
    live: int = 0  # bytes that all threads hold after it, beyond those at the start


def storage_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and the quantization tables of 4-bit weights; each storage counts once.

    Of a divided weight, what this process holds counts, and nothing that is in a file.
    """
    return sum(_storages(_tensors_of(model)).values())


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [vars(each)["ds_tensor"] for each in model.parameters() if "ds_tensor" in vars(each)]
    for holder in (
        *map(_own, model.parameters()),
        *model.modules(),
    ):  # of a divided weight, its layer has them
        state = getattr(holder, "quant_state", None)
        while state is not None:
            tensors += [t for t in (state.absmax, state.code, state.offset) if t is not None]
            state = state.state2
    return tensors


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by the address of each storage that is no file (see engines/on_disk.py)."""
    storages = [each.untyped_storage() for each in map(_own, tensors)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if not storage.filename}


def alive_bytes(model: torch.nn.Module) -> int:
    """Bytes of all CPU tensors that Python can see in this process: of the model, and others."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    others = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    real = [
        each
        for each in others
        if not is_fake(each) and each.device.type == "cpu" and each.layout == torch.strided
    ]
    return sum(_storages([*_tensors_of(model), *gradients, *filter(_has_memory, real)]).values())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is none of those by which the compiler describes others, which it may keep a while."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def mark(name: str) -> None:
    """Leaves a timestamped mark in the profile."""
    with record_function(MARK + name):
        pass


@contextmanager
def allocator_events() -> Iterator[list[Event]]:
    """Collects the events of the CPU allocator and our marks, in chronological order.

    The list is filled when the context ends. Events are missing where the clock of a virtual machine jumps.
    """
    found: list[Event] = []
    with _counting_everywhere():
        events = begin_profile()
        try:
            yield found
        finally:
            found += _events(events())


@contextmanager
def _counting_everywhere() -> Iterator[None]:
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(ALLOCATOR), COUNT_EVERYWHERE)
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def _events(roots: list[Any]) -> list[Event]:
    nodes, found = list(roots), list[Event]()
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag.name == "Allocation":
            block = node.typed[1]
            found.append(Event(node.start_time_ns, MEMORY, block.alloc_size, block.total_allocated))
        elif node.name.startswith(MARK):
            found.append(Event(node.start_time_ns, node.name))
    found.sort(key=lambda event: (event.time, event.name == MEMORY))  # marks first
    before = next((event.live - event.size for event in found if event.name == MEMORY), 0)
    return [
        Event(time, name, size, live - before) if name == MEMORY else Event(time, name)
        for time, name, size, live in found
    ]


def _held_at_anchors(events: list[Event]) -> list[int]:
    """What the last event before each anchor says."""
    held, found = 0, []
    for event in events:
        if event.name == MEMORY:
            held = event.live
        elif event.name == MARK + ANCHOR:
            found.append(held)
    return found


def peaks_by_mark(events: list[Event], alive: Sequence[int] = ()) -> dict[str, int]:
    """The peak between each mark and the next one, by the name of the mark, beyond what the start held.

    With the bytes that were `alive` at each anchor, it is the peak of all that was there, and each step is
    measured by its own anchor. Events do not tell everything: batches lie in memory of NumPy, and what was
    allocated before the first event is freed unseen. Batches stay for a step, so that its anchor knows them.
    """
    offsets = [whole - held for whole, held in zip(alive, _held_at_anchors(events), strict=True)] or [0]
    peaks: dict[str, int] = {}
    phase, passed = None, 0
    for event in events:
        if event.name == MARK + ANCHOR:
            passed += 1
        elif event.name != MEMORY:
            phase = event.name.removeprefix(MARK)
        elif phase is not None:
            own = passed if phase in BEFORE_ANCHOR else passed - 1
            peak = event.live + offsets[min(max(own, 0), len(offsets) - 1)]
            peaks[phase] = max(peak, peaks.get(phase, peak))
    return peaks


class CpuMeter:
    """The peak of each phase, with all that was there before.

    Events tell what is allocated and freed; what is alive has to be looked at once, while Python can see it:
    when gradients exist, which may lie in buffers of DDP, and the graph of the forward pass does not. What is
    there besides the model when the meter is made does not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        gc.collect()
        self.model = model
        self.alive: list[int] = []  # bytes at each anchor
        self.beside = alive_bytes(model) - storage_bytes(model)
        self.begin = mark

    def start(self) -> None:
        """Begins to collect events."""
        self.alive = []
        self.block = allocator_events()
        self.events = self.block.__enter__()

    def anchor(self) -> None:
        """Looks at what is alive: between the backward pass and the update."""
        self.alive.append(alive_bytes(self.model) - self.beside)
        mark(ANCHOR)

    def stop(self) -> tuple[dict[str, int] | None, None, int]:
        """Peaks by phase, None if there was no anchor; nothing is reserved or freed again."""
        self.block.__exit__(None, None, None)
        return (peaks_by_mark(self.events, self.alive) if self.alive else None), None, 0

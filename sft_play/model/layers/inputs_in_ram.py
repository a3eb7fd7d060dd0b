"""What layers are recomputed from, kept in RAM: copied there and back beside the computation.

A layer's inputs go to RAM while it computes. In the backward pass they come back while the layer after it is
recomputed: the inputs of one layer are on the GPU ahead of their use, and no more, whatever the speed of the
link. So how much memory they take does not depend on time.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Arrival:
    """A copy that is under way: the computation may read it, and let go of its source, after `wait`."""

    tensor: torch.Tensor
    wait: Callable[[], None]


@dataclass(frozen=True)
class Link:
    """How tensors of any shape get to RAM and back."""

    to_ram: Callable[[torch.Tensor], Arrival]
    back: Callable[[torch.Tensor], Arrival]


Copying = Callable[[torch.Tensor], torch.Tensor]


def direct(to_ram: Copying, back: Copying) -> Link:
    """The link of functions that return when the copy is complete."""

    def by(copy: Copying) -> Callable[[torch.Tensor], Arrival]:
        return lambda tensor: Arrival(copy(tensor), lambda: None)

    return Link(by(to_ram), by(back))


class SideStream:
    """Copies between a GPU and pinned RAM on a stream of their own.

    What is on the GPU is allocated on the stream of the computation, and freed there after it has waited for
    the copy. So PyTorch's allocator gives no memory to others too early, without `record_stream`, by which it
    would depend on time when memory is free again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_ram(self, tensor: torch.Tensor) -> Arrival:
        """Begins to copy a tensor of any shape to pinned RAM."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._begin(pinned, tensor)

    def back(self, tensor: torch.Tensor) -> Arrival:
        """Begins to copy a tensor of any shape to the GPU."""
        return self._begin(torch.empty_like(tensor, device=self._device), tensor)

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        computation = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computation)  # for the source, and for who had the target's memory before
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = self._stream.record_event()
        return Arrival(target, lambda: torch.cuda.current_stream(self._device).wait_event(done))


@cache
def link_to(device: torch.device) -> Link:
    """The link between RAM and a device; a CPU has one memory, within which tensors are copied."""
    if device.type != "cuda":
        return direct(torch.clone, torch.clone)
    side = SideStream(device)
    return Link(side.to_ram, side.back)


class LayerInputs:
    """The inputs of one layer in one pass: in RAM, or on their way back."""

    def __init__(self, before: "LayerInputs | None") -> None:
        self._before = weakref.ref(before) if before else None  # the layer's that needs its own next
        self._going: list[tuple[torch.Tensor, Arrival]] = []
        self._in_ram: list[tuple[Link, torch.Tensor]] = []
        self._coming: dict[int, Arrival] = {}
        self._asked = False  # whether all of them were fetched

    def pack(self, tensor: torch.Tensor) -> "tuple[LayerInputs, int] | torch.Tensor":
        """Begins to copy an input of any shape to RAM; returns what autograd keeps of it."""
        if not tensor.numel():  # torch 2.11 saves an empty one of its own with each layer
            return tensor
        link = link_to(tensor.device)
        arrival = link.to_ram(tensor)
        self._going.append((tensor, arrival))
        self._in_ram.append((link, arrival.tensor))
        return self, len(self._in_ram) - 1

    def settle(self) -> None:
        """Lets the computation wait for all that goes to RAM, and lets go of it."""
        for _, arrival in self._going:
            arrival.wait()
        self._going.clear()

    def __del__(self) -> None:
        """After a pass that failed, copies may still be under way from and to memory that others get next."""
        self.settle()
        for arrival in self._coming.values():
            arrival.wait()

    def get(self, number: int) -> torch.Tensor:
        """An input, when it is needed; those that are needed next are fetched from now on."""
        self.fetch()
        if before := self._before and self._before():
            before.fetch()
        arrival = self._coming.pop(number, None) or self._fetched(number)
        arrival.wait()
        return arrival.tensor

    def fetch(self) -> None:
        """Begins to copy all inputs back, once."""
        if not self._asked:
            self._asked = True
            self._coming = {number: self._fetched(number) for number in range(len(self._in_ram))}

    def _fetched(self, number: int) -> Arrival:
        link, in_ram = self._in_ram[number]
        return link.back(in_ram)


def _unpack(packed: tuple[LayerInputs, int] | torch.Tensor) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    inputs, number = packed
    return inputs.get(number)


class InputsInRam:
    """What takes the place of `torch.utils.checkpoint` in the layers of one model."""

    def __init__(self) -> None:
        # What a pass leaves in RAM belongs to its graph: with that it is gone, whatever ended the pass.
        self._last: weakref.ref[LayerInputs] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: object) -> Any:
        """What the function returns; its tensors, of any shape, are in RAM until it is called again."""
        inputs = LayerInputs(self._last() if self._last else None)
        self._last = weakref.ref(inputs)
        with saved_tensors_hooks(inputs.pack, _unpack):
            result = checkpoint(function, *args, use_reentrant=False)
        inputs.settle()
        return result

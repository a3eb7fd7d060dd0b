"""Counts every storage of a training step, real or fake, from the moment that it is born until it dies."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sft_play.sizing.timeline import TERMS, WHOLE_MODEL, Segment, StepTrace

TEMPORARY = "temporaries"


class Ledger(TorchDispatchMode):
    """While active, writes down what each operation allocates; frees are seen whenever they happen.

    PyTorch's own MemTracker refuses frozen parameters, and hooks on saved tensors miss what a custom autograd function keeps
    on its context (bitsandbytes does), hence a counter of storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.terms: list[str] = []
        self.owners: list[int] = []
        self.segments: list[Segment] = []
        self.live = self.peak = 0  # bytes
        self.loss_head = False  # whether the output head is at work
        self.parameters_per_layer: list[int] = []  # layer of each trained parameter, in the optimizer's order
        self._open: dict[int, tuple[int, weakref.ref]] = {}
        self._phase, self._layer = "load", WHOLE_MODEL
        self._left_layer = False

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """From here on events belong to this phase and layer."""
        self._close_segment()
        self._phase, self._layer, self._left_layer = phase, layer, False

    def leave_layer(self) -> None:
        """The last decoder layer is done: what is freed next is still its own, what is allocated next is not."""
        self._left_layer = True

    def _close_segment(self) -> None:
        start = self.segments[-1].stop if self.segments else 0
        self.segments.append(Segment(self._phase, self._layer, start, len(self.events)))

    @property
    def phase(self) -> str:
        """The phase that is being recorded."""
        return self._phase

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Writes down the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._open:
            return
        size = storage.nbytes()
        if not size:
            return
        if self._left_layer:
            self.begin(self._phase)
        block = len(self.sizes)
        self.sizes.append(size)
        self.terms.append(term)
        self.owners.append(self._layer if owner is None else owner)
        self.events.append(block + 1)
        self._open[address] = block, weakref.ref(storage, partial(self._freed, address))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, address: int, _: Any) -> None:
        block, _ = self._open.pop(address)
        self.live -= self.sizes[block]
        self.events.append(-(block + 1))

    def blocks_alive(self) -> list[int]:
        """Blocks that are alive now, oldest first."""
        return sorted(block for block, _ in self._open.values())

    def retag(self, blocks: Iterable[int], term: str) -> None:
        """What the blocks turned out to be."""
        for block in blocks:
            self.terms[block] = term

    def blocks_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The blocks that hold these tensors, as far as they were written down."""
        addresses = (tensor.untyped_storage()._cdata for tensor in tensors)
        return [self._open[address][0] for address in addresses if address in self._open]

    @contextmanager
    def inside_loss_head(self) -> Iterator[None]:
        """What is allocated here belongs to the loss."""
        before, self.loss_head = self.loss_head, True
        try:
            yield
        finally:
            self.loss_head = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Runs the operation and writes down its results."""
        out = func(*args, **(kwargs or {}))
        self.record(out)
        return out

    def record(self, out: Any) -> None:
        """Writes down the results of an operation; a list with one tensor per trained parameter is dealt to their layers."""
        term = "loss" if self.loss_head else TEMPORARY
        if isinstance(out, torch.Tensor):
            self.add(out, term)
        elif isinstance(out, (tuple, list)):
            per_parameter = len(out) == len(self.parameters_per_layer) and self._layer == WHOLE_MODEL
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.add(item, term, self.parameters_per_layer[index] if per_parameter else None)

    def trace(self, stand_ins: Sequence[int]) -> StepTrace:
        """The recording so far."""
        self._close_segment()
        return StepTrace(
            events=np.array(self._events_in_order(), dtype=np.int64),
            sizes=np.array(self.sizes, dtype=np.int64),
            terms=np.array([TERMS.index(term) for term in self.terms], dtype=np.int8),
            owners=np.array(self.owners, dtype=np.int64),
            segments=tuple(self.segments),
            stand_ins=tuple(stand_ins),
        )

    def _events_in_order(self) -> list[int]:
        """The events; blocks freed one after the other in order of birth, since autocast frees its copies in any order."""
        ordered: list[int] = []
        for segment in self.segments:
            for frees, run in groupby(self.events[segment.start : segment.stop], key=lambda event: event < 0):
                stretch = list(run)
                ordered += sorted(stretch, reverse=True) if frees else stretch
        return ordered

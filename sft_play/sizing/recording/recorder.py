"""Traces a training step, real or fake: its allocations and frees, and the work of its operations."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sft_play.model.layers.stand_in import Counts
from sft_play.sizing.recording.fake_results import KeepingFakeMode
from sft_play.sizing.recording.operations import DTYPE_INDEX, Description, asks, layers_in_order, rule_of
from sft_play.timeline import TERMS, WHOLE_MODEL, Segment, StepTrace
from sft_play.upstream.patching import patched
from sft_play.upstream.torch import is_view
from sft_play.work import FREE, IN_RAM, OWN, TRANSFER, Work

DEVICE_OF, FAKE = torch.ops.prim.device.default, FakeTensor


@dataclass(frozen=True)
class GradientSum:
    """A sum of two gradients that autograd has just formed: in a new tensor, since ours are fake.

    Of real tensors it overwrites the first one, if nobody else holds it (`can_accumulate_inplace` in
    PyTorch's input_buffer.cpp). Nobody does, if it is freed before anything else happens.
    """

    term: int  # the block of the first term
    address: int  # of the sum's storage
    peak: int  # bytes, before the sum


class AllocationRecorder(Counts, TorchDispatchMode):
    """While active, records what each operation allocates; weak references tell when a storage is freed.

    Existing tools do not do: PyTorch's MemTracker does not support frozen parameters, and saved-tensor hooks
    miss what a custom autograd function keeps on its context (bitsandbytes does).
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.terms: list[str] = []
        self.owners: list[int] = []
        self.streams: list[int] = []  # of a GPU, on which each block is allocated; 0: that of computation
        self.segments: list[Segment] = []
        self.live = self.peak = 0  # bytes
        self.term = "temporaries"  # of what operations allocate
        self.is_silent = False  # whether results are left unrecorded: for a pass that does not count
        self.in_ram: set[int] = set()  # blocks that a GPU does not hold
        self._into_ram = False  # whether such a block is allocated now
        self._copies = False  # whether what is copied now goes over the link of a GPU
        self.layer_of_parameter: list[int] = []  # of each trained parameter, in the optimizer's order
        self.elements_of_parameter: list[int] = []  # in the same order
        self.operations: list[tuple[float, ...]] = []
        self.times = 1.0  # how many equal operations each one stands for
        self.engine = OWN  # or what the engine does the operations for
        self._rules: dict[Any, Any] = {}
        self._fake: KeepingFakeMode | None = None  # the mode that makes fake results, within it
        self._stops: list[int] = []  # operations recorded by the end of each segment
        self._open: dict[int, tuple[int, weakref.ref]] = {}
        self._asked: set[int] = set()  # storages whose device was asked for since the last operation
        self._sum: GradientSum | None = None  # if nothing has happened since
        self.phase, self._layer = "load", WHOLE_MODEL  # that events are attributed to
        self._left_layer = False
        self._marked = False  # whether the first gradient of the backward pass is

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves the handler unwrapped: nothing is compiled here, and each call of a wrapper takes time."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets the compiler compile within it, unseen; what its code does then is recorded."""
        return True

    def __enter__(self) -> Self:
        """Looks for the mode that makes fake results."""
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._fake = mode if isinstance(mode, KeepingFakeMode) else None
        return super().__enter__()

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Attributes the events that follow to this phase and layer."""
        self._close_segment()
        self._sum = None
        self.phase, self._layer, self._left_layer = phase, layer, False

    def mark_gradient(self) -> None:
        """Leaves a block without bytes where the first gradient of a parameter is there."""
        if self.phase == "backward" and not self._marked:
            self._marked = True
            self.sizes.append(0)
            self.terms.append("engine")
            self.owners.append(self._layer)
            self.streams.append(0)
            self.events += [len(self.sizes), -len(self.sizes)]

    def leave_layer(self) -> None:
        """Ends the last decoder layer: frees that follow still belong to it, allocations do not."""
        self._left_layer = True

    def _close_segment(self) -> None:
        start = self.segments[-1].stop if self.segments else 0
        self.segments.append(Segment(self.phase, self._layer, start, len(self.events)))
        self._stops.append(len(self.operations))

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Records the storage of a tensor of any shape, unless it is already known."""
        storage = held(tensor).untyped_storage()
        if storage._cdata not in self._open and storage.nbytes():
            self._allocated(storage, term, self._layer if owner is None else owner)

    def _allocated(self, storage: torch.UntypedStorage, term: str, owner: int) -> None:
        if self._left_layer:
            self.begin(self.phase)
        block, self._sum = len(self.sizes), None
        address, size = storage._cdata, storage.nbytes()
        self.sizes.append(size)
        self.terms.append(term)
        self.owners.append(owner)
        self.streams.append(self.stream())
        if self._into_ram:
            self.in_ram.add(block)
        self.events.append(block + 1)
        self._open[address] = block, weakref.ref(storage, partial(self._freed, address))
        self.live += size
        self.peak = max(self.peak, self.live)

    def stream(self) -> int:
        """The number of the stream that is in use now."""
        return 0

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records that a storage has another size now: a known block is freed, and one of that size made."""
        if storage._cdata in self._open:
            self._freed(storage._cdata, None)
        if storage.nbytes():
            self._allocated(storage, self.term, self._layer)

    def _freed(self, address: int, _: object) -> None:
        block, _ = self._open.pop(address)
        self.live -= self.sizes[block]
        sum_, self._sum = self._sum, None
        if sum_ and sum_.term == block:
            self._add_in_place(sum_)
        else:
            self.events.append(-(block + 1))

    def _add_in_place(self, found: GradientSum) -> None:
        """Lets a sum of gradients live on in the block of its first term."""
        _, storage = self._open[found.address]
        self._open[found.address] = found.term, storage
        for values in (self.events, self.sizes, self.terms, self.owners, self.streams):
            values.pop()
        self.peak = max(found.peak, self.live)

    def blocks_alive(self) -> list[int]:
        """The blocks that are live now, oldest first."""
        return sorted(block for block, _ in self._open.values())

    def retag(self, blocks: Iterable[int], term: str) -> None:
        """Changes the term of blocks whose role is known only after they were allocated."""
        for block in blocks:
            self.terms[block] = term

    def blocks_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The blocks that hold these tensors of any shape; tensors that were not recorded are left out."""
        addresses = (held(tensor).untyped_storage()._cdata for tensor in tensors)
        return [self._open[address][0] for address in addresses if address in self._open]

    def attributing_to(self, term: str) -> AbstractContextManager[None]:
        """Within this context, what operations allocate is attributed to this term."""
        return patched(self, "term", term)

    def silent(self) -> AbstractContextManager[None]:
        """Within this context, results are left unrecorded."""
        return patched(self, "is_silent", True)

    def placing(self, *, in_ram: bool) -> AbstractContextManager[None]:
        """Within this context, what is allocated is in RAM, or else on the device."""
        return patched(self, "_into_ram", in_ram)

    def copied(self, tensor: torch.Tensor, *, in_ram: bool) -> torch.Tensor:
        """A copy of a tensor of any shape, in RAM or on the device."""
        with patched(self, "_copies", True), self.placing(in_ram=in_ram):
            return tensor.clone()

    def is_in_ram(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is known to be in RAM."""
        return any(block in self.in_ram for block in self.blocks_of([tensor]))

    def device_of(self, tensor: FakeTensor) -> torch.device:
        """What two of three calls ask of a tensor of any shape, slow if they are passed on."""
        self._sum = None
        if self.phase == "backward":
            self._asked.add(tensor.untyped_storage()._cdata)
        return tensor.fake_device

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and records its results."""
        if func is DEVICE_OF and isinstance(args[0], FAKE):
            return self.device_of(args[0])
        return self.run(func, types, args, kwargs or {})

    def run(self, func: Any, types: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same for any other than `DEVICE_OF`."""
        self._sum = None
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = rule_of(func)
        run = self._fake.run if self._fake else _call
        out = run(func, args, kwargs)
        if rule is not asks and not self.is_silent:
            self._record_operation(rule, func, args, out)
        return out

    def _record_operation(self, rule: Any, func: Any, args: Sequence[Any], out: Any) -> None:
        blocks, peak = len(self.sizes), self.peak
        self.record(out)
        notes = self._fake.notes if self._fake else None
        described = notes[0] if notes else rule(args, out)
        if notes == []:
            notes.append(described)
        self.count(described, sum(self.sizes[blocks:]))
        if func is torch.ops.aten.add.Tensor and len(self.sizes) > blocks and self._adds_gradients(*args):
            term, _ = self._open[args[0].untyped_storage()._cdata]
            self._sum = GradientSum(term, out.untyped_storage()._cdata, peak)
        else:
            self._asked.clear()

    def _adds_gradients(self, term: Any, other: object, *_: object) -> bool:
        """Whether autograd itself adds these two, of any shape, and could leave the sum in the first one.

        What a node of the graph returns, autograd asks for its device just before it adds it to another
        gradient. No operation of the node itself comes after that. A view keeps the tensor that it is of.
        """
        if self.phase != "backward" or torch.is_grad_enabled() or not isinstance(other, torch.Tensor):
            return False
        return (
            other.untyped_storage()._cdata in self._asked
            and term.untyped_storage()._cdata in self._open
            and term.dtype == other.dtype
            and is_dense(term)
            and not is_view(term)
        )

    def kernel(self, kind: int, dtype: torch.dtype, m: float, n: float, k: float, moved: float) -> None:
        """A kernel that does not run here, as an operation."""
        self.count((kind, DTYPE_INDEX.get(dtype, 0), m, n, k, 1, moved))

    def count(self, operation: Description, fresh: int = 0) -> None:
        """Records the work of an operation; what is in RAM is none of the GPU's work.

        In the backward pass gradients are enabled only while a layer is recomputed by Python code.
        """
        if operation is not None and operation[0] != FREE and (self._copies or self._into_ram):
            operation = (TRANSFER if self._copies else IN_RAM, *operation[1:])
            fresh = 0
        if operation is not None:
            kind, dtype, *sizes, times, moved = operation
            by_python = self.phase != "backward" or torch.is_grad_enabled()
            each = fresh / max(times, 1)
            self.operations.append(
                (kind, dtype, by_python, self.engine, *sizes, times * self.times, moved, each)
            )

    def standing_for(self, times: float) -> AbstractContextManager[None]:
        """Within this context, each operation stands for `times` equal ones."""
        return patched(self, "times", self.times * times)

    def record(self, out: object) -> None:
        """Records the result of an operation: a tensor, or a tuple or list that may contain tensors.

        A list with one tensor for each trained parameter (a fused optimizer creates such lists) is attributed
        to the layers of those parameters.
        """
        if self.is_silent:
            return
        if isinstance(out, torch.Tensor):
            self.add(out, self.term)
        elif isinstance(out, (tuple, list)):
            per_parameter = len(out) == len(self.layer_of_parameter) and self._layer == WHOLE_MODEL
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.add(item, self.term, self.layer_of_parameter[index] if per_parameter else None)

    def trace(self, stand_ins: Sequence[int]) -> StepTrace:
        """The trace so far; `stand_ins` names the traced layer that represents each layer."""
        self._close_segment()
        return StepTrace(
            events=np.array(self._events_in_order(), dtype=np.int64),
            sizes=np.array(self.sizes, dtype=np.int64),
            terms=np.array([TERMS.index(term) for term in self.terms], dtype=np.int8),
            owners=np.array(self.owners, dtype=np.int64),
            streams=np.array(self.streams, dtype=np.int8),
            segments=tuple(self.segments),
            stand_ins=tuple(stand_ins),
            work=self._work(stand_ins),
            in_ram=tuple(sorted(self.in_ram)),
        )

    def _work(self, stand_ins: Sequence[int]) -> Work:
        """The operations of the micro-batch, and what is trained."""
        table = np.array(self.operations or np.zeros((0, 10)), dtype=np.float64)
        (forward, layers), (backward, layers_back) = (
            layers_in_order(self.segments, self._stops, stand_ins, phase) for phase in ("forward", "backward")
        )
        parameters = list(zip(self.layer_of_parameter, self.elements_of_parameter, strict=True))
        copies = [1 if owner == WHOLE_MODEL else stand_ins.count(owner) for owner, _ in parameters]
        return Work(
            kinds=table[:, 0].astype(np.int8),
            dtypes=table[:, 1].astype(np.int8),
            by_python=table[:, 2].astype(bool),
            by_engine=table[:, 3].astype(np.int8),
            sizes=table[:, 4:],
            order=np.concatenate([forward, backward]),
            layers=np.concatenate([layers, layers_back]),
            backward_from=len(forward),
            trained_elements=sum(n * size for n, (_, size) in zip(copies, parameters, strict=True)),
            trained_tensors=sum(copies),
        )

    def _events_in_order(self) -> list[int]:
        """The events, consecutive frees sorted by age, since autocast frees its copies in random order."""
        ordered: list[int] = []
        for segment in self.segments:
            events = self.events[segment.start : segment.stop]
            for frees, consecutive in groupby(events, key=lambda event: event < 0):
                stretch = list(consecutive)
                ordered += sorted(stretch, reverse=True) if frees else stretch
        return ordered


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor of any shape: its shard, if the tensor is divided."""
    return getattr(tensor, "_local_tensor", tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor of any shape lie side by side, in any order: no gaps, none twice."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()

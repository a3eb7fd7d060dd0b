"""Measures the peak memory of each phase of real steps, from statistics or events of PyTorch's allocators."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)
from torch.profiler import record_function

from sft_play.units import KIB

MARK, MEMORY = "sft-play ", "[memory]"
# Events that may be missing: this share of the peak, and in any case this many bytes.
LOST, LOST_BYTES = 0.01, 64 * KIB

Event = tuple[int, int, str]  # time in ns, bytes (negative when freed), name


def storage_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and the quantization tables of 4-bit weights; each storage counts once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            tensors += [t for t in (state.absmax, state.code, state.offset) if t is not None]
            state = state.state2
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def mark(name: str) -> None:
    """Leaves a timestamped mark in the profile."""
    with record_function(MARK + name):
        pass


@contextmanager
def allocator_events() -> Iterator[list[Event]]:
    """Collects the events of the CPU allocator and our marks, in chronological order.

    The list is filled when the context ends. torch.profiler itself would also record every operation, which
    takes longer than the step.
    """
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "")
    activities = {ProfilerActivity.CPU}
    found: list[Event] = []
    # The type stub lacks the third argument: only marks are recorded, not every operation.
    enable: Any = torch.autograd._enable_profiler
    torch.autograd._prepare_profiler(config, activities)
    enable(config, activities, {RecordScope.USER_SCOPE})
    try:
        yield found
    finally:
        result: Any = torch.autograd._disable_profiler()
        found += sorted((event.start_ns(), event.nbytes(), event.name()) for event in result.events())


def peaks_by_mark(events: list[Event], *, of_last_half: bool = False) -> dict[str, int]:
    """The peak between each mark and the next one, by the name of the mark.

    Bytes that were allocated before the first event do not count.

    Args:
        events: as `allocator_events` collects them.
        of_last_half: use only the second half of the marks, for two rounds that leave the same marks.
    """
    changes = [(start, size) for start, size, name in events if name == MEMORY]
    marks = [(start, name) for start, _, name in events if name.startswith(MARK)]
    first = len(marks) // 2 + 1 if of_last_half else 1
    peaks: dict[str, int] = {}
    live = position = 0
    for number, ((_, name), (stop, _)) in enumerate(pairwise([(0, ""), *marks, (2**63, "")])):
        peak = live
        while position < len(changes) and changes[position][0] < stop:
            live += changes[position][1]
            peak = max(peak, live)
            position += 1
        if number >= first:
            kind = name.removeprefix(MARK)
            peaks[kind] = max(peak, peaks.get(kind, 0))
    return peaks


class PhaseMeter:
    """A context that measures the phases named by `begin`, the first being `load`; results exist at its end.

    All that is allocated within the context must be freed within it, except for the model's own tensors: on
    the CPU, a difference shows that events were lost.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module) -> None:
        self.peaks: dict[str, int] | None = None  # bytes, with the model's weights; None if events were lost
        self.reserved_bytes: int | None = None  # the most that the GPU's allocator reserved
        self.retries = 0  # how often the device was full, so that the allocator had to free cached blocks
        self._meter = CudaMeter(device) if device.type == "cuda" else _CpuMeter(model)

    def __enter__(self) -> Self:
        gc.collect()  # so that earlier garbage is not freed within the context
        self._meter.start()
        self.begin("load")
        return self

    @property
    def begin(self) -> Callable[[str], None]:
        """Attributes memory to this phase from here on."""
        return self._meter.begin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peaks, self.reserved_bytes, self.retries = self._meter.stop()


class CudaMeter:
    """The peak of each phase, from the statistics of the CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}
        self.reserved = 0
        self.phase: str | None = None

    def start(self) -> None:
        """Resets the statistics."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.retries_before = self._retries()

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def begin(self, phase: str | None) -> None:
        """Attributes peaks to this phase from here on; None ends the last phase."""
        if self.phase is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase

    def stop(self) -> tuple[dict[str, int], int, int]:
        """Peaks by phase, the most that was reserved, and how often cached blocks had to be freed."""
        self.begin(None)
        return self.peaks, self.reserved, self._retries() - self.retries_before


class _CpuMeter:
    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = storage_bytes(model)
        self.begin = mark

    def start(self) -> None:
        self.block = allocator_events()
        self.events = self.block.__enter__()

    def stop(self) -> tuple[dict[str, int] | None, None, int]:
        self.block.__exit__(None, None, None)
        peaks = peaks_by_mark(self.events)
        left_over = sum(size for _, size, name in self.events if name == MEMORY)
        # DDP broadcasts the weights when it wraps the model; gloo's own thread frees that copy, without an
        # event here.
        broadcast = min(max(left_over, 0), self.weights) if torch.distributed.is_initialized() else 0
        if abs(left_over - broadcast) > max(LOST_BYTES, LOST * max(peaks.values())):
            return None, None, 0
        with_weights = {phase: self.weights + peak - broadcast for phase, peak in peaks.items()}
        with_weights["load"] += broadcast
        return with_weights, None, 0

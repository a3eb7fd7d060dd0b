"""What a training step takes of a device, by its allocator: PyTorch's memory statistics on a GPU, events on the CPU."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sft_play.errors import SftPlayError
from sft_play.sizing.fake import decoder_layers
from sft_play.sizing.ledger import Ledger
from sft_play.sizing.measure import measure_step
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import WHOLE_MODEL
from sft_play.sizing.trace import forward, make_batch, marked_layers, prepare_for_training, run_step, trained_parameters

# How a step that cannot be run ends (out of memory is one of them): other cases may still be measured.
BREAKS = (RuntimeError, TypeError, ValueError, ImportError, SftPlayError)


@dataclass
class Measured:
    """Bytes of a real step. `phases` are peaks with the weights in them, `in_layers` the same while a decoder layer works."""

    weights: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    in_layers: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None  # the most that PyTorch had taken from the device
    kept_by_libraries: int | None = None  # still allocated when the model is gone: cuBLAS workspaces
    outside_allocator: int | None = None  # of the device's used memory, nothing that PyTorch allocated: the CUDA context
    retries: int | None = None  # allocations that succeeded only after cached blocks were given back
    seconds: float = 0.0
    problem: str | None = None  # what the step ended with
    out_of_memory: bool = False

    @property
    def peak(self) -> int:
        """The most that was allocated."""
        return max(self.phases.values(), default=0)


@dataclass(frozen=True)
class Counters:
    """The allocator's statistics, as functions."""

    peaks: Callable[[], tuple[int, int]]  # most bytes allocated and reserved since the last reset
    reset: Callable[[], None]


CUDA_COUNTERS = Counters(
    lambda: (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()), lambda: torch.cuda.reset_peak_memory_stats()
)


class AllocatorPeaks(Ledger):
    """A ledger that counts nothing itself: where a stretch ends it asks the allocator for the peak. It is not made a mode."""

    def __init__(self, counters: Counters):
        super().__init__()
        self.counters = counters
        self.phases: dict[str, int] = {}
        self.in_layers: dict[str, int] = {}
        self.reserved = 0
        counters.reset()

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Books the stretch that ends here."""
        self.end()
        self._phase, self._layer = phase, layer

    def leave_layer(self) -> None:
        """The next stretch belongs to no layer."""
        self.begin(self.phase)

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Counts nothing."""

    def end(self) -> None:
        """Books the last stretch."""
        allocated, reserved = self.counters.peaks()
        self.counters.reset()
        self.reserved = max(self.reserved, reserved)
        self.phases[self._phase] = max(allocated, self.phases.get(self._phase, 0))
        if self._layer != WHOLE_MODEL:
            self.in_layers[self._phase] = max(allocated, self.in_layers.get(self._phase, 0))


def two_steps(model: Any, spec: StepSpec, counters: Counters) -> AllocatorPeaks:
    """Two optimizer steps, of two micro-batches if the step accumulates, each with an evaluation batch; the second is booked.

    `reserved` is the most of both.
    """
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if spec.mode != "full" else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    prepare_for_training(model, spec)
    parameters = trained_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    reserved = 0
    for _ in range(2):
        if spec.accumulates:
            forward(model, make_batch(spec, device=parameters[0].device), spec).backward()
        peaks = AllocatorPeaks(counters)
        with marked_layers(decoder_layers(base)[2], peaks):
            run_step(model, optimizer, spec, peaks)
        peaks.end()
        peaks.phases.pop("load")  # what came before the step
        reserved = peaks.reserved = max(reserved, peaks.reserved)
    return peaks


def empty_device(device: torch.device) -> None:
    """Gives back what earlier steps left, cuBLAS workspaces too, so that each step starts alike."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def measure(build: Callable[[], Any], spec: StepSpec, device: torch.device, *, allowed_bytes: int | None = None) -> Measured:
    """Builds a model, trains it for two steps and says what that took; running out of memory is a result, too.

    Args:
        build: makes the model on the device.
        spec: the step.
        device: which one.
        allowed_bytes: the most that PyTorch may take; on the CPU, which cannot be limited, more counts as out of memory.
    """
    empty_device(device)
    started = time.perf_counter()
    try:
        found = _on_cuda(build, spec, device, allowed_bytes) if device.type == "cuda" else _on_cpu(build, spec)
        found.out_of_memory = device.type == "cpu" and allowed_bytes is not None and found.peak > allowed_bytes
    except torch.OutOfMemoryError as error:
        found = Measured(problem=str(error).partition("\n")[0], out_of_memory=True)
    except BREAKS as error:
        found = Measured(problem=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    found.seconds = round(time.perf_counter() - started, 2)
    if device.type == "cuda" and found.problem is None:
        gc.collect()
        found.kept_by_libraries = torch.cuda.memory_allocated()
    return found


def _on_cpu(build: Callable[[], Any], spec: StepSpec) -> Measured:
    measured = measure_step(build(), spec)
    return Measured(measured.weights, measured.phases, measured.in_layers)


def _on_cuda(build: Callable[[], Any], spec: StepSpec, device: torch.device, allowed_bytes: int | None) -> Measured:
    model = build()  # before the limit is set: weights that are packed on the device need more than packed ones
    empty_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (allowed_bytes or total) / total))
    weights = torch.cuda.memory_allocated()
    try:
        peaks = two_steps(model, spec, CUDA_COUNTERS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return Measured(
        weights=weights,
        phases=peaks.phases,
        in_layers=peaks.in_layers,
        reserved=peaks.reserved,
        outside_allocator=total - free - torch.cuda.memory_reserved(),
        retries=torch.cuda.memory_stats()["num_alloc_retries"],
    )

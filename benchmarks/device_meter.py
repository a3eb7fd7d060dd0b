"""What a training step takes of a device, by its allocator: PyTorch's memory statistics on a GPU, events on the CPU."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sft_play.errors import SftPlayError
from sft_play.sizing.fake import decoder_layers
from sft_play.sizing.measure import LAYER, PhaseMarks, measure_step
from sft_play.sizing.phases import CudaMeter
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import PHASES, WHOLE_MODEL
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


class MeteredPhases(PhaseMarks):
    """A ledger that counts nothing itself: where a phase or a layer begins it tells a meter."""

    def __init__(self, meter: CudaMeter):
        super().__init__()
        self._meter = meter

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Books what came before."""
        self._phase = phase
        self._meter.begin(phase + (LAYER if layer != WHOLE_MODEL else ""))


def two_steps(model: Any, spec: StepSpec, device: torch.device) -> Measured:
    """Two optimizer steps, of two micro-batches if the step accumulates, each with an evaluation batch.

    Peaks are those of the second step: it finds optimizer states, which the first one lacks until its end.
    """
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if spec.mode != "full" else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    prepare_for_training(model, spec)
    parameters = trained_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    meter = CudaMeter(device)
    meter.start()
    ledger = MeteredPhases(meter)
    for _ in range(2):
        meter.begin("accumulated")
        if spec.accumulates:
            forward(model, make_batch(spec, device=parameters[0].device), spec).backward()
        with marked_layers(decoder_layers(base)[2], ledger):
            run_step(model, optimizer, spec, ledger)
    stretches, reserved, retries = meter.stop()
    in_layers = {phase: stretches[phase + LAYER] for phase in PHASES if phase + LAYER in stretches}
    whole = {phase: max(stretches[phase], in_layers.get(phase, 0)) for phase in PHASES if phase in stretches}
    return Measured(phases=whole, in_layers=in_layers, reserved=reserved, retries=retries)


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
        found = two_steps(model, spec, device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found.weights, found.outside_allocator = weights, total - free - torch.cuda.memory_reserved()
    return found

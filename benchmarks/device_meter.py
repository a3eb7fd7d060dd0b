"""Measures the memory of a training step: by PyTorch's statistics on a GPU, by events on the CPU."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cpu_meter import LAYER, PhaseMarks, measure_step
from sft_play.choices.optimizers import make_optimizer
from sft_play.errors import SftPlayError
from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.meters.cpu import CpuMeter
from sft_play.sizing.meters.phases import CudaMeter
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import (
    forward,
    layer_hooks,
    make_batch,
    prepare_for_training,
    run_step,
    trained_parameters,
)
from sft_play.timeline import PHASES, WHOLE_MODEL

# Errors of a step that cannot be run, out of memory among them; other cases are still measured.
STEP_ERRORS = (RuntimeError, TypeError, ValueError, ImportError, SftPlayError)


@dataclass
class Measured:
    """Bytes of a real step; peaks include the weights."""

    weights: int = 0
    phases: dict[str, int] = field(default_factory=dict)  # peak by phase
    in_layers: dict[str, int] = field(default_factory=dict)  # peak by phase while a decoder layer is running
    reserved: int | None = None  # the most that PyTorch reserved from the device
    kept_by_libraries: int | None = None  # still allocated after the model is deleted: cuBLAS workspaces
    outside_allocator: int | None = None  # device memory not reserved by PyTorch: the CUDA context
    retries: int | None = None  # allocations that succeeded only after cached blocks were freed
    step_seconds: float | None = None  # of the second optimizer step, with its evaluation batch
    seconds: float = 0.0  # of all of it
    problem: str | None = None  # the error that ended the step
    out_of_memory: bool = False

    @property
    def peak(self) -> int:
        """The highest peak of allocated bytes."""
        return max(self.phases.values(), default=0)


class MeteredPhases(PhaseMarks):
    """A recorder that records nothing itself: it tells a meter where phases and layers begin."""

    def __init__(self, meter: CudaMeter | CpuMeter):
        super().__init__()
        self._meter = meter

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Ends the previous phase and begins this one."""
        self.phase = phase
        if phase == "optimizer":
            self._meter.anchor()
        self._meter.begin(phase + (LAYER if layer != WHOLE_MODEL else ""))


def two_steps(model: Any, spec: StepSpec, device: torch.device, meter: CudaMeter | CpuMeter) -> Measured:
    """Runs two optimizer steps, of two micro-batches each if the step accumulates, with an evaluation batch.

    The peaks are those of the second step, when optimizer states exist.
    """
    add_loss_head(model)
    base = model.get_base_model() if spec.mode != "full" else model
    prepare_for_training(model, spec)
    parameters = trained_parameters(model)
    optimizer = make_optimizer(spec.optimizer, parameters)
    meter.start()
    recorder = MeteredPhases(meter)
    for _ in range(2):
        _wait_for(device)
        started = time.perf_counter()
        meter.begin("accumulated")
        if spec.accumulates:
            forward(model, make_batch(spec, device=parameters[0].device), spec).backward()
        with layer_hooks(decoder_layers(base)[2], recorder):
            run_step(model, optimizer, spec, recorder)
        _wait_for(device)
        seconds = time.perf_counter() - started
    found, reserved, retries = meter.stop()
    peaks = found or {}
    in_layers = {phase: peaks[phase + LAYER] for phase in PHASES if phase + LAYER in peaks}
    phases = {phase: max(peaks[phase], in_layers.get(phase, 0)) for phase in PHASES if phase in peaks}
    return Measured(
        phases=phases, in_layers=in_layers, reserved=reserved, retries=retries, step_seconds=seconds
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def empty_device(device: torch.device) -> None:
    """Frees what earlier steps left behind, cuBLAS workspaces too, so that all steps start equal."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def measure(
    build: Callable[[], Any], spec: StepSpec, device: torch.device, *, allowed_bytes: int | None = None
) -> Measured:
    """Builds a model, trains it for two steps and measures memory; running out of it is a result too.

    Args:
        build: builds the model on the device.
        spec: the step.
        device: the device.
        allowed_bytes: limit of PyTorch's allocator; the CPU's cannot be limited, so there a higher peak
            counts as out of memory.
    """
    empty_device(device)
    started = time.perf_counter()
    try:
        if device.type == "cuda":
            found = _on_cuda(build, spec, device, allowed_bytes)
        elif spec.sharing.sharded:
            model = build()
            found = two_steps(model, spec, device, CpuMeter(model))
        else:
            found = _on_cpu(build, spec)
            found.out_of_memory = allowed_bytes is not None and found.peak > allowed_bytes
    except torch.OutOfMemoryError as error:
        found = Measured(problem=str(error).partition("\n")[0], out_of_memory=True)
    except STEP_ERRORS as error:
        found = Measured(problem=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    found.seconds = round(time.perf_counter() - started, 2)
    if device.type == "cuda" and found.problem is None:
        gc.collect()
        found.kept_by_libraries = torch.cuda.memory_allocated()
    return found


def _on_cpu(build: Callable[[], Any], spec: StepSpec) -> Measured:
    measured = measure_step(build(), spec)
    return Measured(measured.weights, measured.phases, measured.in_layers)


def _on_cuda(
    build: Callable[[], Any], spec: StepSpec, device: torch.device, allowed_bytes: int | None
) -> Measured:
    model = build()  # before the limit is set, since packing weights needs more memory than packed weights
    empty_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (allowed_bytes or total) / total))
    weights = torch.cuda.memory_allocated()
    try:
        found = two_steps(model, spec, device, CudaMeter(device))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found.weights, found.outside_allocator = weights, total - free - torch.cuda.memory_reserved()
    return found

"""Measures a real step on the CPU by the allocator's own events: the ground truth for traces."""

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.choices.optimizers import make_optimizer
from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.layers.compilation import compile_layers
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.meters.cpu import (
    MARK,
    MEMORY,
    Event,
    allocator_events,
    mark,
    peaks_by_mark,
    storage_bytes,
)
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import (
    copying_inputs,
    forward,
    layer_hooks,
    make_batch,
    prepare_for_training,
    run_step,
    trained_parameters,
)
from sft_play.timeline import PHASES, WHOLE_MODEL
from sft_play.vision.looks import look_of

LAYER = " layer"
# The profiler sorts by a clock that jumps on some virtual machines, and drops events outside its window.
ATTEMPTS = 3


class PhaseMarks(AllocationRecorder):
    """A recorder that records nothing: it marks the beginning of phases and decoder layers in the profile."""

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Leaves a timestamped mark."""
        self.phase = phase
        mark(phase + (LAYER if layer != WHOLE_MODEL else ""))

    def leave_layer(self) -> None:
        """Leaves a mark for the end of the layers."""
        self.begin(self.phase)

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Records nothing."""


def copying_within_ram() -> AbstractContextManager[None]:
    """Lets inputs of layers be copied to RAM and back as on a GPU, on a CPU, where both are one memory."""
    return copying_inputs(torch.clone, torch.clone)


@dataclass(frozen=True)
class Measurement:
    """Bytes of a real step: `weights` is in use before it, `phases` are peaks that include the weights."""

    weights: int
    phases: dict[str, int]
    in_layers: dict[str, int]  # peaks while a decoder layer is running

    @property
    def peak(self) -> int:
        """The highest peak."""
        return max(self.phases.values())


def measure_step(model: Any, spec: StepSpec) -> Measurement:
    """Runs two optimizer steps on the CPU and measures the second, when optimizer states exist, by phase.

    Args:
        model: the model as the trainer builds it, with adapters if the mode has them.
        spec: the step; its `device` must be the CPU.
    """
    add_loss_head(model)
    base = model.get_base_model() if spec.mode != "full" else model
    prepare_for_training(model, spec)
    if spec.kernels.compiled:
        compile_layers(model)
    weights = storage_bytes(model)
    for _ in range(ATTEMPTS):
        optimizer = make_optimizer(spec.optimizer, trained_parameters(model))
        events = _two_steps(model, decoder_layers(base)[2], optimizer, spec)
        if sum(event.size for event in events if event.name == MEMORY) == _state_bytes(optimizer):
            break
    else:
        raise RuntimeError(
            "the profiler lost allocator events: what was not freed differs from the optimizer's states"
        )
    marks = [place for place, event in enumerate(events) if event.name.startswith(MARK)]
    second = marks[len(marks) // 2]  # where the second step begins, which leaves the same marks as the first
    kept = [event for place, event in enumerate(events) if place >= second or event.name == MEMORY]
    peaks = peaks_by_mark(kept)
    phases: dict[str, int] = {}
    in_layers: dict[str, int] = {}
    for phase in PHASES:
        if phase + LAYER in peaks:
            in_layers[phase] = weights + peaks[phase + LAYER]
        if phase in peaks:
            phases[phase] = max(weights + peaks[phase], in_layers.get(phase, 0))
    return Measurement(weights, phases, in_layers)


def _two_steps(
    model: Any, layers: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, spec: StepSpec
) -> list[Event]:
    with warnings.catch_warnings(), allocator_events() as events:
        warnings.simplefilter("ignore")
        for _ in range(2):
            if spec.accumulates:
                forward(model, make_batch(spec, look=look_of(model.config)), spec).backward()
            marks = PhaseMarks()
            with layer_hooks(layers, marks):
                run_step(model, optimizer, spec, marks)
    return events


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's states, the only allocations that outlive a step.

    The tables of 8-bit values, which states share, exist before.
    """
    size = 0
    for state in optimizer.state.values():
        own = [value for name, value in state.items() if not name.startswith("qmap")]
        tensors = [value for value in own if isinstance(value, torch.Tensor)]
        size += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return size

"""The same step for real on the CPU, measured by the allocator's own events: the ground truth of the symbolic step."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.sizing.fake import decoder_layers
from sft_play.sizing.ledger import Ledger
from sft_play.sizing.phases import MEMORY, Event, allocator_events, mark, peaks_by_mark, storage_bytes
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import PHASES, WHOLE_MODEL
from sft_play.sizing.trace import forward, make_batch, marked_layers, prepare_for_training, run_step, trained_parameters

LAYER = " layer"
ATTEMPTS = 3  # the profiler sorts by a clock that virtual machines bend at times, and drops what falls out of its window


class PhaseMarks(Ledger):
    """A ledger that counts nothing: it writes into the profile when a phase or a decoder layer begins."""

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Leaves a mark with the time."""
        self._phase = phase
        mark(phase + (LAYER if layer != WHOLE_MODEL else ""))

    def leave_layer(self) -> None:
        """Leaves a mark, too."""
        self.begin(self.phase)

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Counts nothing."""


@dataclass(frozen=True)
class Measurement:
    """Bytes of a real step: `weights` lie in memory before it, `phases` are peaks with the weights in them."""

    weights: int
    phases: dict[str, int]
    in_layers: dict[str, int]  # the same while a decoder layer is at work

    @property
    def peak(self) -> int:
        """The most that was in use."""
        return max(self.phases.values())


def measure_step(model: Any, spec: StepSpec) -> Measurement:
    """Runs two optimizer steps on the CPU; the second, which finds optimizer states, is measured, phase by phase.

    Args:
        model: as the trainer builds it, with adapters if the mode has them.
        spec: the step; `device` must be the CPU.
    """
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if spec.mode != "full" else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    prepare_for_training(model, spec)
    weights = storage_bytes(model)
    for _ in range(ATTEMPTS):
        optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-4, fused=True)
        events = _two_steps(model, decoder_layers(base)[2], optimizer, spec)
        if sum(size for _, size, name in events if name == MEMORY) == _state_bytes(optimizer):
            break
    else:
        raise RuntimeError("the profiler lost allocator events: what it saw does not add up to the optimizer's states")
    stretches = peaks_by_mark(events, of_last_half=True)
    whole = {phase: weights + max(stretches.get(phase, 0), stretches.get(phase + LAYER, 0)) for phase in PHASES}
    layered = {phase: weights + stretches.get(phase + LAYER, 0) for phase in PHASES}
    return Measurement(
        weights,
        phases={phase: size for phase, size in whole.items() if phase in stretches},
        in_layers={phase: size for phase, size in layered.items() if phase + LAYER in stretches},
    )


def _two_steps(model: Any, layers: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, spec: StepSpec) -> list[Event]:
    with warnings.catch_warnings(), allocator_events() as events:
        warnings.simplefilter("ignore")
        for _ in range(2):
            if spec.accumulates:
                forward(model, make_batch(spec), spec).backward()
            marks = PhaseMarks()
            with marked_layers(layers, marks):
                run_step(model, optimizer, spec, marks)
    return events


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What is left after a step: everything else has been freed."""
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

"""The same step for real on the CPU, measured by the allocator's own events: the ground truth of the symbolic step."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.profiler import record_function

from sft_play.sizing.fake import decoder_layers
from sft_play.sizing.ledger import Ledger
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import PHASES, WHOLE_MODEL
from sft_play.sizing.trace import forward, make_batch, marked_layers, prepare_for_training, run_step, trained_parameters

MARK, MEMORY = "sft-play ", "[memory]"
LAYER = " layer"
ATTEMPTS = 3  # the profiler sorts by a clock that virtual machines bend at times, and drops what falls out of its window


class PhaseMarks(Ledger):
    """A ledger that counts nothing: it writes into the profile when a phase or a decoder layer begins."""

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Leaves a mark with the time."""
        self._phase = phase
        with record_function(MARK + phase + (LAYER if layer != WHOLE_MODEL else "")):
            pass

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


def storage_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and the tables of 4-bit weights, each storage once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            tensors += [t for t in (state.absmax, state.code, state.offset) if t is not None]
            state = state.state2
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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
    stretches = _stretches(events)
    whole = {phase: weights + max(stretches.get(phase, 0), stretches.get(phase + LAYER, 0)) for phase in PHASES}
    layered = {phase: weights + stretches.get(phase + LAYER, 0) for phase in PHASES}
    return Measurement(
        weights,
        phases={phase: size for phase, size in whole.items() if phase in stretches},
        in_layers={phase: size for phase, size in layered.items() if phase + LAYER in stretches},
    )


def _two_steps(
    model: Any, layers: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, spec: StepSpec
) -> list[tuple[int, int, str]]:
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


@contextmanager
def allocator_events() -> Iterator[list[tuple[int, int, str]]]:
    """Collects (time, bytes, name) of what the CPU allocator gives and takes and of our marks, in order, when it ends.

    torch.profiler would record every operation as well, which takes longer than the step.
    """
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "")
    activities = {ProfilerActivity.CPU}
    found: list[tuple[int, int, str]] = []
    enable: Any = torch.autograd._enable_profiler  # its type stub lacks the scopes: marks alone, not every operation
    torch.autograd._prepare_profiler(config, activities)
    enable(config, activities, {RecordScope.USER_SCOPE})
    try:
        yield found
    finally:
        result: Any = torch.autograd._disable_profiler()
        found += sorted((event.start_ns(), event.nbytes(), event.name()) for event in result.events())


def _stretches(events: list[tuple[int, int, str]]) -> dict[str, int]:
    """The most bytes above the weights in each kind of stretch of the last step."""
    changes = [(start, size) for start, size, name in events if name == MEMORY]
    marks = [(start, name) for start, _, name in events if name.startswith(MARK)]
    peaks: dict[str, int] = {}
    live = position = 0
    for number, ((_, name), (stop, _)) in enumerate(pairwise([(0, ""), *marks, (2**63, "")])):
        peak = live
        while position < len(changes) and changes[position][0] < stop:
            live += changes[position][1]
            peak = max(peak, live)
            position += 1
        if number > len(marks) // 2:  # the second of two steps that leave the same marks
            kind = name.removeprefix(MARK)
            peaks[kind] = max(peak, peaks.get(kind, 0))
    return peaks

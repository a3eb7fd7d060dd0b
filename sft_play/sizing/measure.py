"""The same step for real on the CPU, measured by the allocator's own events: the ground truth of the symbolic step."""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sft_play.sizing.ledger import Ledger
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import PHASES
from sft_play.sizing.trace import forward, make_batch, prepare_for_training, run_step, trained_parameters

MARK = "sft-play "


class PhaseMarks(Ledger):
    """A ledger that counts nothing: it writes the beginning of each phase into the profile."""

    def begin(self, phase: str, layer: int = -1) -> None:
        """Leaves a mark with the time."""
        with record_function(MARK + phase):
            pass

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Counts nothing."""


@dataclass(frozen=True)
class Measurement:
    """Bytes of a real step: `weights` lie in memory before it, `phases` are peaks with the weights in them."""

    weights: int
    phases: dict[str, int]

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

    add_fused_lm_head(model.get_base_model() if spec.mode != "full" else model, outputs=("log_probs", "entropy", "is_top1"))
    prepare_for_training(model, spec)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-4, fused=True)
    weights = storage_bytes(model)
    with warnings.catch_warnings(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        warnings.simplefilter("ignore")
        for _ in range(2):
            if spec.accumulates:
                forward(model, make_batch(spec), spec).backward()
            run_step(model, optimizer, spec, PhaseMarks())
    return Measurement(weights, {phase: weights + peak for phase, peak in _phase_peaks(prof).items()})


def _phase_peaks(prof: profile) -> dict[str, int]:
    """The most bytes above the weights in each phase of the last step, from the allocator's events."""
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    events: list[Any] = prof.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    marks = sorted((event.start_ns(), event.name()) for event in events if event.name().startswith(MARK))
    last = max(index for index, (_, name) in enumerate(marks) if name == MARK + "forward")
    marks = [*marks[last:], (2**63, "")]
    live, position, peaks = 0, 0, {}
    for (_, name), (stop, _) in pairwise([(0, ""), *marks]):
        peak = live
        while position < len(changes) and changes[position][0] < stop:
            live += changes[position][1]
            peak = max(peak, live)
            position += 1
        if name:
            peaks[name.removeprefix(MARK)] = peak
    return {phase: peaks[phase] for phase in PHASES if phase in peaks}

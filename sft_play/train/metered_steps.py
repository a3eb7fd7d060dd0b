"""Measures memory in the run itself on a CPU, whose allocator keeps no statistics: of two of its steps.

They are the one that the trace names as the highest, and the next one, which finds what the first has left.
"""

from typing import Any

from transformers import TrainerCallback, TrainerState

from sft_play.plan import Plan
from sft_play.sizing.meters.phases import PhaseMeter

STEPS = 2
BETWEEN_STEPS = "between steps"  # where a checkpoint is saved, for example


class MeteredSteps(TrainerCallback):
    """Meters the steps with the highest peak; as the first callback, so that no timer counts its work."""

    def __init__(self, first: int, trainer: Any) -> None:
        self.first, self.trainer = first, trainer
        self.phases: dict[str, int] = {}  # peaks in bytes; {} if these steps were not run
        self._made = PhaseMeter(trainer.args.device, trainer.model)  # before there is more than the model
        self._meter: PhaseMeter | None = None

    @property
    def name(self) -> str:
        """Which steps they are, for people."""
        return f"steps {self.first + 1} and {self.first + 2}"

    def begin(self, phase: str) -> None:
        """Attributes memory to a phase from here on."""
        if self._meter:
            counts = self.trainer.state.global_step >= self.first
            self._meter.begin(phase if counts else BETWEEN_STEPS)

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Begins if no step comes before the first of them."""
        if state.global_step == self.first:
            self._start()

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Begins a step early, to see what that step leaves to be freed in the first; ends after the last."""
        if self._meter and state.global_step >= self.first + STEPS:
            self._end()
        if state.global_step == self.first - 1:
            self._start()

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """The update begins."""
        if self._meter:
            self._meter.anchor()
        self.begin("optimizer")

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """What follows belongs to no phase of a step."""
        self.begin(BETWEEN_STEPS)

    def on_evaluate(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """As after a step."""
        self.begin(BETWEEN_STEPS)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """The first step may have been the last one."""
        self._end()

    def _start(self) -> None:
        self._meter = self._made.__enter__()

    def _end(self) -> None:
        if self._meter:
            self._meter.__exit__()
            self.phases = {
                name: peak for name, peak in (self._meter.peaks or {}).items() if name != BETWEEN_STEPS
            }
            self._meter = None


def highest_step(plan: Plan, args: Any) -> int | None:
    """The step with the highest predicted peak, counted from 0; None if it is unknown.

    If the peak is in an evaluation, the first step that one follows.
    """
    highest = plan.memory.highest if plan.memory else None
    if plan.memory is None or highest is None:
        return None
    if plan.memory.peak_phase == "evaluation":
        return int(args.eval_steps) - 1
    return highest.train // (plan.batch.accumulation * plan.sharing.data_ranks)

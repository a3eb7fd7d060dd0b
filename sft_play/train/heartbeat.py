"""Reports where a rank is, at each forward pass and around the steps, so that a hanging rank can be found."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.launch.beats import Pulse
from sft_play.runlog import RunDir


class Heartbeat(TrainerCallback):
    """One rank's heartbeats while it trains.

    If none comes within the limit, the rank writes its stack traces and exits.
    """

    def __init__(self, run: RunDir, rank: int, limit_s: float) -> None:
        self._pulse = Pulse(run, rank, limit_s)
        self._where, self._passes = "model setup", 0
        self._pulse.beat(self._where)

    def _now(self, where: str) -> None:
        self._where, self._passes = where, 0
        self._pulse.beat(where)
        self._pulse.restart_watchdog()

    def _on_forward(self, *inputs: Any) -> None:
        self._passes += 1
        self._pulse.beat(f"{self._where}, in or after forward pass {self._passes}")
        self._pulse.restart_watchdog()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts to enforce the limit."""
        self._hook = kwargs["model"].register_forward_pre_hook(self._on_forward)
        self._now("the first evaluation")

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reports the step that begins."""
        self._now(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reports that a step has ended; evaluation and saving may follow."""
        self._now(f"evaluation, saving or data loading after step {state.global_step}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops: nothing after training waits for other ranks."""
        self._hook.remove()
        self._pulse.stop()

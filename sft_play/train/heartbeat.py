"""Says where a rank is, at each forward pass and around the steps, so that one that hangs can be named."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.launch.beats import Pulse
from sft_play.runlog import RunDir


class Heartbeat(TrainerCallback):
    """One rank's signs of life while it trains; where none comes for the limit, it writes its stacks and ends."""

    def __init__(self, run: RunDir, rank: int, limit_s: float) -> None:
        self._pulse = Pulse(run, rank, limit_s)
        self._where, self._passes = "the preparation of the model", 0
        self._pulse.beat(self._where)

    def _now(self, where: str) -> None:
        self._where, self._passes = where, 0
        self._pulse.beat(where)
        self._pulse.end_unless_it_goes_on()

    def _on_forward(self, *inputs: Any) -> None:
        self._passes += 1
        self._pulse.beat(f"{self._where}, forward pass {self._passes} and what follows it")
        self._pulse.end_unless_it_goes_on()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """From here on there is a limit."""
        self._hook = kwargs["model"].register_forward_pre_hook(self._on_forward)
        self._now("the first evaluation")

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step."""
        self._now(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluation and checkpoint come after a step."""
        self._now(f"what follows step {state.global_step} (evaluation, checkpoint, the next rows)")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What comes now waits for nobody."""
        self._hook.remove()
        self._pulse.stop()

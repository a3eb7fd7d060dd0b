"""What happens around the steps: numbers for people and files, a clean stop on a signal, a halt at NaN."""

import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.errors import NonFiniteError
from sft_play.runlog import RunDir, append_metrics, console, is_main_rank
from sft_play.sizing.planner import Plan
from sft_play.train.meter import MemoryMeter
from sft_play.train.rows import TrainingRows
from sft_play.units import GIB, format_duration


class Reporter(TrainerCallback):
    """Writes metrics.jsonl and, on the main rank, a bar and one line a logging step."""

    def __init__(self, plan: Plan, rows: TrainingRows, run: RunDir, meter: MemoryMeter) -> None:
        self.plan, self.rows, self.run, self.meter = plan, rows, run, meter
        self.training_seconds = 0.0
        self._step_began = self._window_seconds = 0.0
        self._window_start = self._began_at = 0
        self._first_step: int | None = None
        self._timed_tokens = 0
        self._progress = Progress(
            TextColumn("  training"),
            BarColumn(32),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console(),
            transient=True,
            redirect_stdout=False,  # what libraries print stays in the log
            redirect_stderr=False,
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are not padding, over all devices; the first step, which warms up, is left out."""
        return self._timed_tokens / self.training_seconds if self.training_seconds else None

    def _print(self, text: str) -> None:
        if is_main_rank():
            self._progress.console.print(text)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the bar where the run goes on."""
        self._window_start = self._began_at = state.global_step
        self._task = self._progress.add_task("train", total=state.max_steps, completed=state.global_step)
        if is_main_rank() and console().is_terminal:
            self._progress.start()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the clock of a step; evaluation and saving are outside of it."""
        self._step_began = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Adds up the time of the step."""
        seconds = time.perf_counter() - self._step_began
        self._window_seconds += seconds
        if self._first_step is None:
            self._first_step = state.global_step
        else:
            self.training_seconds += seconds
            self._timed_tokens += self.rows.tokens_per_step[state.global_step - 1]
        self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs: Any) -> None:
        """One record of training, from the numbers that the trainer logs."""
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        tokens = sum(self.rows.tokens_per_step[self._window_start : step])
        speed = tokens / self._window_seconds if self._window_seconds else 0.0
        self._window_start, self._window_seconds = step, 0.0
        peak = self.meter.peak_bytes()
        epoch = step / self.plan.steps_per_epoch
        if is_main_rank():
            record = {
                "step": step,
                "train/epoch": epoch,
                "train/loss": logs["loss"],
                "train/grad_norm": logs.get("grad_norm"),
                "train/learning_rate": logs["learning_rate"],
                "train/supervised_tokens": sum(self.rows.supervised_per_step[:step]),
                "speed/tokens_per_second": speed,
                "memory/peak_bytes": peak,
            }
            append_metrics(self.run, record)
        width = len(str(state.max_steps))
        self._print(
            f"  step {step:>{width}}/{state.max_steps}  loss [bold]{logs['loss']:.4f}[/]  lr {logs['learning_rate']:.2e}  "
            f"{speed:>7,.0f} tok/s  {peak / GIB:.2f} GiB  epoch {epoch:.2f}"
        )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict | None = None, **kwargs: Any
    ) -> None:
        """One record of evaluation."""
        metrics = metrics or {}
        scores = {"loss": metrics["eval_loss"], "token_accuracy": metrics["eval_token_accuracy"]}
        if is_main_rank():
            append_metrics(self.run, {"step": state.global_step, **{f"eval/{name}": value for name, value in scores.items()}})
        self._print(
            f"  step {state.global_step}  validation loss [bold]{scores['loss']:.4f}[/]  "
            f"next-token accuracy {scores['token_accuracy']:.1%}"
        )

    def end_bar(self) -> None:
        """Takes the bar off the screen, which also gives the cursor back."""
        if self._progress.live.is_started:
            self._progress.stop()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the bar."""
        self.end_bar()
        self._print(f"  trained {state.global_step - self._began_at} steps in {format_duration(self.training_seconds)}")


class EvaluateAtEnd(TrainerCallback):
    """The last step is evaluated and saved too, wherever the intervals fall, so that it can be the best one."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks for both after the last step."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True


class TagOnEachMachine(TrainerCallback):
    """DeepSpeed writes the file that names the folder of its state on the main rank only; each machine's own disk needs it."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes it where it is not."""
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        for folder in checkpoint.glob("global_step*"):
            (checkpoint / "latest").write_text(folder.name, encoding="utf-8")


class NonFiniteGuard(TrainerCallback):
    """Stops before a step that would write NaN into the weights."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks at one gradient: clipping multiplies all of them by max_norm / total norm, so one NaN reaches every one.

        fp16 is left to the gradient scaler, which skips such a step and lowers its scale. DeepSpeed hides its gradients.
        """
        if args.fp16 or kwargs.get("model") is None:
            return
        grads = (p.grad for p in kwargs["model"].parameters() if p.requires_grad and p.grad is not None)
        smallest = min(grads, key=lambda grad: grad.numel(), default=None)
        if smallest is not None and not torch.isfinite(smallest).all():
            raise _not_finite("the gradient", state.global_step + 1)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs: Any) -> None:
        """The loss is averaged over all ranks, so every rank stops at the same step."""
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise _not_finite("the loss", state.global_step)


def _not_finite(what: str, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"{what} became NaN or infinite at step {step}; training stopped, nothing of this step was saved.\n"
        "Lower train.learning_rate, lengthen train.warmup_ratio, or look at the rows of this step; "
        "`make resume` goes on from the last checkpoint"
    )


class StopOnSignal(TrainerCallback):
    """After SIGTERM, SIGINT or SIGUSR1 on any rank: finish the step, save a checkpoint, stop. A second SIGINT stops at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.stopped = False
        self._asked = False
        self._world_size, self._device = world_size, device
        self._earlier: dict[int, Any] = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Takes over the signals."""
        self._earlier = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All ranks learn of a signal to any of them, in the same step."""
        asked = self._asked
        if self._world_size > 1:
            flag = torch.tensor(int(asked), device=self._device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            asked = bool(flag.item())
        if asked and not self.stopped and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True
            console().print(f"  stopping after step {state.global_step}: saving a checkpoint")

    def give_signals_back(self) -> None:
        """To whoever had them before training; also after an error, when no callback is called."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier = {}

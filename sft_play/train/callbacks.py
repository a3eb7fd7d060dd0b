"""Trainer callbacks: metrics for files and the console, early stopping, and where a rank is."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from sft_play.hooks import Listener
from sft_play.launch.beats import SETUP, Pulse
from sft_play.machine.host import own_ram_bytes
from sft_play.plan import Plan
from sft_play.runlog import RunDir, append_metrics
from sft_play.start import seconds_of_start, start_line
from sft_play.train.memory_meter import MemoryMeter
from sft_play.train.rows import TrainingRows
from sft_play.ui.console import console, printing_aloud
from sft_play.units import GIB, counted, format_bytes, format_duration


class Reporter(TrainerCallback):
    """Times the steps; the main rank writes metrics.jsonl, a progress bar and one line per logging step."""

    def __init__(
        self,
        plan: Plan,
        rows: TrainingRows,
        run: RunDir,
        meter: MemoryMeter,
        *,
        main: bool,
        flops_share: float | None = None,
        progress: Listener | None = None,
    ) -> None:
        """Only the `main` rank prints and writes, and calls `progress` with each record.

        `flops_share` of the devices' peak is what a token per second takes; None if the peak is unknown.
        """
        self.plan, self.rows, self.run, self.meter = plan, rows, run, meter
        self.main, self.flops_share, self.progress = main, flops_share, progress
        self.training_seconds = self.waiting_seconds = self._timed_seconds = 0.0
        self.start_seconds: dict[str, float] | None = None  # by part, once a step has begun
        self._free_since = 0.0
        self._step_began = self._window_seconds = 0.0
        self._window_start = self.began_at = 0  # the step from which this part goes on
        self._warmed_up = False
        self._timed_tokens = self.timed_steps = 0
        self._progress = Progress(
            TextColumn("  {task.description:<10}"),
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
        """Non-padding tokens per second over all devices, without the first step, which warms up."""
        return self._timed_tokens / self._timed_seconds if self._timed_seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Average seconds per step, without the first one, which warms up."""
        return self._timed_seconds / self.timed_steps if self.timed_steps else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the run; None if the devices' peak is unknown."""
        return self._mfu(self.tokens_per_second)

    def _mfu(self, speed: float | None) -> float | None:
        return None if speed is None or self.flops_share is None else speed * self.flops_share

    @property
    def data_wait(self) -> float | None:
        """Share of the time that steps waited for their micro-batches; the first one is left out."""
        total = self._timed_seconds + self.waiting_seconds
        return self.waiting_seconds / total if self.timed_steps else None

    def _print(self, *parts: str | tuple[str, str]) -> None:
        if self.main:
            self._progress.console.print(Text.assemble(*parts))

    def _write(self, record: dict[str, Any]) -> None:
        append_metrics(self.run, record)
        if self.progress:
            with printing_aloud():
                self.progress(record)

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Starts the progress bar at the current step."""
        self._window_start = self.began_at = state.global_step
        self._task = self._progress.add_task("training", total=state.max_steps, completed=state.global_step)
        if self.main and console().is_terminal:
            self._progress.start()

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Starts timing a step; evaluation, saving and the wait for data are not included."""
        self._step_began = time.perf_counter()
        if self.start_seconds is None:
            self.start_seconds = seconds_of_start()
            if self.main and os.environ.get("V") == "1":
                console().print(f"  {start_line(self.start_seconds)}", style="dim")
        if self._warmed_up:
            self.waiting_seconds += self._step_began - self._free_since

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Adds the time of the step to the totals; asks for a record of the last step."""
        self._free_since = time.perf_counter()
        seconds = self._free_since - self._step_began
        self._window_seconds += seconds
        self.training_seconds += seconds
        if self._warmed_up:
            self._timed_seconds += seconds
            self.timed_steps += 1
            self._timed_tokens += self.rows.tokens_per_step[state.global_step - 1]
        self._warmed_up = True
        self._progress.update(self._task, completed=state.global_step)
        if state.global_step >= state.max_steps:
            control.should_log = True

    def show_phase(self, phase: str) -> None:
        """Shows on the bar whether the run trains or evaluates."""
        doing = "evaluating" if phase == "evaluation" else "training"
        if doing != self._progress.tasks[self._task].description:
            self._progress.update(self._task, description=doing)

    def numbers(self, step: int) -> dict[str, float | None]:
        """Speed since the last record, and the share of time spent waiting for data; None if unknown."""
        tokens = sum(self.rows.tokens_per_step[self._window_start : step])
        speed = tokens / self._window_seconds if self._window_seconds else 0.0
        steps = step - self._window_start
        return {
            "speed/tokens_per_second": speed,
            "speed/samples_per_second": self._rows_per_second(steps),
            "speed/step_seconds": self._window_seconds / steps if steps else None,
            "speed/mfu": self._mfu(speed),
            "speed/data_wait": self.data_wait,
        }

    def _rows_per_second(self, steps: int) -> float | None:
        """None with packing, where a sequence has several rows."""
        if self.plan.rows.packing or not self._window_seconds:
            return None
        return steps * self.plan.batch.effective / self._window_seconds

    def shown(self, step: int) -> dict[str, float | None]:
        """What trackers show beside the loss; None if unknown."""
        return {
            **self.numbers(step),
            "memory/peak_gib": self.meter.peak_bytes() / GIB,
            "train/supervised_tokens": sum(self.rows.supervised_per_step[:step]),
        }

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict | None = None, **_: object
    ) -> None:
        """Writes a training record from the trainer's logs."""
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        numbers = self.numbers(step)
        speed = numbers["speed/tokens_per_second"] or 0.0
        self._window_start, self._window_seconds = step, 0.0
        peak = self.meter.peak_bytes()
        epoch = step / self.plan.schedule.steps_per_epoch
        if self.main:
            record = {
                "step": step,
                "train/epoch": epoch,
                "train/loss": logs["loss"],
                "train/grad_norm": logs.get("grad_norm"),
                "train/learning_rate": logs["learning_rate"],
                "train/supervised_tokens": sum(self.rows.supervised_per_step[:step]),
                **numbers,
                "memory/peak_bytes": peak,
            }
            if "router_aux_loss" in logs:
                record["train/router_aux_loss"] = logs["router_aux_loss"]
            self._write(record)
        width = len(str(state.max_steps))
        # what a process on the CPU takes is not what is predicted, so it would only confuse
        memory = f"  {format_bytes(peak)}" if self.plan.device == "cuda" else ""
        self._free_since = time.perf_counter()
        self._print(
            f"  step {step:>{width}}/{state.max_steps}  loss ",
            (f"{logs['loss']:.4f}", "bold"),
            f"  lr {logs['learning_rate']:.2e}  {speed:>7,.0f} tokens/s{memory}  epoch {epoch:.2f}",
        )

    def on_evaluate(
        self, args: object, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: object
    ) -> None:
        """Writes an evaluation record."""
        scores = {"loss": metrics["eval_loss"], "token_accuracy": metrics["eval_token_accuracy"]}
        if not math.isfinite(scores["loss"]):
            said = (
                f"  step {state.global_step}: the validation loss is {scores['loss']}; this evaluation "
                "counts neither for the best checkpoint nor for early stopping"
            )
            self._print((said, "yellow"))
            scores["loss"] = None
        if self.main:
            record = {f"eval/{name}": value for name, value in scores.items()}
            self._write({"step": state.global_step, **record})
        if scores["loss"] is not None:
            self._print(
                f"  step {state.global_step}  validation loss ",
                (f"{scores['loss']:.4f}", "bold"),
                f"  token accuracy {scores['token_accuracy']:.1%}",
            )
        self._free_since = time.perf_counter()

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Stops counting: saving is not waiting for data."""
        self._free_since = time.perf_counter()

    def end_bar(self) -> None:
        """Removes the bar from the screen, which also restores the cursor."""
        if self._progress.live.is_started:
            self._progress.stop()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Removes the bar and prints the training time."""
        self.end_bar()
        self._print(
            f"  trained {counted(state.global_step - self.began_at, 'step')} in "
            f"{format_duration(self.training_seconds)}"
        )


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping for which an evaluation whose loss is NaN or infinite did not happen."""

    def on_evaluate(
        self, args: object, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Counts the evaluation, and requests the end of the run if the patience is used up."""
        if math.isfinite(metrics["eval_loss"]):
            super().on_evaluate(args, state, control, metrics, **kwargs)


class EvaluateAtEnd(TrainerCallback):
    """Evaluates and saves after the last step too, wherever the intervals fall.

    Otherwise the last step could not be the best one.
    """

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Requests both after the last step."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True


class RamWatch(TrainerCallback):
    """Looks at the RAM of this process when gradients and states are there, in a run that offloads to RAM."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Before gradients are freed."""
        self.peak_bytes = max(self.peak_bytes, own_ram_bytes())

    def on_save(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """After the whole weights were gathered."""
        self.peak_bytes = max(self.peak_bytes, own_ram_bytes())


class Heartbeat(TrainerCallback):
    """One rank's heartbeats while it trains; without one in time, it writes its stack traces.

    Then it `exits`, unless our launcher watches it.
    """

    def __init__(self, run: RunDir, rank: int, limit_s: float, *, exits: bool) -> None:
        self._pulse = Pulse(run, rank, limit_s, exits=exits)
        self._where, self._passes = SETUP, 0
        self._pulse.beat(self._where)

    def _now(self, where: str) -> None:
        self._where, self._passes = where, 0
        self._beat(where)

    def _on_forward(self, *inputs: object) -> None:
        self._passes += 1
        self._beat(f"{self._where}, in or after forward pass {self._passes}")

    def _beat(self, where: str) -> None:
        self._pulse.beat(where)
        self._pulse.restart_watchdog()

    @contextmanager
    def saving(self, limit_s: float) -> Iterator[None]:
        """In the block, a checkpoint is written, which may take so long."""
        where, before = self._where, self._pulse.limit_s
        self._pulse.limit_s = limit_s
        self._now("saving")
        yield  # after an error no heartbeat: one that has waited in vain would seem to have made progress
        self._pulse.limit_s = before
        self._now(where)

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Starts to enforce the limit."""
        self._hook = kwargs["model"].register_forward_pre_hook(self._on_forward)
        self._now("the first evaluation")

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Reports the step that begins."""
        self._now(f"step {state.global_step + 1}")

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Reports that a step has ended; evaluation and saving may follow."""
        self._now(f"evaluation, saving or data loading after step {state.global_step}")

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stops: nothing after training waits for other ranks."""
        self._hook.remove()
        self._pulse.stop()

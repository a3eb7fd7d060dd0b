"""What ends a run in the middle, and how it goes on: memory that runs out, Ctrl-C and signals.

The rank where memory runs out ends with exit code 4, and the launcher ends the others. Which micro-batch was
too large is remembered. The command that started the run goes on from the last checkpoint,
with a smaller plan.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_play.errors import DoesNotFitError, OutOfMemory, first_line
from sft_play.job import Job, plan_again, takes_less
from sft_play.machine.process import handling
from sft_play.model.weights.finished import release_memory
from sft_play.plan import Plan
from sft_play.reasons.choices import effective_batch
from sft_play.runlog import read_json
from sft_play.sizing.estimate.corrections import write_ran_out
from sft_play.train.checkpoints import by_step, going_on
from sft_play.train.probe import correction_path, memory_advice
from sft_play.train.ranks import any_rank
from sft_play.train.session import Session
from sft_play.ui.console import console
from sft_play.units import counted
from sft_play.upstream.accelerate import is_out_of_memory


@contextmanager
def memory_errors_explained(plan: Plan) -> Iterator[None]:
    """Turns an error of memory that ran out in the block into a DoesNotFitError, with what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(_explained(plan, error)) from error


def _explained(plan: Plan, error: BaseException) -> str:
    size = plan.batch.micro
    return f"memory ran out at micro-batch {size}: {first_line(error)}\n{memory_advice(plan)}"


@contextmanager
def remembered(session: Session) -> Iterator[None]:
    """If memory runs out in the block, remembers the plan and raises OutOfMemory: a smaller one can go on."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        plan = session.job.plan
        # on a CPU, the peak is not what is predicted
        used = session.reporter.meter.peak_bytes() if plan.device == "cuda" else 0
        write_ran_out(correction_path(session.job, plan), plan, used)
        done = counted(session.trainer.state.global_step, "step")
        raise OutOfMemory(
            f"after {done}, {_explained(plan, error)}. "
            f"Or {going_on(session.job.run, session.job.resume_command)}"
        ) from error


def smaller_job(job: Job) -> Job:
    """The job that goes on from the last checkpoint after memory ran out in the middle of training.

    Its effective batch is the same. Before a run, a plan that the config prescribes is the user's to change;
    in the middle of one, the work done counts for more, so `train.batch_size`, `train.grad_accum` and
    `eval.batch_size` are not binding.

    Raises:
        DoesNotFitError: there is no smaller plan.
    """
    release_memory()  # what the session that failed has left behind in this process
    ran_out = Plan.from_json(read_json(job.run.plan))
    free = {"batch_size": "auto", "grad_accum": "auto", "effective_batch_size": ran_out.batch.effective}
    plan = plan_again(_with(replace(job, plan=ran_out), "train", **free), takes_less(ran_out))
    reason = f"chosen because memory ran out at micro-batch {ran_out.batch.micro}"
    own = by_step(job.run) or job.config.train.resume == "never"
    resume = "auto" if own else job.config.train.resume
    job = _with(_with(job, "train", resume=resume), "eval", batch_size="auto")
    return replace(job, plan=replace(plan, why=(*plan.why, reason)))


def _with(job: Job, section: str, **settings: object) -> Job:
    """The job with other settings in a section of its config."""
    named = {f"{section}.{name}": value for name, value in settings.items()}
    typed = (f"{name}={value}" for name, value in named.items())
    config, overrides = job.config.changed(named), (*job.resolved.overrides, *typed)
    resolved = replace(job.resolved, config=config, overrides=overrides)
    return replace(job, resolved=resolved)


def continuation(job: Job) -> str:
    """From where, and how, the smaller job goes on."""
    resume = job.config.train.resume
    start = "from the beginning, without a checkpoint" if resume == "auto" else f"from {resume}"
    start = "from the last checkpoint" if by_step(job.run) else start
    recomputed = ", activations recomputed" if job.plan.activations.recomputes else ""
    return f"continuing {start} with a smaller plan: {effective_batch(job.plan)}{recomputed}"


AGAIN_SECONDS = 1.0


@contextmanager
def ended_at_once(*numbers: int) -> Iterator[None]:
    """Within it, these signals raise KeyboardInterrupt until that arrives at the end of the block.

    Python drops an exception that a signal raises while a destructor or a weak reference's callback runs, as
    garbage collection does in a probe: one Ctrl-C may have no effect.
    """
    arrived = threading.Event()
    received: list[int] = []

    def again() -> None:
        while not arrived.wait(AGAIN_SECONDS):
            os.kill(os.getpid(), received[0])

    repeating = threading.Thread(target=again, daemon=True)

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        if repeating.ident is None:
            repeating.start()
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    with handling(numbers, interrupt):
        try:
            yield
        finally:
            arrived.set()
            if repeating.ident is not None:
                repeating.join()
                raise KeyboardInterrupt(f"stopped by {signal.Signals(received[0]).name}")


class StopOnSignal(TrainerCallback):
    """After a signal on any rank: finishes the step, saves a checkpoint and stops.

    A second SIGINT stops at once, and so does the first one before the first step is done. SIGHUP comes from
    a closed terminal; under `nohup` it stays ignored.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.stopped = False
        self._asked = self._stepped = False
        self.handlers = ExitStack()
        """Whoever trains closes it, also after an error, when no callback runs."""

    def _on_signal(self, number: int, frame: object) -> None:
        at_once = self._asked or not self._stepped
        self._asked = True
        if at_once and number == signal.SIGINT:
            raise KeyboardInterrupt("stopped by SIGINT")

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Installs the signal handlers."""
        self.handlers.enter_context(handling(self.SIGNALS, self._on_signal))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stops all ranks at the same step if any of them got a signal."""
        self._stepped = True
        if any_rank(self._asked, args.device) and not self.stopped and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True
            console().print(f"  stopping after step {state.global_step}: saving a checkpoint")

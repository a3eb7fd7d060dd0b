"""The trackers that a run reports to: for each run one of theirs, with the same groups of curves in all.

A run that is resumed goes on in the run that it began at its tracker, whose id is kept in the run's folder. A
new run of the same name begins one of its own.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import MLflowCallback, TrackioCallback, WandbCallback, integration_utils

from sft_play.runlog import RunDir, console, read_json
from sft_play.train.board import Board

if TYPE_CHECKING:
    from sft_play.job import Job

# The library logs them once, at the end. Its samples are micro-batches, and its FLOPs are not counted here.
NOT_SHOWN = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
}
EVAL = "eval_"


def grouped(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The names under which a record of the trainer is shown: "train/loss", "eval/loss", "speed/mfu"."""
    evaluated = any(name.startswith(EVAL) for name in logs)
    found = {}
    for name, value in logs.items():
        if name in NOT_SHOWN or (evaluated and name == "epoch"):  # which the training record has, too
            continue
        if "/" in name:
            found[name] = value
        elif name.startswith(EVAL):
            found[f"eval/{name.removeprefix(EVAL)}"] = value
        else:
            found[f"train/{name}"] = value
    return found


def use_groups() -> None:
    """Gives the library's trackers our groups; its own are "eval", and "train" for all the rest."""
    integration_utils.rewrite_logs = grouped


def trackers(job: "Job") -> list[TrainerCallback]:
    """The callbacks of the trackers that a run reports to."""
    makers = {
        "tensorboard": lambda: Board(job),
        "wandb": lambda: Wandb(job.run),
        "mlflow": lambda: MLflow(job.run),
        "trackio": lambda: Trackio(job.run),
    }
    return [makers[name]() for name in job.config.train.report_to]


def kept_id(run: RunDir, tracker: str, state: TrainerState) -> str | None:
    """The id of the run at a tracker; None for a run that starts from its first step, or began without it."""
    return read_json(run.trackers).get(tracker) if state.global_step else None


def keep_id(run: RunDir, tracker: str, run_id: str) -> None:
    """Remembers the id for a resume."""
    run.write_json(run.trackers, {**read_json(run.trackers), tracker: run_id})


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within this context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class Wandb(WandbCallback):
    """The library's callback, for which a resumed run is the same run."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self._run = run

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Begins or continues the run, unless WANDB_RUN_ID says which one it is."""
        begins = state.is_world_process_zero and self._wandb.run is None
        if begins and "WANDB_RUN_ID" not in os.environ:
            run_id = kept_id(self._run, "wandb", state) or uuid.uuid4().hex
            project = os.environ.get("WANDB_PROJECT", "huggingface")  # as in the library
            self._wandb.init(project=project, name=args.run_name, id=run_id, resume="allow")
            keep_id(self._run, "wandb", run_id)
        super().setup(args, state, model, **kwargs)


class MLflow(MLflowCallback):
    """The library's callback, with our groups, for which a resumed run is the same run."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self._run = run

    def setup(self, args: Any, state: TrainerState, model: Any) -> None:
        """Begins or continues the run, unless MLFLOW_RUN_ID says which one it is."""
        known = kept_id(self._run, "mlflow", state)
        if not state.is_world_process_zero or "MLFLOW_RUN_ID" in os.environ:
            super().setup(args, state, model)
        elif known and self._continues(known):
            with _variable("MLFLOW_MAX_LOG_PARAMS", "0"):  # those of a run cannot change
                super().setup(args, state, model)
        else:
            super().setup(args, state, model)
            keep_id(self._run, "mlflow", self._ml_flow.active_run().info.run_id)

    def _continues(self, run_id: str) -> bool:
        """Goes on with a run; says so if it is not there any more."""
        try:
            self._ml_flow.start_run(run_id=run_id)
        except Exception as error:  # noqa: BLE001 - each store has its own
            reason = escape(str(error).splitlines()[0])
            console().print(f"  [yellow]MLflow cannot continue the run, and begins one: {reason}[/]")
            return False
        self._auto_end_run = True
        return True

    def on_log(  # type: ignore[override]
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Logs a record."""
        super().on_log(args, state, control, grouped(logs), model, **kwargs)


class Trackio(TrackioCallback):
    """The library's callback, for which a resumed run is the same run, and a new one of its name another.

    trackio knows runs by their names.
    """

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self._run = run

    def setup(self, args: Any, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Begins or continues the run."""
        if not state.is_world_process_zero:
            return super().setup(args, state, model, **kwargs)
        given = args.run_name
        args.run_name = kept_id(self._run, "trackio", state) or f"{given}-{uuid.uuid4().hex[:8]}"
        keep_id(self._run, "trackio", args.run_name)
        try:
            return super().setup(args, state, model, **kwargs)
        finally:
            args.run_name = given

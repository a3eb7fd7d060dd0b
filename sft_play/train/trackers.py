"""The trackers that a run reports to: for each run one of theirs, with the same groups of curves in all.

A run that is resumed goes on in the run that it began at its tracker, whose id is kept in the run's folder. A
new run of the same name begins one of its own. TensorBoard also shows plan, settings, lengths and answers.
"""

import html
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from textwrap import indent
from typing import Any

from accelerate.utils import patch_environment
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from sft_play.config.schema import RunConfig
from sft_play.data.store import column_of
from sft_play.errors import first_line
from sft_play.job import Job
from sft_play.plan import Plan
from sft_play.report.card import public_name
from sft_play.report.tables import METRICS, mark, said_of
from sft_play.runlog import RunDir, read_json
from sft_play.ui.console import warn
from sft_play.units import format_bytes
from sft_play.upstream.patching import patched
from sft_play.upstream.transformers import grouping

# The library logs them once, at the end. Its samples are micro-batches, and its FLOPs are not counted here.
NOT_SHOWN = {
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
}
EVAL = "eval_"
_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+\-.!]")  # what Markdown takes after a backslash as it is
# What runs are compared by.
TRAIN_COMPARED = ("lr_schedule", "optimizer", "weight_decay", "seed")
PLAN_COMPARED = (
    "learning_rate",
    "effective_batch_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "packing",
    "mixed_precision",
    "max_seq_len",
)


def grouped(logs: Mapping[str, float]) -> dict[str, float]:
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


def trackers(job: Job) -> list[TrainerCallback]:
    """The callbacks of the trackers that a run reports to, with our groups."""
    kinds: dict[str, Any] = {"tensorboard": Board, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
    return [kinds[name](job) for name in job.config.train.report_to]


def kept_id(run: RunDir, tracker: str, state: TrainerState) -> str | None:
    """The id of the run at a tracker; None for a run that starts from its first step, or began without it."""
    return read_json(run.trackers).get(tracker) if state.global_step else None


def keep_id(run: RunDir, tracker: str, run_id: str) -> None:
    """Remembers the id for a resume."""
    run.write_json(run.trackers, {**read_json(run.trackers), tracker: run_id})


class _OfRun:
    """What a tracker's callback knows beside what the library tells it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job, self._run = job, job.run

    def on_log(self, *args: object, **kwargs: object) -> None:
        """Logs a record."""
        with grouping(grouped):
            super().on_log(*args, **kwargs)  # type: ignore[misc]


class Wandb(_OfRun, WandbCallback):
    """The library's callback, for which a resumed run is the same run."""

    def setup(self, args: TrainingArguments, state: TrainerState, model: object, **kwargs: object) -> None:
        """Begins or continues the run, unless WANDB_RUN_ID says which one it is."""
        begins = state.is_world_process_zero and self._wandb.run is None
        if begins and "WANDB_RUN_ID" not in os.environ:
            run_id = kept_id(self._run, "wandb", state) or uuid.uuid4().hex
            project = os.environ.get("WANDB_PROJECT", "huggingface")  # as in the library
            self._wandb.init(project=project, name=args.run_name, id=run_id, resume="allow")
            keep_id(self._run, "wandb", run_id)
        super().setup(args, state, model, **kwargs)


class MLflow(_OfRun, MLflowCallback):
    """The library's callback, with our groups, for which a resumed run is the same run."""

    def setup(self, args: TrainingArguments, state: TrainerState, model: object) -> None:
        """Begins or continues the run, unless MLFLOW_RUN_ID says which one it is."""
        known = kept_id(self._run, "mlflow", state)
        if not state.is_world_process_zero or "MLFLOW_RUN_ID" in os.environ:
            super().setup(args, state, model)
        elif known and self._continues(known):
            with patch_environment(MLFLOW_MAX_LOG_PARAMS="0"):  # those of a run cannot change
                super().setup(args, state, model)
        else:
            super().setup(args, state, model)
            keep_id(self._run, "mlflow", self._ml_flow.active_run().info.run_id)

    def _continues(self, run_id: str) -> bool:
        """Goes on with a run; says so if it is not there any more."""
        try:
            self._ml_flow.start_run(run_id=run_id)
        except Exception as error:  # each store has its own
            warn(f"MLflow cannot continue the run, and begins one: {first_line(error)}")
            return False
        self._auto_end_run = True
        return True

    def on_log(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: object,
    ) -> None:
        """Logs a record."""
        super().on_log(args, state, control, grouped(logs), **kwargs)


class Trackio(_OfRun, TrackioCallback):
    """The library's callback, for which a resumed run is the same run, and a new one of its name another.

    trackio knows runs by their names.
    """

    def setup(self, args: TrainingArguments, state: TrainerState, model: object, **kwargs: object) -> None:
        """Begins or continues the run."""
        if not state.is_world_process_zero:
            return super().setup(args, state, model, **kwargs)
        name = kept_id(self._run, "trackio", state) or f"{args.run_name}-{uuid.uuid4().hex[:8]}"
        keep_id(self._run, "trackio", name)
        with patched(args, "run_name", name):
            return super().setup(args, state, model, **kwargs)


class Board(_OfRun, TensorBoardCallback):
    """The library's callback, in one folder for the whole run.

    After a resume, steps that were logged after the checkpoint, and are trained again, are shown once.
    """

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Opens the file, and describes the run in it."""
        if not state.is_world_process_zero:
            return
        step, self.logging_dir = state.global_step, str(self._run.tensorboard)
        self.tb_writer = self._SummaryWriter(self.logging_dir, purge_step=step + 1 if step else 0)
        _describe(self.tb_writer, self._job, step)


def _describe(writer: Any, job: Job, step: int) -> None:
    from torch.utils.tensorboard.summary import hparams

    metrics = {"train/loss": 0.0} | ({"eval/loss": 0.0} if job.data.val is not None else {})
    for summary in hparams(settings(job.config, job.plan), metrics):
        writer.file_writer.add_summary(summary)
    writer.add_text("plan", plan_text(job.plan), step)
    if job.run.config.exists():
        # Markdown leaves indented text as it is; a fence may be in it
        writer.add_text("config", indent(job.run.config.read_text(encoding="utf-8"), "    "), step)
    if not step:
        writer.add_histogram("train/row_tokens", column_of(job.data.train, "length"), step)


def settings(config: RunConfig, plan: Plan) -> dict[str, bool | int | float | str]:
    """What runs are compared by, as plain values."""
    chosen = plan.flat()
    lora = ("r", "alpha", "dropout") if config.tuning.mode != "full" else ()
    train = {name: getattr(config.train, name) for name in TRAIN_COMPARED}
    adapter = {f"lora_{name}": getattr(config.tuning.lora, name) for name in lora}
    return {
        "model": public_name(config.model.name),
        "mode": config.tuning.mode,
        "gradient_checkpointing": plan.activations.recomputes,
        "steps": plan.schedule.total_steps,
        **train,
        **{name: chosen[name] for name in PLAN_COMPARED},
        **adapter,
    }


def plan_text(plan: Plan) -> str:
    """The reasons of a plan and its memory, as Markdown."""
    lines = [f"- {reason}" for reason in plan.why]
    memory = plan.memory
    if memory is None:
        return "\n".join(lines)
    lines += [
        "",
        f"| {said_of(memory.origin)}, of {format_bytes(memory.budget_bytes)} | per process |",
        "|---|---|",
    ]
    lines += [f"| phase: {name} | {format_bytes(size)} |" for name, size in memory.phases.items()]
    lines += [f"| at the peak: {name} | {format_bytes(size)} |" for name, size in memory.terms.items()]
    return "\n".join(lines)


def show_answers(
    run: RunDir, step: int, samples: Iterable[Mapping[str, Any]], scores: Mapping[str, Mapping[str, Any]]
) -> None:
    """Adds sample answers, and the scores of answers before and after training, to TensorBoard's files.

    A sample is one of `before_after`; the scores are by "before" and
    "after", and by name.
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run.tensorboard)) as writer:
        for number, sample in enumerate(samples, start=1):
            said = {name: text for name, text in sample.items() if isinstance(text, str)}
            texts = {f"{name}{mark(name, sample)}": text for name, text in said.items()}
            parts = [f"**{name}**\n\n{_literal(text)}" for name, text in texts.items()]
            writer.add_text(f"answers/{number}", "\n\n".join(parts), step)
        for when, at in (("before", 0), ("after", step)):
            own = scores[when].get("own_metrics", {})
            for name, value in {**scores[when], **own}.items():
                if (name in METRICS or name in own) and value is not None:
                    writer.add_scalar(f"score/{name}", value, at)


def _literal(text: str) -> str:
    """Text that Markdown shows as it is and wraps, other than what is indented."""
    lines = (_SPECIAL.sub(r"\\\g<0>", line) for line in text.splitlines())
    escaped = (
        html.escape(line, quote=False).replace("  ", "&nbsp; ").replace("=", "&#61;") for line in lines
    )
    return "  \n".join(re.sub(r"^\s", "&nbsp;", line) or "&nbsp;" for line in escaped)

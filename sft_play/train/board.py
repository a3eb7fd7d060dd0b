"""What TensorBoard shows of a run beside its curves: plan, settings, lengths and answers."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from sft_play.config.schema import RunConfig
from sft_play.data.store import column_of
from sft_play.plan import Plan
from sft_play.report.card import public_name
from sft_play.report.tables import METRICS
from sft_play.runlog import RunDir
from sft_play.units import format_bytes

if TYPE_CHECKING:
    from sft_play.job import Job


class Board(TensorBoardCallback):
    """The library's callback, in one folder for the whole run.

    After a resume, steps that were logged after the checkpoint, and are trained again, are shown once.
    """

    def __init__(self, job: "Job") -> None:
        super().__init__()
        self.logging_dir = str(job.run.tensorboard)
        self._job = job

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Opens the file, and describes the run in it."""
        if not state.is_world_process_zero:
            return
        step = state.global_step
        self.tb_writer = self._SummaryWriter(self.logging_dir, purge_step=step + 1 if step else 0)
        _describe(self.tb_writer, self._job, step)


def _describe(writer: Any, job: "Job", step: int) -> None:
    from torch.utils.tensorboard.summary import hparams

    metrics = {"train/loss": 0.0} | ({"eval/loss": 0.0} if job.data.val is not None else {})
    for summary in hparams(settings(job.config, job.plan), metrics):
        writer.file_writer.add_summary(summary)
    writer.add_text("plan", plan_text(job.plan), step)
    if job.run.config.exists():
        writer.add_text("config", _fenced(job.run.config.read_text(encoding="utf-8")), step)
    if not step:
        writer.add_histogram("data/row_tokens", column_of(job.data.train, "length"), step)


def settings(config: RunConfig, plan: Plan) -> dict[str, bool | int | float | str]:
    """What runs are compared by, as plain values."""
    found: dict[str, bool | int | float | str] = {
        "model": public_name(config.model.name),
        "mode": config.tuning.mode,
        "learning_rate": plan.learning_rate,
        "lr_schedule": config.train.lr_schedule,
        "optimizer": config.train.optimizer,
        "weight_decay": config.train.weight_decay,
        "effective_batch_size": plan.effective_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "world_size": plan.world_size,
        "packing": plan.packing,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "mixed_precision": plan.mixed_precision,
        "max_seq_len": plan.max_seq_len,
        "steps": plan.total_steps,
        "seed": config.train.seed,
    }
    lora = config.tuning.lora
    adapter: dict[str, bool | int | float | str] = {
        "lora_r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
    }
    return found | (adapter if config.tuning.mode != "full" else {})


def plan_text(plan: Plan) -> str:
    """The reasons of a plan and its predicted memory, as Markdown."""
    lines = [f"- {reason}" for reason in plan.why]
    memory = plan.memory
    if memory is None:
        return "\n".join(lines)
    lines += ["", f"| predicted, of {format_bytes(memory.budget_bytes)} | per process |", "|---|---|"]
    lines += [f"| phase: {name} | {format_bytes(size)} |" for name, size in memory.phases.items()]
    lines += [f"| at the peak: {name} | {format_bytes(size)} |" for name, size in memory.terms.items()]
    return "\n".join(lines)


def show_answers(
    run: RunDir, step: int, samples: Iterable[Mapping[str, str]], scores: Mapping[str, Mapping[str, Any]]
) -> None:
    """Adds sample answers, and the scores of answers before and after training, to TensorBoard's files.

    Args:
        run: with files of TensorBoard.
        step: the last one.
        samples: prompt, reference, and answers before and after.
        scores: "before" and "after" -> name -> value.
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run.tensorboard)) as writer:
        for number, sample in enumerate(samples, start=1):
            parts = [f"**{name}**\n\n{_fenced(text)}" for name, text in sample.items()]
            writer.add_text(f"answers/{number}", "\n\n".join(parts), step)
        for when, at in (("before", 0), ("after", step)):
            for name, value in scores[when].items():
                if name in METRICS and value is not None:
                    writer.add_scalar(f"eval/{name}", value, at)


def _fenced(text: str) -> str:
    """Text that Markdown leaves as it is: indented, since a fence may be in it."""
    return "\n".join(f"    {line}" for line in text.splitlines())

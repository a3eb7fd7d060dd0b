"""THE main path: `train(job)` reads like what it does.

data -> model -> trainer -> verify -> begin -> steps -> save -> summary
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainerState
from trl import SFTTrainer

from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError, Interrupted
from sft_play.job import Job, begin_run
from sft_play.model import build_model
from sft_play.runlog import RunDir, console, is_main_rank, read_metrics, update_summary
from sft_play.scoring import TokenScore, score_batch
from sft_play.sizing.planner import Plan
from sft_play.train.arguments import eval_batch_rows, sft_config
from sft_play.train.callbacks import EvaluateAtEnd, NonFiniteGuard, Reporter, StopOnSignal
from sft_play.train.checkpoints import find_checkpoint, is_split_as, require_movable, step_of
from sft_play.train.convert import load_moved
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.meter import MemoryMeter
from sft_play.train.rows import TrainingRows, evaluation_rows, packed_collator, padded_collator, training_rows
from sft_play.train.verify import verify
from sft_play.units import format_bytes


def train(job: Job) -> dict[str, Any]:
    """Trains on this process's device, together with the other ranks if there are any; returns the summary.

    Raises:
        Interrupted: a signal stopped it after a checkpoint was saved.
        NonFiniteError: loss or gradients became NaN.
        DoesNotFitError: memory ran out.
        LaunchError: the ranks do not agree.
    """
    config, plan = job.config, job.plan
    checkpoint = checkpoint_to_resume(job)
    rows = training_rows(
        job.data.train,
        plan,
        seed=config.train.seed,
        group_by_length=config.train.group_by_length,
        pad_id=job.tokenizer.pad_token_id,
    )
    reporter = Reporter(plan, rows, job.run, MemoryMeter.start(plan.device))
    with memory_errors_explained(plan, reporter.meter):
        trainer = make_trainer(job, build_model(config, plan), rows, reporter)
        verify(trainer, plan)
        if is_main_rank():
            begin_run(job)
        stopped = run_steps(trainer, job, reporter, checkpoint)
    save(trainer, job, stopped)
    return summarise(trainer, job, rows, reporter, stopped)


class TokenWeightedTrainer(SFTTrainer):
    """SFTTrainer whose evaluation loss is the mean over supervised tokens.

    The library averages batch means, so its loss changes with the batch size and with how rows are dealt to processes.
    """

    def __init__(self, *args: Any, eval_collator: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._train_collator, self._eval_collator = self.data_collator, eval_collator

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and token accuracy over the validation rows of all ranks."""
        self.data_collator = self._eval_collator
        loader = self.get_eval_dataloader(eval_dataset)
        self.data_collator = self._train_collator
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        for batch in loader:
            with self.compute_loss_context_manager():
                sums += score_batch(model, self._prepare_inputs(batch))
        model.train(was_training)
        score = TokenScore.of(self.accelerator.reduce(sums, reduction="sum"))
        metrics = {f"{metric_key_prefix}_loss": score.loss, f"{metric_key_prefix}_token_accuracy": score.accuracy}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Wraps model and optimizer, and loads a checkpoint also if it is split in another way than this run's will be."""
        engine = "deepspeed_z2" if self.is_deepspeed_enabled else "ddp"
        if not resume_from_checkpoint or is_split_as(Path(resume_from_checkpoint), engine, self.args.world_size):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        load_moved(self, Path(resume_from_checkpoint))
        return prepared

    def _load_best_model(self) -> None:
        """The best weights alone, as every engine saves them: they may be from before the run was moved to this one."""
        sharded, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        super()._load_best_model()
        self.is_deepspeed_enabled = sharded


def make_trainer(job: Job, model: torch.nn.Module, rows: TrainingRows, reporter: Reporter) -> TokenWeightedTrainer:
    """TRL's trainer over our rows, with our callbacks."""
    config, plan, pad_id = job.config, job.plan, job.tokenizer.pad_token_id
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(job.run.tensorboard)  # transformers has no argument for it any more
    padded = padded_collator(pad_id)
    trainer = TokenWeightedTrainer(
        model=model,
        args=sft_config(
            config,
            plan,
            job.run,
            validation_rows=len(job.data.val or []),
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        ),
        train_dataset=rows.dataset,
        eval_dataset=_validation_rows(job.data.val, config, plan, pad_id),
        data_collator=packed_collator(plan.attention.startswith("flash")) if plan.packing else padded,
        eval_collator=padded,
        processing_class=job.tokenizer,
        callbacks=_callbacks(job, reporter),
    )
    trainer.remove_callback(PrinterCallback)
    for parameter in model.parameters():
        if parameter.requires_grad and config.tuning.mode == "qlora":
            parameter.data = parameter.data.float()  # TRL has cast them to bf16, which an fp16 gradient scaler cannot unscale
    if trainer.accelerator.ddp_handler is not None:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # saves one copy of the gradients
    return trainer


def _validation_rows(val: Dataset | None, config: RunConfig, plan: Plan, pad_id: int) -> Dataset | None:
    return None if val is None else evaluation_rows(val, eval_batch_rows(config, plan) * plan.world_size, pad_id)


def _callbacks(job: Job, reporter: Reporter) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = [reporter, NonFiniteGuard()]
    if job.plan.world_size > 1:
        callbacks.append(Heartbeat(job.run, int(os.environ["RANK"]), job.config.parallel.timeout_s))
    if job.data.val is not None:
        callbacks.append(EvaluateAtEnd())
    patience = job.config.train.early_stopping_patience
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    return callbacks


def checkpoint_to_resume(job: Job) -> Path | None:
    """The checkpoint that train.resume means, looked for before anything large is loaded."""
    checkpoint, passed_over = find_checkpoint(job.run, job.config.train.resume)
    for line in passed_over:
        console().print(f"  [yellow]{line}[/]")
    if checkpoint:
        moved = require_movable(checkpoint, job.config, job.plan)
        console().print(f"  going on from {checkpoint}{', converted for these processes while it is read' if moved else ''}")
    return checkpoint


@contextlib.contextmanager
def memory_errors_explained(plan: Plan, meter: MemoryMeter) -> Iterator[None]:
    """Turns CUDA's out-of-memory error into ours, with what to change.

    Raises:
        DoesNotFitError: memory ran out in the block.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = "train.batch_size=1" if plan.rows_per_micro_batch > 1 else "tuning.mode=qlora or model.max_seq_len=<shorter>"
        used = format_bytes(meter.peak_bytes())
        raise DoesNotFitError(
            f"memory ran out at micro-batch {plan.micro_batch_size} ({used} in use): {str(error).splitlines()[0]}\n"
            f"Try train.gradient_checkpointing=true or {smaller}"
        ) from error


def run_steps(trainer: SFTTrainer, job: Job, reporter: Reporter, checkpoint: Path | None) -> bool:
    """Trains from the start or from a checkpoint; returns whether a signal stopped it."""
    if checkpoint:
        trainer.args.eval_on_start = False  # it was done then; once more would count against early stopping's patience
    stop = StopOnSignal(job.plan.world_size, trainer.args.device)
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        reporter.end_bar()
    return stop.stopped


def result_folder(job: Job) -> Path:
    """Where the trained weights go."""
    return job.run.model if job.config.tuning.mode == "full" else job.run.adapter


def save(trainer: SFTTrainer, job: Job, stopped: bool) -> None:
    """Writes the trained weights and the tokenizer; only the main rank does. A stopped run has its checkpoint instead."""
    if stopped or not trainer.accelerator.is_main_process:
        return
    target = result_folder(job)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    model.save_pretrained(str(target), safe_serialization=True)
    job.tokenizer.save_pretrained(str(target))


def best_step(state: TrainerState) -> int:
    """The step whose weights were kept: the best checkpoint's, or the last."""
    kept = step_of(Path(state.best_model_checkpoint)) if state.best_model_checkpoint else None
    return kept if kept is not None else state.global_step


def evaluations_by_step(run: RunDir) -> dict[int, dict[str, float]]:
    """Step -> {"loss", "token_accuracy"} of the validation rows, from metrics.jsonl."""
    return {
        record["step"]: {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/")}
        for record in read_metrics(run)
        if "eval/loss" in record
    }


def summarise(trainer: SFTTrainer, job: Job, rows: TrainingRows, reporter: Reporter, stopped: bool) -> dict[str, Any]:
    """Writes summary.json on the main rank.

    Raises:
        Interrupted: after writing, when a signal stopped the run.
    """
    plan, state = job.plan, trainer.state
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    evaluations = evaluations_by_step(job.run)  # also those from before an interruption
    peak = torch.tensor(reporter.meter.peak_bytes(), device=trainer.args.device)
    summary = {
        "status": "interrupted" if stopped else "done",
        "device": plan.device,
        "world_size": plan.world_size,
        "packing": plan.packing,
        "effective_batch_size": plan.effective_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "optimizer_steps": state.global_step,
        "supervised_tokens": sum(rows.supervised_per_step[: state.global_step]),
        "tokens_per_second": reporter.tokens_per_second,
        "training_seconds": reporter.training_seconds,
        "predicted_peak_bytes": plan.memory.peak_bytes if plan.memory else None,
        "measured_peak_bytes": int(trainer.accelerator.gather(peak[None]).max()),
        "train_loss": losses[-1] if losses else None,
        "eval": {"before": evaluations.get(0), "after": evaluations.get(best_step(state))},
        "best_checkpoint": state.best_model_checkpoint,
    }
    if is_main_rank():
        summary = update_summary(job.run, **summary)
    if stopped:
        raise Interrupted(
            f"stopped at step {state.global_step} with a checkpoint in {job.run.checkpoints}; `make resume` goes on"
        )
    return summary

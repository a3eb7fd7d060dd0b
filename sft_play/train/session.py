"""A run that is ready to start: model, rows and TRL's trainer with our callbacks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from trl import SFTTrainer

from sft_play.config.schema import RunConfig
from sft_play.job import Job
from sft_play.model import build_model
from sft_play.scoring import TokenScore, score_batch
from sft_play.sizing.planner import Plan
from sft_play.train.arguments import eval_batch_rows, sft_config
from sft_play.train.callbacks import EvaluateAtEnd, NonFiniteGuard, Reporter, TagOnEachMachine
from sft_play.train.checkpoints import is_split_as
from sft_play.train.convert import load_moved
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.meter import MemoryMeter
from sft_play.train.rows import TrainingRows, evaluation_rows, packed_collator, padded_collator, training_rows


def _no_one_measures(phase: str) -> None:
    """Between probes phases are of no interest."""


class TokenWeightedTrainer(SFTTrainer):
    """SFTTrainer whose evaluation loss is the mean over supervised tokens.

    The library averages batch means, so its loss changes with the batch size and with how rows are dealt to processes.
    """

    def __init__(self, *args: Any, eval_collator: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._train_collator, self._eval_collator = self.data_collator, eval_collator
        self.begin_phase: Callable[[str], None] = _no_one_measures

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; tells a probe where the forward pass begins and where it ends."""
        self.begin_phase("forward")
        loss = super().compute_loss(*args, **kwargs)
        self.begin_phase("backward")
        return loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and token accuracy over the validation rows of all ranks."""
        self.begin_phase("evaluation")
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
        whole = not self.args.save_on_each_node
        if not resume_from_checkpoint or is_split_as(Path(resume_from_checkpoint), engine, self.args.world_size, whole=whole):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        load_moved(self, Path(resume_from_checkpoint))
        return prepared

    def _load_best_model(self) -> None:
        """The best weights alone, as every engine saves them: they may be from before the run was moved to this one."""
        sharded, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        super()._load_best_model()
        self.is_deepspeed_enabled = sharded


@dataclass(frozen=True)
class Session:
    """A job with everything that its steps need, on this process's device."""

    job: Job
    rows: TrainingRows
    reporter: Reporter
    trainer: TokenWeightedTrainer


def open_session(job: Job) -> Session:
    """Loads the model and makes the trainer; the rows lie in the order in which the whole run learns them."""
    config, plan = job.config, job.plan
    rows = training_rows(
        job.data.train,
        plan,
        seed=config.train.seed,
        group_by_length=config.train.group_by_length,
        pad_id=job.tokenizer.pad_token_id,
    )
    reporter = Reporter(plan, rows, job.run, MemoryMeter.start(plan.device))
    return Session(job, rows, reporter, make_trainer(job, build_model(config, plan), rows, reporter))


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
    if not job.run.shared:
        callbacks.append(TagOnEachMachine())
    patience = job.config.train.early_stopping_patience
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    return callbacks

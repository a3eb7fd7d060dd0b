"""A run that is ready to start: model, rows and TRL's trainer with our callbacks."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from transformers import PrinterCallback, TrainerCallback

from sft_play.job import Job
from sft_play.model.architecture import flop_sizes, flops_per_token
from sft_play.model.attention_table import ATTENTIONS
from sft_play.model.collators import Collator, joined_micro_batches, padded_micro_batches
from sft_play.model.cpu import keep_freed_memory
from sft_play.model.loss_head import TokenScore, add_loss_head, score_batch, token_loss
from sft_play.plan import Plan
from sft_play.planning.devices import device_speed
from sft_play.runlog import console
from sft_play.train.adapter_trainer import AdapterTrainer, averaged
from sft_play.train.arguments import sft_config
from sft_play.train.callbacks import EarlyStopping, EvaluateAtEnd, Reporter
from sft_play.train.checkpoints import is_split_as
from sft_play.train.convert import load_moved, use_own_rate
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.memory_meter import MemoryMeter, release_unreferenced
from sft_play.train.nonfinite import (
    SHOWN_TOKENS,
    SkippedSteps,
    check_optimizer,
    check_weights,
    ended,
    poisoned_if_not_finite,
    rows_not_finite,
)
from sft_play.train.ranks import from_all
from sft_play.train.rows import MicroBatches, TrainingRows, training_rows, validation_rows
from sft_play.train.saving import CheckpointWriter
from sft_play.train.trackers import trackers, use_groups

if TYPE_CHECKING:
    from sft_play.train.space import SpaceForSaves

HALVINGS = 16  # of fp16's gradient scale, from 2**16 to 1


def _no_phase(phase: str) -> None:
    """Ignores phases, which matter only in a probe."""


class PlannedTrainer(AdapterTrainer):
    """TRL's trainer with eleven methods overridden, each where the library has no callback.

    - `training_step` sets training mode once instead of in every micro-batch.
    - `create_model_card` writes none into the checkpoints.
    - `compute_loss` tells a probe where the forward pass begins and ends.
    - `floating_point_ops` counts nothing, since our own count is known before the run.
    - `_get_grad_norm` skips the update of a step whose gradients are not finite; `log` leaves it out of the
      mean loss, and adds the speed.
    - `evaluate` averages the loss over supervised tokens. The library averages the means of batches, so its
      loss depends on the batch size and on how rows are dealt to processes.
    - `_save_checkpoint` publishes a checkpoint once it is complete (saving.py), from the staging folder that
      `_get_output_dir` returns.
    - `_prepare_for_training` converts a checkpoint of another engine or world size while loading it.
    - `_load_best_model` loads only weights, which every engine saves in the same way, if they are undamaged.
    """

    def __init__(
        self,
        *args: Any,
        rows: MicroBatches,
        eval_collator: Any,
        checkpoint_parts: int,
        writer: CheckpointWriter,
        skipped: SkippedSteps,
        numbers: Callable[[int], dict[str, float | None]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._rows, self.skipped, self._numbers = rows, skipped, numbers
        self.space: SpaceForSaves | None = None  # while the steps of the run are computed
        self._step_loss: torch.Tensor | float = 0.0
        add_loss_head(self.model)
        self._train_collator, self._eval_collator = self.data_collator, eval_collator
        self._checkpoint_parts, self._writer = checkpoint_parts, writer
        self.begin_phase: Callable[[str], None] = _no_phase

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; returns its share of its step's loss, a scalar.

        The library's own method walks through all modules of the model to set their training mode.
        """
        unwrapped: Any = self.model
        if not unwrapped.training:
            model.train()
        # compute_loss has already divided the loss by the number of micro-batches
        engine = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        with self.compute_loss_context_manager():
            loss = self.compute_loss(
                model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
            )
        self.accelerator.backward(loss, **engine)
        # added to the mean loss of the log, which a NaN would never leave again
        share = loss.detach().nan_to_num(0.0, 0.0, 0.0)
        self._step_loss = self._step_loss + share
        return share

    def compute_loss(
        self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Any:
        """A micro-batch's share of its step's loss; tells a probe where the forward pass begins and ends.

        The library's own method also logs metrics that nobody reads here, for which it waits for the device
        three times per micro-batch.

        Args:
            model: as the engine wrapped it.
            inputs: of a collator (model/collators.py).
            num_items_in_batch: supervised tokens of the step, over all ranks.
        """
        self.begin_phase("forward")
        # DDP and ZeRO-2 average gradients over the ranks, and the loss is divided by the tokens of all.
        ranks = self.accelerator.num_processes
        shares = self.current_gradient_accumulation_steps * ranks
        balance = self.router_aux_loss_coef / shares if self.aux_loss_enabled else 0.0
        loss = ranks * token_loss(model, inputs, num_items_in_batch, router_weight=balance)
        self.begin_phase("backward")
        return poisoned_if_not_finite(loss)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm of the gradients, which clipping has computed; if it is not finite, the step is skipped.

        Gradients are summed over the ranks before, so all ranks skip the same steps. DeepSpeed skips such a
        step itself, in bf16 if its config has bf16.check_grad_overflow. In fp16, gradients may be infinite
        because they are scaled too much; the scaler skips such a step and halves its scale.

        Raises:
            NonFiniteError: too many steps in a row were skipped, or DeepSpeed has updated the weights.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        finite = norm is None or math.isfinite(norm)
        self.skipped.count(finite=finite)
        if not finite:
            self._tr_loss -= self._step_loss
            if not self.args.fp16 or self.skipped.in_a_row > HALVINGS:
                self._skip_step(model)
        self._step_loss = 0.0
        return norm

    def _skip_step(self, model: Any) -> None:
        step = self.state.global_step + 1
        rows = [row for own in from_all(self._rows_not_finite()) for row in own]
        message = self.skipped.message(step, rows)
        updated = self.is_deepspeed_enabled and not model.optimizer.overflow
        if updated or self.skipped.in_a_row >= self.skipped.limit:
            raise ended(message)
        if self.accelerator.is_main_process:
            console().print(f"  [yellow]{escape(message)}[/]")
        model.zero_grad()  # AdamW leaves weights without gradients as they are

    def _rows_not_finite(self) -> list[str]:
        """This rank's rows of the step whose loss is not finite by themselves."""
        ranks, accumulation = self.accelerator.num_processes, self.args.gradient_accumulation_steps
        first = self.state.global_step * accumulation * ranks + self.accelerator.process_index
        places = range(first, first + accumulation * ranks, ranks)
        micro_batches: Any = self.train_dataset
        rows = [row for place in places for row in micro_batches[place]["rows"]]
        tokenizer: Any = self.processing_class

        def describe(row: int) -> str:
            tokens = self._rows.rows[row]["input_ids"][:SHOWN_TOKENS]
            return f"row {row} ({tokenizer.decode(tokens)!r} ...)"

        def batch_of(row: int) -> Any:
            return self._prepare_inputs(self._train_collator([{"rows": [row]}]))

        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with self.accelerator.autocast():
            return rows_not_finite(model, rows, batch_of, describe)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Logs a record, with the speed for TensorBoard; its loss is the mean of the steps not skipped."""
        record = self.skipped.corrected(logs)
        if "loss" in record:
            numbers = self._numbers(self.state.global_step)
            record = record | {name: value for name, value in numbers.items() if value is not None}
        super().log(record, start_time)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Writes none: TRL's has nothing but placeholders, and ours (report/card.py) comes at the end."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: the library walks through all modules for it, in every micro-batch."""
        return 0

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and token accuracy over the validation rows of all ranks."""
        self.begin_phase("evaluation")
        self.data_collator = self._eval_collator
        loader = self.get_eval_dataloader(eval_dataset)
        self.data_collator = self._train_collator
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        # the loader draws a number, which would change later dropout
        with torch.random.fork_rng(devices=[]), averaged(self.optimizer):
            for batch in loader:
                with self.compute_loss_context_manager():
                    sums += score_batch(model, self._prepare_inputs(batch))
        model.train(was_training)
        total = TokenScore.of(self.accelerator.reduce(sums, reduction="sum"))
        metrics = {
            f"{metric_key_prefix}_loss": total.loss,
            f"{metric_key_prefix}_token_accuracy": total.accuracy,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        """The staging folder, for the library; our own code knows where checkpoints are published."""
        return str(self._writer.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint, which appears in its place once it is complete.

        Raises:
            NonFiniteError: a trained weight or the optimizer's state is NaN or infinite; nothing is written.
        """
        unwrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        check_weights(unwrapped)
        check_optimizer(self.optimizer, unwrapped)
        with self.space.while_saving() if self.space else nullcontext(), self._writer.staged(self.state):
            super()._save_checkpoint(model, trial)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Wraps model and optimizer and loads the checkpoint, converting it if it is split differently."""
        engine = "deepspeed_z2" if self.is_deepspeed_enabled else "ddp"
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        if checkpoint is None or is_split_as(checkpoint, engine, self._checkpoint_parts):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        else:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            load_moved(self, checkpoint)
        if checkpoint is not None:
            use_own_rate(self)
        return prepared

    def _load_best_model(self) -> None:
        """Loads only the best weights: they may have been saved before the run moved to this engine."""
        if not self._writer.best_is_whole(self.state):
            return
        sharded, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        try:
            super()._load_best_model()
        finally:
            self.is_deepspeed_enabled = sharded


@dataclass(frozen=True)
class Session:
    """A job with everything that its steps need, on this process's device."""

    job: Job
    rows: TrainingRows
    reporter: Reporter
    trainer: PlannedTrainer


def ordered_rows(job: Job) -> TrainingRows:
    """The micro-batches of the whole run in training order."""
    return training_rows(
        job.data.train,
        job.plan,
        seed=job.config.train.seed,
        hidden_size=job.architecture.get_text_config().hidden_size,
        pad_id=job.tokenizer.pad_token_id,
        shares=job.data.shares,
    )


def open_session(job: Job, model: torch.nn.Module, rows: TrainingRows, meter: MemoryMeter) -> Session:
    """TRL's trainer over our rows, with our callbacks.

    Args:
        job: the run.
        model: to train.
        rows: in training order.
        meter: started before the model was loaded.
    """
    if job.plan.device == "cpu":
        keep_freed_memory()
    reporter = Reporter(job.plan, rows, job.run, meter, main=job.ranks.is_main, flops_share=flops_share(job))
    return Session(job, rows, reporter, _make_trainer(job, model, rows, reporter))


def flops_share(job: Job) -> float | None:
    """Share of the peak FLOPs of all devices that a token per second takes; None if the peak is unknown."""
    peak = device_speed(job.machine, job.plan.world_size).flops if job.plan.device == "cuda" else None
    if peak is None:
        return None
    tokens = round(sum(job.data.train["length"]) / len(job.data.train))
    sizes = flop_sizes(job.architecture, job.config)
    return flops_per_token(sizes, tokens) / (peak * job.plan.world_size)


def close_session(session: Session, plan: Plan) -> Job:
    """Frees the model; returns the job with another plan."""
    trainer: Any = session.trainer
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    release_memory(trainer)
    return replace(session.job, plan=plan)


def release_memory(trainer: PlannedTrainer) -> None:
    """Frees what accelerate holds and what is no longer referenced, on the device too."""
    trainer.accelerator.free_memory()
    release_unreferenced(trainer.args.device.type)


def _make_trainer(job: Job, model: torch.nn.Module, rows: TrainingRows, reporter: Reporter) -> PlannedTrainer:
    config, plan = job.config, job.plan
    use_groups()
    validation = validation_rows(job)
    trainer = PlannedTrainer(
        model=model,
        args=sft_config(
            config,
            plan,
            job.run,
            validation_rows=len(job.data.val or []),
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        ),
        rows=rows,
        skipped=SkippedSteps(config.train.max_skipped_steps),
        numbers=reporter.shown,
        train_dataset=rows.dataset,
        eval_dataset=validation.dataset if validation else None,
        data_collator=_collator(job, rows),
        eval_collator=_collator(job, validation) if validation else None,
        checkpoint_parts=job.checkpoint_parts,
        writer=CheckpointWriter(job),
        processing_class=job.tokenizer,
        callbacks=_callbacks(job, reporter),
    )
    trainer.plus_ratio = config.tuning.lora.plus_ratio
    trainer.remove_callback(PrinterCallback)
    for parameter in model.parameters():
        if parameter.requires_grad and config.tuning.mode == "qlora":
            # TRL has cast them to bf16, which an fp16 gradient scaler cannot unscale
            parameter.data = parameter.data.float()
    if trainer.accelerator.ddp_handler is not None:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # saves one copy of the gradients
    return trainer


def _collator(job: Job, batches: MicroBatches) -> Collator:
    if job.plan.padding_free:
        return joined_micro_batches(batches.rows, ATTENTIONS[job.plan.attention].boundaries)
    return padded_micro_batches(batches.rows, job.tokenizer.pad_token_id)


def _callbacks(job: Job, reporter: Reporter) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = [reporter]
    if job.plan.world_size > 1:
        callbacks.append(Heartbeat(job.run, job.ranks.rank, job.config.parallel.timeout_s))
    if job.data.val is not None:
        callbacks.append(EvaluateAtEnd())
    callbacks += trackers(job)
    patience = job.config.train.early_stopping_patience
    if patience:
        callbacks.append(EarlyStopping(patience))
    return callbacks

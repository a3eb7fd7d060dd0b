"""The trainer of a run: TRL's, with what it has no argument or callback for."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from trl import SFTTrainer

from sft_play.engines.base import Engine
from sft_play.engines.on_disk import StatesOnDisk
from sft_play.model.layers.loss_head import TokenScore, add_loss_head, losses, score_batch
from sft_play.model.layers.recomputation import adjust
from sft_play.parts import IGNORED, Activations
from sft_play.train.checkpoints import CheckpointWriter, is_split_as
from sft_play.train.convert import load_moved, use_own_rate
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
from sft_play.train.rows import MicroBatches
from sft_play.ui.console import warn
from sft_play.upstream.accelerate import unwrapped
from sft_play.upstream.bitsandbytes import forget_overrides, no_overrides, page_what_is_loaded
from sft_play.upstream.patching import lasting, patched
from sft_play.upstream.transformers import loaded_as_saved, saved_as_it_is

HALVINGS = 16  # of fp16's gradient scale, from 2**16 to 1


def forget_gradients(weights: Iterable[torch.nn.Parameter], set_to_none: bool = True) -> None:
    """`zero_grad` of a module with these trained weights."""
    for weight in weights:
        weight.grad = None


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """In the block, the weights are those that a schedule-free optimizer has found; others change nothing.

    Between its steps, they are the point where the next gradient is computed.
    """
    if optimizer is None:
        yield
        return
    optimizer.eval()
    yield
    optimizer.train()


def forget_embeddings(args: TrainingArguments) -> None:
    """Lets no parameter of another run have states in 32 bits beside those in 8."""
    if args.optim.endswith("8bit"):
        lasting(no_overrides)
        forget_overrides()


class PlannedTrainer(SFTTrainer):
    """TRL's trainer; each method is overridden where the library has no callback, and says why."""

    def __init__(
        self,
        *args: Any,
        rows: MicroBatches,
        eval_collator: Any,
        engine: Engine,
        activations: Activations,
        checkpoint_parts: int,
        writer: CheckpointWriter,
        skipped: SkippedSteps,
        numbers: Callable[[int], dict[str, float | None]],
        plus_ratio: float | None,
        nvme_path: str | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # Some models (Gemma 3, Qwen3-VL) say that their own loss does not take the tokens of a whole step.
        # Ours does.
        self.model_accepts_loss_kwargs = True
        self._rows, self.skipped, self._numbers = rows, skipped, numbers
        self._plus_ratio = plus_ratio  # LoRA+: learning rate of the B matrices / that of the A matrices
        self._nvme_path = nvme_path
        self._activations = activations
        self._trained: list[torch.nn.Parameter] = []  # while an epoch is run
        self._step_loss: torch.Tensor | float = 0.0
        # of this process's micro-batches since the last record: the share of its step, and the loss times it
        self._balance: list[torch.Tensor] = []
        add_loss_head(self.model)
        self._train_collator, self._eval_collator = self.data_collator, eval_collator
        self._engine, self._checkpoint_parts, self._writer = engine, checkpoint_parts, writer
        # run.py and the probe replace them
        self.while_saving: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.begin_phase: Callable[[str], None] = lambda phase: None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments; for LoRA+, the B matrices are in groups of their own.

        PEFT's function for it gives their rate to vectors too, such as norms that are trained whole.
        """
        exists = self.optimizer is not None
        if not exists:
            forget_embeddings(self.args)
        optimizer = super().create_optimizer(model)
        if exists:
            return optimizer
        if self._plus_ratio is not None:
            self._split_by_rate(optimizer, model, self._plus_ratio)
        if self.args.optim.startswith("paged"):
            page_what_is_loaded(optimizer)
        if self._nvme_path:
            StatesOnDisk(Path(self._nvme_path)).attach(optimizer)
        return optimizer

    def _split_by_rate(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, ratio: float) -> None:
        named = (self.model if model is None else model).named_parameters()  # type: ignore[union-attr]
        b_matrices = {weight for name, weight in named if "lora_B" in name}
        for group in list(optimizer.param_groups):
            fast = [weight for weight in group["params"] if weight in b_matrices]
            group["params"] = [weight for weight in group["params"] if weight not in b_matrices]
            optimizer.add_param_group({**group, "params": fast, "lr": ratio * group["lr"]})
        # DeepSpeed drops groups without parameters, after the schedule has got a rate for each
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

    def _run_epoch(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """An epoch, in whose steps nobody looks through all modules for the weights that are trained.

        The library does so after each step, when a GPU has nothing to do: it waits from the norm of the
        gradients, which the CPU reads, until the next forward pass.
        """
        trained = [each for each in model.parameters() if each.requires_grad]
        forget = partial(forget_gradients, trained)
        with patched(self, "_trained", trained), patched(model, "zero_grad", forget):
            super()._run_epoch(model, *args, **kwargs)

    def _clip_grad_norm(self, model: object) -> Any:
        """Clips the gradients and returns their norm; the library looks for them in all modules."""
        return self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; returns its share of its step's loss, a scalar.

        The library's own method sets training mode in every micro-batch, walking through all modules for it.
        """
        unwrapped: Any = self.model
        if not unwrapped.training:
            model.train()
        # compute_loss has already divided the loss by the number of micro-batches
        with self.compute_loss_context_manager():
            loss = self.compute_loss(
                model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch
            )
        self.accelerator.backward(loss, **self._engine.backward_arguments())
        # added to the mean loss of the log, which a NaN would never leave again
        share = self._reported.nan_to_num(0.0, 0.0, 0.0)
        self._step_loss = self._step_loss + share
        return share

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, *_: object, num_items_in_batch: Any = None, **__: object
    ) -> Any:
        """A micro-batch's share of its step's loss; tells a probe where the forward pass begins and ends.

        The library's own method also logs metrics that nobody reads here, for which it waits for the device
        three times per micro-batch. `num_items_in_batch` counts supervised tokens of the step, on all ranks.
        """
        self.begin_phase("forward")
        # DDP and ZeRO-2 average gradients over the ranks, and the loss is divided by the tokens of all.
        ranks = self.accelerator.num_processes
        loss, balance = losses(model, inputs, num_items_in_batch)
        loss = ranks * loss
        self._reported = loss.detach()
        if balance is not None:
            # micro-batches differ in size, and one without rows has a filler
            share = (inputs["labels"] != IGNORED).sum() / torch.as_tensor(num_items_in_batch).clamp(min=1)
            loss = loss + ranks * self.router_aux_loss_coef * share * balance
            self._balance.append(torch.stack([share, share * balance.detach()]))
        self.begin_phase("backward")
        return poisoned_if_not_finite(loss)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: object = None) -> Any:
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

    def _skip_step(self, model: torch.nn.Module) -> None:
        step = self.state.global_step + 1
        rows = [row for own in from_all(self._rows_not_finite()) for row in own]
        rows = list(dict.fromkeys(rows))  # processes that divide the tokens of a row have the same ones
        message = self.skipped.message(step, rows)
        if self._engine.updated(model) or self.skipped.in_a_row >= self.skipped.limit:
            raise ended(message)
        if self.accelerator.is_main_process:
            warn(message)
        model.zero_grad()  # AdamW leaves weights without gradients as they are

    def micro_batch(self, rows: Iterable[Any]) -> Any:
        """Rows of the training data as tensors, on the device."""
        return self._prepare_inputs(self._train_collator(list(rows)))

    def _rows_not_finite(self) -> list[str]:
        """This rank's rows of the step whose loss is not finite by themselves."""
        ranks, accumulation = self.accelerator.num_processes, self.args.gradient_accumulation_steps
        first = self.state.global_step * accumulation * ranks + self.accelerator.process_index
        places = range(first, first + accumulation * ranks, ranks)
        micro_batches: Any = self.train_dataset
        rows = [row for place in places for row in micro_batches[place]["rows"]]

        def batch_of(row: int) -> Any:
            return self.micro_batch([{"rows": [row]}])

        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with self.accelerator.autocast():
            found = rows_not_finite(model, rows, batch_of)
        tokenizer: Any = self.processing_class
        shown = (tokenizer.decode(self._rows.rows[row]["input_ids"][:SHOWN_TOKENS]) for row in found)
        return [f"row {row} ({text!r} ...)" for row, text in zip(found, shown, strict=True)]

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Logs a record, with the speed for TensorBoard; its loss is the mean of the steps not skipped."""
        record = self.skipped.corrected(logs)
        if "loss" in record:
            numbers = self._numbers(self.state.global_step)
            record = record | {name: value for name, value in numbers.items() if value is not None}
            if self._balance:
                shares, balance = torch.stack(self._balance).sum(0).tolist()
                record["router_aux_loss"] = balance / (shares or 1)  # this process may have had fillers alone
                self._balance.clear()
        super().log(record, start_time)

    def create_model_card(self, *_: object, **__: object) -> None:
        """Writes none: TRL's has nothing but placeholders, and ours (report/card.py) comes at the end."""

    def floating_point_ops(self, inputs: object) -> int:
        """Not counted here: the library walks through all modules for it, in every micro-batch."""
        return 0

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Logs loss and token accuracy of the validation rows, and returns them."""
        self.begin_phase("evaluation")
        with averaged(self.optimizer):
            total = self.score(eval_dataset)
        metrics = {
            f"{metric_key_prefix}_loss": total.loss,
            f"{metric_key_prefix}_token_accuracy": total.accuracy,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def score(self, eval_dataset: Any = None) -> TokenScore:
        """Loss and token accuracy over the supervised tokens of all ranks, with the weights as they are.

        The library averages the means of batches, so its loss depends on the batch size and on how rows are
        dealt to processes.
        """
        self.data_collator = self._eval_collator
        loader = self.get_eval_dataloader(eval_dataset)
        self.data_collator = self._train_collator
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        # the loader draws a number, which would change later dropout
        with torch.random.fork_rng(devices=[]):
            for batch in loader:
                with self.compute_loss_context_manager():
                    sums += score_batch(model, self._prepare_inputs(batch))
        model.train(was_training)
        return TokenScore.of(self.accelerator.reduce(sums, reduction="sum"))

    def _get_output_dir(self, trial: object) -> str:
        """The staging folder, for the library; our own code knows where checkpoints are published."""
        return str(self._writer.staging)

    def _save_checkpoint(self, model: object, trial: object) -> None:
        """Writes a checkpoint, which appears in its place once it is complete.

        Raises:
            NonFiniteError: a trained weight or the optimizer's state is NaN or infinite; nothing is written.
        """
        unwrapped = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        check_weights(unwrapped)
        check_optimizer(self.optimizer, unwrapped)
        with self.while_saving(), self._writer.staged(self.state), averaged(self.optimizer):
            super()._save_checkpoint(model, trial)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> Any:
        """Wraps model and optimizer and loads the checkpoint, converting it if it is split differently.

        The library has just turned recomputation on, for all layers alike.
        """
        adjust(self.model, self._activations)
        checkpoint = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        moved = checkpoint and not is_split_as(checkpoint, self._engine, self._checkpoint_parts)
        loaded = None if moved else resume_from_checkpoint
        divided = self._engine.shards_weights and not self._engine.wraps_shards
        with unwrapped(self.accelerator) if divided else nullcontext():
            prepared = super()._prepare_for_training(max_steps, train_dataloader, loaded)
        self.optimizer.train()  # type: ignore[union-attr]  # of a schedule-free one
        if checkpoint and moved:
            load_moved(self, checkpoint, self._engine)
        if checkpoint:
            use_own_rate(self)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the weights on the main rank, gathered if each rank has a part of them.

        With ZeRO-2 the library would clone each tensor, and so save tied weights twice.
        """
        weights = self._engine.full_weights(self.model)  # type: ignore[arg-type]
        if self.args.should_save:
            with saved_as_it_is(self.model):
                self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes them as the library does, unless the engine has its own way with the optimizer's state."""
        optimizer: Any = self.optimizer
        if not self._engine.save_state(optimizer.optimizer, self.model, Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)  # type: ignore[union-attr]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, unless they are set with the optimizer's state."""
        if self._engine.loads_own_state:
            with loaded_as_saved(self.model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Loads only the best weights: they may have been saved before the run moved to this engine."""
        if not self._writer.best_is_whole(self.state):
            return
        self.optimizer.eval()  # type: ignore[union-attr]  # what is loaded is an average already
        if self._engine.load_weights(self.model, Path(str(self.state.best_model_checkpoint))):
            return
        with patched(self, "is_deepspeed_enabled", False), loaded_as_saved(self.model):
            super()._load_best_model()

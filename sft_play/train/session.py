"""A run that is ready to start: model, rows, and the trainer with its arguments and callbacks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig

from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.config.train import TrainConfig
from sft_play.engines.ddp import bucket_mib
from sft_play.engines.registry import engine_of
from sft_play.job import Job
from sft_play.machine.host import usable_cores
from sft_play.model.architecture.shape import flop_sizes, flops_per_token, units_of
from sft_play.model.attention.sequence_parallel import part_of_group, sequence_parallel_micro_batches
from sft_play.model.attention.table import ATTENTIONS
from sft_play.model.build import build_model
from sft_play.model.collators import Collator, joined_micro_batches, padded_micro_batches
from sft_play.model.generation import say_stops
from sft_play.model.layers import float8
from sft_play.model.layers.compilation import compile_layers
from sft_play.model.layers.cpu import keep_freed_memory
from sft_play.model.layers.recomputation import RECOMPUTING
from sft_play.model.load import saved_dtype
from sft_play.model.weights.finished import release_memory
from sft_play.plan import Plan
from sft_play.planning.speed.devices import peak_flops
from sft_play.runlog import RunDir
from sft_play.sizing.step import StepSpec
from sft_play.start import part
from sft_play.train.callbacks import EarlyStopping, EvaluateAtEnd, Heartbeat, RamWatch, Reporter
from sft_play.train.checkpoints import CheckpointWriter
from sft_play.train.memory_meter import MemoryMeter
from sft_play.train.nonfinite import SkippedSteps
from sft_play.train.resume import settings_of
from sft_play.train.rows import MicroBatches, TrainingRows, training_rows, validation_rows
from sft_play.train.trackers import trackers
from sft_play.train.trainer import PlannedTrainer, forget_embeddings
from sft_play.train.verify import verify
from sft_play.ui.progress import LOADING, spinner
from sft_play.upstream.accelerate import state_of_a_run, without_number
from sft_play.upstream.patching import lasting
from sft_play.vision.ahead import PicturesAhead
from sft_play.vision.batches import with_pictures
from sft_play.vision.decoding import pixels
from sft_play.vision.families import Recipe
from sft_play.vision.looks import look_of


@dataclass(frozen=True)
class Session:
    """A job with everything that its steps need, on this process's device."""

    job: Job
    rows: TrainingRows
    reporter: Reporter
    trainer: PlannedTrainer
    saved_dtype: str | None  # of a whole model's weights; known before the run, which may outlive the base


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


def prepare_session(job: Job, *, announce: bool = True) -> Session:
    """Everything that the steps of a plan need; with `announce`, prints which processes take part.

    Raises:
        LaunchError: the ranks do not agree.
        ConfigError: the model cannot be loaded, or its attention does not keep packed sequences apart.
    """
    meter = MemoryMeter.start(job.plan.device)
    rows = ordered_rows(job)
    with spinner(LOADING), part("loading"):
        model = build_model(job.config, job.plan, job.ranks.local_rank)
    if job.config.tuning.mode == "full":
        say_stops(model, job.tokenizer)  # in its checkpoints too
    with spinner("preparing the trainer"), part("trainer"):
        session = open_session(job, model, rows, meter)
        verify(session.trainer, job.plan, part_of_group(*_division(job)), announce=announce)
    return session


def open_session(job: Job, model: torch.nn.Module, rows: TrainingRows, meter: MemoryMeter) -> Session:
    """TRL's trainer over our rows, with our callbacks; the meter was started before the model was loaded."""
    if job.plan.device == "cpu":
        keep_freed_memory()
    if job.config.train.float8:
        float8.convert_layers(model)
    if job.plan.kernels.compiled:
        compile_layers(model)
    reporter = Reporter(
        job.plan,
        rows,
        job.run,
        meter,
        main=job.ranks.is_main,
        flops_share=flops_share(job),
        progress=job.hooks.progress,
    )
    dtype = saved_dtype(job.config) if job.config.tuning.mode == "full" else None
    return Session(job, rows, reporter, _make_trainer(job, model, rows, reporter), dtype)


def flops_share(job: Job) -> float | None:
    """Share of the peak FLOPs of all devices that a token per second takes; None if the peak is unknown."""
    peak = peak_flops(job.machine) if job.plan.device == "cuda" else None
    if peak is None:
        return None
    tokens = round(sum(job.data.train["length"]) / len(job.data.train))
    sizes = flop_sizes(job.architecture, job.config)
    return flops_per_token(sizes, tokens) / (peak * job.plan.sharing.world_size)


def close_session(session: Session, plan: Plan) -> Job:
    """Frees the model; returns the job with another plan."""
    trainer: Any = session.trainer
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    trainer.accelerator.free_memory()
    forget_embeddings(trainer.args)
    release_memory()
    return replace(session.job, plan=plan)


def _make_trainer(job: Job, model: torch.nn.Module, rows: TrainingRows, reporter: Reporter) -> PlannedTrainer:
    config, plan, engine = job.config, job.plan, engine_of(job.plan.sharing.engine)
    lasting(state_of_a_run)
    validation = validation_rows(job)
    types = {name: weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
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
        data_collator=_collator(job, rows, always=config.tuning.vision != "frozen"),
        eval_collator=_collator(job, validation) if validation else None,
        engine=engine,
        activations=plan.activations.traced(plan.device),
        checkpoint_parts=job.checkpoint_parts,
        writer=CheckpointWriter(job, settings_of(job)),
        plus_ratio=config.tuning.lora.plus_ratio,
        nvme_path=config.parallel.nvme_path,
        processing_class=job.tokenizer,
        callbacks=_callbacks(job, reporter),
    )
    trainer.remove_callback(PrinterCallback)
    _restore_types(model, types)
    if trainer.accelerator.ddp_handler is not None:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # saves one copy of the gradients
    if plan.activations.recomputes:
        how: Any = trainer.args.gradient_checkpointing_kwargs
        how.update(RECOMPUTING)  # TRL sets another for ZeRO-3; in place: the library reads it by a newer name
    if engine.shards_weights:
        engine.divide(units_of(model), config, plan)
    return trainer


def _restore_types(model: torch.nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Undoes TRL's cast of what is beside 4-bit weights to bf16, which an fp16 scaler cannot unscale.

    By name: a reference to a parameter would keep it whole while an engine divides the model.
    """
    for name, dtype in types.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(dtype)


def _collator(job: Job, batches: MicroBatches, *, always: bool = False) -> Collator:
    """With images, and `always`, each micro-batch has one."""
    pad_id, recipe, look = job.tokenizer.pad_token_id, job.data.recipe, look_of(job.architecture)
    collator_of: Callable[[Dataset], Collator] = partial(padded_micro_batches, pad_id=pad_id)
    if job.plan.rows.joined:
        boundaries = ATTENTIONS[job.plan.kernels.attention].boundaries
        collator_of = partial(joined_micro_batches, boundaries=boundaries)
    if isinstance(recipe, Recipe) and "pictures" in batches.rows.column_names:
        ahead = PicturesAhead(
            partial(pixels, recipe=recipe, folder=job.data.cache_path),
            batches.rows,
            batches.dataset,
            ranks=job.plan.sharing.data_ranks,
            threads=max(1, usable_cores() // job.ranks.local_world_size),
        )
        return with_pictures(collator_of, batches.rows, look, ahead, always=always)
    part, collator = part_of_group(*_division(job)), collator_of(batches.rows)
    return sequence_parallel_micro_batches(collator, part, pad_id) if part else collator


def _division(job: Job) -> tuple[int, float]:
    """Among how many processes tokens are divided, and how long they wait for each other, in seconds."""
    return job.plan.sharing.sequence_ranks, job.config.parallel.timeout_s


def _callbacks(job: Job, reporter: Reporter) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = [reporter]
    if job.plan.sharing.world_size > 1:
        limit_s, watched = job.config.parallel.timeout_s, job.ranks.launched_by_us
        callbacks.append(Heartbeat(job.run, job.ranks.rank, limit_s, exits=not watched))
    if job.plan.sharing.offloads or job.plan.offloads_activations:
        callbacks.append(RamWatch())
    if job.data.val is not None:
        callbacks.append(EvaluateAtEnd())
    callbacks += trackers(job)
    patience = job.config.train.early_stopping_patience
    if patience:
        callbacks.append(EarlyStopping(patience))
    return callbacks


EVALUATIONS_PER_RUN = 10
# At most, by default: a forward pass is a third of a step, so evaluation stays below a tenth of the time.
EVALUATED_PER_TRAINED_ROW = 0.25

SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup",
    "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip


def intervals(config: RunConfig, plan: Plan, validation_rows: int) -> tuple[int, int]:
    """Optimizer steps between evaluations and between checkpoints."""
    steps = plan.schedule.total_steps
    affordable = EVALUATED_PER_TRAINED_ROW * steps * plan.rows_per_step / max(validation_rows, 1)
    default = math.ceil(steps / min(EVALUATIONS_PER_RUN, max(1, int(affordable))))
    train = config.train
    evaluate = train.eval_steps or (train.save_steps or default)
    return evaluate, train.save_steps or evaluate


class Arguments(SFTConfig):
    """TRL's; the trainer gets a model that is where it belongs, and so are the batches of a CPU."""

    place_model_on_device = False  # type: ignore[assignment]

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: never several that it sees, among which the trainer would divide batches."""
        return min(1, super().n_gpu)

    def __post_init__(self) -> None:
        """What TRL's does, and the name of the device."""
        super().__post_init__()
        without_number(self)


def sft_config(
    config: RunConfig, plan: Plan, run: RunDir, *, validation_rows: int, trained_parameters: int
) -> SFTConfig:
    """The arguments of the trainer; without validation rows, there is no evaluation."""
    gradient_bytes = trained_parameters * StepSpec.of(config, plan).trained_element_bytes
    evaluate, save = intervals(config, plan, validation_rows)
    train, optimizer = config.train, OPTIMIZERS[config.train.optimizer]
    return Arguments(
        learning_rate=plan.schedule.learning_rate,
        # a schedule-free optimizer does the warmup itself
        lr_scheduler_type="constant" if optimizer.averages else SCHEDULES[train.lr_schedule],
        warmup_steps=warmup_steps(train.warmup_ratio, plan.schedule.total_steps),
        lr_scheduler_kwargs=schedule_settings(train, plan.schedule.total_steps),
        optim=optimizer.trainer,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        router_aux_loss_coef=train.router_aux_loss_coef,
        eval_strategy="steps" if validation_rows else "no",
        eval_steps=evaluate,
        eval_on_start=validation_rows > 0,
        save_strategy="steps",
        save_steps=save,
        save_on_each_node=not run.shared,
        load_best_model_at_end=validation_rows > 0,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        output_dir=str(run.checkpoints),
        max_steps=plan.schedule.total_steps,
        per_device_train_batch_size=1,  # an element of the data sets is a micro-batch (train/rows.py)
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=plan.batch.accumulation,
        # The rows arrive tokenized (data/prepare.py) and in training order (data/batching.py).
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=plan.device == "cuda",
        bf16=plan.precision.autocast == "bf16",
        fp16=plan.precision.autocast == "fp16",
        gradient_checkpointing=plan.activations.recomputes,
        gradient_checkpointing_kwargs=dict(RECOMPUTING) if plan.activations.recomputes else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        # No static graph: non-reentrant checkpointing runs each gradient hook only once.
        ddp_bucket_cap_mb=bucket_mib(gradient_bytes),
        ddp_timeout=config.parallel.timeout_s,
        use_cpu=plan.device == "cpu",
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # never hide a NaN
        report_to="none",  # train/trackers.py adds the callbacks
        run_name=config.output.name,
        seed=train.seed,
        data_seed=train.seed,
        disable_tqdm=True,
        **engine_of(plan.sharing.engine).trainer_arguments(
            config, plan, trained_parameters=trained_parameters, shared=run.shared
        ),
    )


def warmup_steps(ratio: float, total_steps: int) -> int:
    """The steps of the warmup, of which the first learns nothing; the last step of a run is never one."""
    return min(math.ceil(ratio * total_steps), total_steps - 1)


def schedule_settings(train: TrainConfig, total_steps: int) -> dict[str, int | str]:
    """What the schedule needs beyond the warmup, as transformers names it."""
    if train.lr_schedule != "warmup_stable_decay":
        return {}
    after_warmup = total_steps - warmup_steps(train.warmup_ratio, total_steps)
    return {
        "num_decay_steps": min(math.ceil(train.decay_ratio * total_steps), after_warmup),
        "decay_type": "linear",
    }

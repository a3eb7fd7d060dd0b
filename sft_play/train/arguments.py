"""Translates our config and plan into TRL's SFTConfig."""

import math
from typing import Any

from trl import SFTConfig

from sft_play.config.methods import SCHEDULE_FREE
from sft_play.config.schema import RunConfig
from sft_play.engines import deepspeed
from sft_play.engines.ddp import bucket_mib
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.runlog import RunDir
from sft_play.sizing.step import StepSpec

EVALUATIONS_PER_RUN = 10
# At most, by default: a forward pass is a third of a step, so evaluation stays below a tenth of the time.
EVALUATED_PER_TRAINED_ROW = 0.25

OPTIMIZERS = {"adamw": "adamw_torch_fused"}  # others have the names that transformers gives them
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def intervals(config: RunConfig, plan: Plan, validation_rows: int) -> tuple[int, int]:
    """Optimizer steps between evaluations and between checkpoints.

    Raises:
        ConfigError: checkpoints would fall between evaluations, so that the best one could not be kept.
    """
    affordable = EVALUATED_PER_TRAINED_ROW * plan.total_steps * plan.rows_per_step / max(validation_rows, 1)
    default = math.ceil(plan.total_steps / min(EVALUATIONS_PER_RUN, max(1, int(affordable))))
    train = config.train
    evaluate = train.eval_steps or (train.save_steps or default)
    save = train.save_steps or evaluate
    if save % evaluate:
        raise ConfigError(
            f"train.save_steps={save} is not a multiple of train.eval_steps={evaluate}, so the best "
            "checkpoint could not be kept; "
            f"nearest: {max(evaluate, save // evaluate * evaluate)} or {(save // evaluate + 1) * evaluate}"
        )
    return evaluate, save


def sft_config(
    config: RunConfig, plan: Plan, run: RunDir, *, validation_rows: int, trained_parameters: int
) -> SFTConfig:
    """The arguments of the trainer.

    Args:
        config: the run.
        plan: of the run.
        run: where checkpoints are saved.
        validation_rows: their number; 0 turns evaluation off.
        trained_parameters: number of trained elements; ZeRO-2's buckets need not be larger.
    """
    gradient_bytes = trained_parameters * StepSpec.of(config, plan).trained_element_bytes
    return SFTConfig(
        **_optimization(config, plan),
        **_evaluation_and_saving(config, plan, run, validation_rows),
        output_dir=str(run.checkpoints),
        max_steps=plan.total_steps,
        per_device_train_batch_size=1,  # an element of the data sets is a micro-batch (train/rows.py)
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        # The rows arrive tokenized (data/prepare.py) and in training order (data/batching.py).
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=plan.device == "cuda",
        bf16=plan.mixed_precision == "bf16",
        fp16=plan.mixed_precision == "fp16",
        gradient_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        deepspeed=_deepspeed(config, plan, trained_parameters, shared=run.shared),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        # No static graph: non-reentrant checkpointing runs each gradient hook only once.
        ddp_bucket_cap_mb=bucket_mib(gradient_bytes),
        ddp_timeout=config.parallel.timeout_s,
        use_cpu=plan.device == "cpu",
        logging_steps=config.train.logging_steps,
        logging_nan_inf_filter=False,  # never hide a NaN
        report_to="none",  # train/trackers.py adds the callbacks
        run_name=config.output.name,
        seed=config.train.seed,
        data_seed=config.train.seed,
        disable_tqdm=True,
    )


def _optimization(config: RunConfig, plan: Plan) -> dict[str, Any]:
    train = config.train
    return dict(
        learning_rate=plan.learning_rate,
        # a schedule-free optimizer does the warmup itself
        lr_scheduler_type="constant" if train.optimizer == SCHEDULE_FREE else SCHEDULES[train.lr_schedule],
        warmup_steps=math.ceil(train.warmup_ratio * plan.total_steps),
        optim=OPTIMIZERS.get(train.optimizer, train.optimizer),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
    )


def _evaluation_and_saving(
    config: RunConfig, plan: Plan, run: RunDir, validation_rows: int
) -> dict[str, Any]:
    evaluate, save = intervals(config, plan, validation_rows)
    saving = dict(
        save_strategy="steps",
        save_on_each_node=not run.shared,
        save_steps=save,
    )
    if not validation_rows:
        return dict(eval_strategy="no", **saving)
    return dict(
        eval_strategy="steps",
        eval_steps=evaluate,
        eval_on_start=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        **saving,
    )


def _deepspeed(
    config: RunConfig, plan: Plan, trained_parameters: int, *, shared: bool
) -> dict[str, Any] | None:
    if plan.engine != "deepspeed_z2":
        return None
    tree = deepspeed.checked_config(
        deepspeed.CONFIG,
        plan,
        max_grad_norm=config.train.max_grad_norm,
        trainable_parameters=trained_parameters,
    )
    return (
        tree
        if shared
        else {**tree, "checkpoint": {**tree.get("checkpoint", {}), "use_node_local_storage": True}}
    )

"""Our config and plan in the words of TRL's SFTConfig."""

import math
from typing import Any

from trl import SFTConfig

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.launch.accelerate import DEEPSPEED_CONFIG
from sft_play.launch.deepspeed import deepspeed_config
from sft_play.runlog import RunDir
from sft_play.sizing.planner import Plan
from sft_play.sizing.step import StepSpec
from sft_play.units import MIB

EVALUATIONS_PER_RUN = 10
EVALUATED_PER_TRAINED_ROW = 0.25  # at most, by default: a forward pass is a third of a step, so evaluation stays below a tenth

BUCKETS = 16  # of gradients in a backward pass, at least

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
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
            f"train.save_steps={save} is no multiple of train.eval_steps={evaluate}, so the best checkpoint could not be told; "
            f"nearest: {max(evaluate, save // evaluate * evaluate)} or {(save // evaluate + 1) * evaluate}"
        )
    return evaluate, save


def sft_config(config: RunConfig, plan: Plan, run: RunDir, *, validation_rows: int, trained_parameters: int) -> SFTConfig:
    """The arguments of the trainer.

    Args:
        config: the run.
        plan: how it is carried out.
        run: where checkpoints go.
        validation_rows: how many there are; 0 turns evaluation off.
        trained_parameters: elements that get a gradient; ZeRO-2's buckets need not be larger.
    """
    train, evaluates = config.train, validation_rows > 0
    evaluate, save = intervals(config, plan, validation_rows)
    return SFTConfig(
        output_dir=str(run.checkpoints),
        max_steps=plan.total_steps,
        per_device_train_batch_size=plan.rows_per_micro_batch,
        per_device_eval_batch_size=eval_batch_rows(config, plan),
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        # The rows arrive in the order of learning (data/batching.py) and tokenised (data/prepare.py).
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        max_length=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=plan.device == "cuda",
        learning_rate=plan.learning_rate,
        lr_scheduler_type=SCHEDULES[train.lr_schedule],
        warmup_steps=math.ceil(train.warmup_ratio * plan.total_steps),
        optim=OPTIMIZERS[train.optimizer],
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        bf16=plan.mixed_precision == "bf16",
        fp16=plan.mixed_precision == "fp16",
        gradient_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        deepspeed=_deepspeed(config, plan, trained_parameters, shared=run.shared),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        # no static graph: checkpointing that is not reentrant runs each gradient hook once, so DDP needs no promise
        ddp_bucket_cap_mb=ddp_bucket_mib(trained_parameters * StepSpec.of(config, plan, 1.0).trained_element_bytes),
        ddp_timeout=config.parallel.timeout_s,
        use_cpu=plan.device == "cpu",
        eval_strategy="steps" if evaluates else "no",
        eval_steps=evaluate if evaluates else None,
        eval_on_start=evaluates,
        save_strategy="steps",
        save_on_each_node=not run.shared,
        save_steps=save,
        save_total_limit=train.keep_checkpoints,
        load_best_model_at_end=evaluates,
        metric_for_best_model="eval_loss" if evaluates else None,
        greater_is_better=False if evaluates else None,
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # a NaN must be seen
        report_to=list(train.report_to) or "none",
        run_name=config.output.name,
        seed=train.seed,
        data_seed=train.seed,
        disable_tqdm=True,
    )


def ddp_bucket_mib(gradient_bytes: int) -> int:
    """MiB of gradients that DDP exchanges at once.

    The last bucket of a backward pass is sent with nothing left to hide it, so it is kept to a sixteenth of all; within 1 MiB,
    below which an exchange costs its start more than its bytes, and 100 MiB, above which nothing is gained.
    """
    return min(100, max(1, gradient_bytes // BUCKETS // MIB))


def _deepspeed(config: RunConfig, plan: Plan, trained_parameters: int, *, shared: bool) -> dict[str, Any] | None:
    if plan.engine != "deepspeed_z2":
        return None
    tree = deepspeed_config(
        DEEPSPEED_CONFIG, plan, max_grad_norm=config.train.max_grad_norm, trainable_parameters=trained_parameters
    )
    return tree if shared else {**tree, "checkpoint": {**tree.get("checkpoint", {}), "use_node_local_storage": True}}


def eval_batch_rows(config: RunConfig, plan: Plan) -> int:
    """Rows of one evaluation batch on one device; evaluation pads, it never packs."""
    return plan.rows_per_micro_batch if config.eval.batch_size == "auto" else config.eval.batch_size

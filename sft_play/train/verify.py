"""Checks before the first step.

All ranks hold the same plan, none is missing, no token sees a later one, attention stays within each of the
joined rows, and the output head computes what the model's own does.
"""

import os
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel, Trainer

from sft_play.engines.registry import ENGINES, engine_of
from sft_play.engines.stored import part_of, whole_elements
from sft_play.errors import ConfigError, LaunchError, first_line
from sft_play.launch.environment import IGNORED_VARIABLE
from sft_play.model.architecture.shape import base_of
from sft_play.model.attention.sequence_parallel import KEY, Part, divide
from sft_play.model.layers.loss_head import autocast_of
from sft_play.plan import Plan
from sft_play.reasons.choices import micro_batch_of, ranks_text
from sft_play.spelling import make
from sft_play.train.ranks import from_all
from sft_play.ui.console import console
from sft_play.units import format_bytes
from sft_play.upstream.accelerate import is_out_of_memory

ISOLATION_TOKENS = 8
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
# Of the largest logit: rounding of 16-bit kernels is far below it, a leak far above.
ISOLATION_TOLERANCE = 1e-2


def verify(trainer: Trainer, plan: Plan, part: Part | None = None, *, announce: bool = True) -> None:
    """Makes all of these checks; with `announce`, then prints which processes take part.

    `part` is what this process has of the tokens of a micro-batch, if several divide them.

    Raises:
        LaunchError: they differ, or processes are missing.
        ConfigError: the model sees later tokens or other rows, its output head is unlike others, or processes
            that divide its tokens compute something else.
    """
    accelerator, processes = trainer.accelerator, plan.sharing.world_size
    if accelerator.num_processes != processes:
        raise LaunchError(
            f"{processes} processes were requested, but {accelerator.num_processes} started; the "
            f"effective batch would be wrong. Launch with `{make('train-distributed', NGPU='<n>')}`, or see "
            "MULTI_GPU_GUIDE.md"
        )
    found = accelerator.distributed_type.value.replace("MULTI_CPU", "MULTI_GPU")
    engine = engine_of(plan.sharing.engine)
    if found != (engine.distributed_type if processes > 1 else engine.distributed_type_alone):
        started = next((engine for engine in ENGINES if engine.distributed_type == found), None)
        override = f"add the override parallel.engine={started.name}, or " if started else ""
        raise LaunchError(
            f"the launcher started {started.label if started else found}, but the plan is for engine "
            f"{plan.sharing.engine}: {override}launch with another file from configs/accelerate/"
        )
    check_in_force(trainer, plan)
    device = str(accelerator.device)
    if accelerator.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(accelerator.device)})"
    members = from_all((accelerator.process_index, device, plan.to_json()))
    if any(member[2] != members[0][2] for member in members):
        raise LaunchError(
            "the processes made different plans; are config, data and GPUs the same on every machine?"
        )
    model: Any = trainer.model  # not wrapped yet
    autocast = autocast_of(plan.precision.autocast, accelerator.device.type)
    with autocast, engine_of(plan.sharing.engine).computing(model):
        check_causal(model, accelerator.device)
        check_head(model, accelerator.device)
        if plan.rows.joined:
            check_isolation(model, plan, accelerator.device)
        if part:
            check_sequence_parallel(model, part, accelerator.device)
    if announce:
        print_banner(trainer, plan, [(rank, device) for rank, device, _ in members])


def check_in_force(trainer: Trainer, plan: Plan) -> None:
    """Raises a LaunchError if the libraries made another precision, compiling or accumulation of the plan."""
    accelerator = trainer.accelerator
    planned = {
        "mixed precision": (plan.precision.autocast, accelerator.mixed_precision),
        "torch.compile": ("NO", accelerator.state.dynamo_plugin.backend.value),
        "gradient accumulation": (
            plan.batch.accumulation,
            trainer.args.gradient_accumulation_steps * accelerator.gradient_accumulation_steps,
        ),
    }
    differ = [
        f"{name} is {found}, but {wanted} was planned"
        for name, (wanted, found) in planned.items()
        if found != wanted
    ]
    if differ:
        raise LaunchError(f"{'; '.join(differ)}: the environment, or a config file of accelerate, changed it")


def _weights_held(model: Any) -> list[str]:
    """A line about how much of a divided model this process holds; none if it holds all of it."""
    weights = list(model.parameters())
    held = sum(part_of(weight).nbytes for weight in weights)
    whole = sum(whole_elements(weight) * weight.element_size() for weight in weights)
    return [f"Weights: {format_bytes(held)} of {format_bytes(whole)} in this process"] if held < whole else []


def print_banner(trainer: Trainer, plan: Plan, members: list[tuple[int, str]]) -> None:
    """Prints what runs where and how, as the libraries have it, before the first step."""
    accelerator = trainer.accelerator
    words = "tokens" if plan.rows.packing else "sequences"
    ignored = os.environ.get(IGNORED_VARIABLE, "").replace(",", ", ")
    lines = [
        f"Distributed type: {accelerator.distributed_type.value}",
        f"Number of processes: {accelerator.num_processes}",
        f"Number of GPUs: {sum(device.startswith('cuda') for _, device in members)}",
        *_weights_held(trainer.model),
        f"Mixed precision: {accelerator.mixed_precision}",
        *([f"Ignored: {ignored}, since config and plan decide"] if ignored else []),
        *(f"Process {rank} using device: {device}" for rank, device in sorted(members)),
        f"Effective batch: {plan.batch.effective:,} {words} = {micro_batch_of(plan)} x "
        f"{trainer.args.gradient_accumulation_steps} x {_ranks(plan, accelerator.num_processes)}",
    ]
    console().print("\n".join(f"  {line}" for line in lines), style="dim")


def _ranks(plan: Plan, processes: int) -> str:
    ranks = plan.sharing.sequence_ranks
    return str(processes) if ranks == 1 else ranks_text(processes, ranks)


def _evaluated(model: PreTrainedModel, *inputs: dict[str, Any]) -> list[Any]:
    """The outputs of the model for each of the inputs, without dropout and gradients.

    Its code may fail, as with experts that it does not have, or with layers in 4 bits.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return [model(**each, use_cache=False) for each in inputs]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DEVICE_ERRORS) or is_out_of_memory(error):
            raise
        raise ConfigError(
            f"model.name: {_name(model)} cannot compute its logits here: "
            f"{type(error).__name__}: {first_line(error)}\nset model.attention=eager or "
            "another tuning.mode, or use a model of docs/reference/models.md that trains"
        ) from error
    finally:
        model.train(was_training)


def _name(model: object) -> str:
    """Its class, below an adapter."""
    return type(base_of(model)).__name__


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of the same shape differ by more than rounding."""
    return bool((one - other).abs().max() > ISOLATION_TOLERANCE * one.abs().max())


def _tokens(device: torch.device) -> torch.Tensor:
    """Tokens that are all different, [1, 2 x ISOLATION_TOKENS]."""
    return torch.arange(1, 2 * ISOLATION_TOKENS + 1, device=device)[None]


def _sees(model: PreTrainedModel, device: torch.device, *, place: slice, other: slice, **inputs: Any) -> bool:
    """Whether the logits of the tokens in one place depend on the tokens in another one."""
    ids = _tokens(device)
    changed = ids.clone()
    changed[:, other] = ids[:, other].flip(1)
    outputs = _evaluated(model, {"input_ids": ids, **inputs}, {"input_ids": changed, **inputs})
    first, second = (out.logits[:, place].float() for out in outputs)
    return _differs(first, second)


def check_causal(model: PreTrainedModel, device: torch.device) -> None:
    """Raises a ConfigError if the logits of a token depend on later tokens, as in encoders."""
    n = ISOLATION_TOKENS
    if _sees(model, device, place=slice(n), other=slice(n, None)):
        raise ConfigError(
            f"model.name: {_name(model)} sees the tokens it has to predict; SFT-Play trains decoder-only "
            "language models (docs/reference/models.md)"
        )


def check_head(model: PreTrainedModel, device: torch.device) -> None:
    """Raises a ConfigError if the tiled head's log-probabilities are not those of the model's own logits.

    Then the architecture does more with its logits.
    """
    ids = _tokens(device)
    batch = {"input_ids": ids}
    own, tiled = _evaluated(model, batch, batch | {"labels": ids, "fused_lm_head": True})
    scores = own.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    if _differs(scores, tiled.log_probs.reshape(scores.shape).float()):
        raise ConfigError(
            f"model.name: {_name(model)} changes its logits in a way that SFT-Play's loss does not, so it "
            "would be trained on another loss; use another model"
        )


def check_isolation(model: PreTrainedModel, plan: Plan, device: torch.device) -> None:
    """Raises a ConfigError if the logits of a joined row depend on the row before it.

    Some architectures do not pass the lengths on to their attention.
    """
    n = ISOLATION_TOKENS
    ends = torch.tensor([0, n, 2 * n], device=device, dtype=torch.int32)
    bounds = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=n, max_length_k=n)
    positions = torch.arange(n, device=device).repeat(2)[None]
    joined = dict(position_ids=positions, sequence_lengths=[n, n], **bounds)
    if _sees(model, device, place=slice(n, None), other=slice(n), **joined):
        asked = f"model.attention={plan.kernels.attention}"
        remedy = "set train.packing=false" if plan.rows.packing else "set train.padding_free=false"
        raise ConfigError(
            f"{_name(model)} with {asked}: attention leaks between joined rows; {remedy}, which pads them"
        )


def check_sequence_parallel(model: PreTrainedModel, part: Part, device: torch.device) -> None:
    """Raises a ConfigError if a rank's logits for its part of the tokens are not those for all tokens.

    Some architectures let tokens see each other elsewhere than in attention. All ranks call it.
    """
    lengths = [ISOLATION_TOKENS - 3, ISOLATION_TOKENS * (part.ranks - 1) + 3]  # the second begins on rank 0
    ids = torch.arange(sum(lengths))[None] % (2 * ISOLATION_TOKENS) + 1
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    whole = {"input_ids": ids, "position_ids": positions, "labels": ids, "sequence_lengths": lengths}
    own = divide(whole, part, 0)
    kept = ("input_ids", "position_ids", "sequence_lengths", KEY)
    both = ({name: batch[name] for name in kept if name in batch} for batch in (whole, own))
    one, other = _evaluated(model, *(send_to_device(batch, device) for batch in both))
    if _differs(one.logits.chunk(part.ranks, dim=1)[part.rank], other.logits):
        raise ConfigError(
            f"model.name: {_name(model)} gives other results when processes divide its tokens; set "
            "parallel.sequence_parallel_size=1"
        )

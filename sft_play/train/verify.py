"""Before the first step: every rank holds the same plan, the world is whole, packed rows are blind to each other."""

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from sft_play.errors import ConfigError, LaunchError
from sft_play.runlog import console, is_main_rank
from sft_play.sizing.planner import Plan

ISOLATION_TOKENS = 8
ISOLATION_TOLERANCE = 1e-2  # of the largest logit: rounding of 16-bit kernels stays far below, a leak far above


def verify(trainer: Trainer, plan: Plan, *, announce: bool = True) -> None:
    """All ranks hold the same plan and the world is as large as was asked for; then says who takes part, if told to.

    Raises:
        LaunchError: they differ, or processes are missing.
        ConfigError: the model's attention looks from one packed row into another.
    """
    from accelerate.utils import gather_object

    accelerator = trainer.accelerator
    if accelerator.num_processes != plan.world_size:
        raise LaunchError(
            f"{plan.world_size} processes were asked for and {accelerator.num_processes} started; the effective batch would be "
            "wrong. Launch with `make train-distributed NGPU=<n>`, or see MULTI_GPU_GUIDE.md"
        )
    sharded = accelerator.distributed_type.value == "DEEPSPEED"
    if sharded != (plan.engine == "deepspeed_z2"):
        raise LaunchError(
            f"the launcher started {'DeepSpeed' if sharded else 'DDP'}, the plan is for engine {plan.engine}: add the override "
            f"parallel.engine={'deepspeed_z2' if sharded else 'ddp'}, or launch with another file of configs/accelerate/"
        )
    digest = hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()
    name = torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else "CPU"
    members = gather_object([(accelerator.process_index, f"{accelerator.device} ({name})", digest)])
    if len({member[2] for member in members}) > 1:
        raise LaunchError("the processes made different plans; are config, data and GPUs the same on every machine?")
    if plan.packing:
        check_isolation(trainer.model, accelerator.device)  # type: ignore[arg-type]  # not wrapped yet
    if announce:
        print_banner(accelerator, plan, [(rank, device) for rank, device, _ in members])


def print_banner(accelerator: Any, plan: Plan, members: list[tuple[int, str]]) -> None:
    """What runs where, before the first step."""
    if not is_main_rank():
        return
    words = "tokens" if plan.packing else "sequences"
    lines = [
        f"Distributed type: {accelerator.distributed_type.value}",
        f"Number of processes: {accelerator.num_processes}",
        f"Mixed precision: {plan.mixed_precision}",
        *(f"Process {rank} using device: {device}" for rank, device in sorted(members)),
        f"Effective batch: {plan.effective_batch_size} {words} = {plan.micro_batch_size} x {plan.gradient_accumulation_steps} "
        f"x {plan.world_size}",
    ]
    console().print("\n".join(f"  [dim]{line}[/]" for line in lines))


@torch.no_grad()
def check_isolation(model: PreTrainedModel, device: torch.device) -> None:
    """What a packed row computes must not change with the row before it: an architecture may not pass the lengths on.

    Raises:
        ConfigError: it does change.
    """
    n = ISOLATION_TOKENS
    positions = torch.arange(n, device=device).repeat(2)[None]
    ends = torch.tensor([0, n, 2 * n], device=device, dtype=torch.int32)
    bounds = {"sequence_lengths": [n, n], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": n, "max_length_k": n}
    was_training = model.training
    model.eval()
    ids = torch.arange(1, 2 * n + 1, device=device)[None]
    other = ids.clone()
    other[:, :n] = ids[:, :n].flip(1)
    first, second = (model(input_ids=x, position_ids=positions, **bounds).logits[:, n:].float() for x in (ids, other))
    model.train(was_training)
    if (first - second).abs().max() > ISOLATION_TOLERANCE * first.abs().max():
        attention = model.config._attn_implementation
        raise ConfigError(
            f"train.packing=true: in {type(model).__name__} with model.attention={attention} packed rows see each other; "
            "set train.packing=false, or model.attention=sdpa, which masks them"
        )

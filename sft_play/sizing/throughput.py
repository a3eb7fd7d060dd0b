"""How fast a plan would run: a roofline with stated assumptions, good for ranking plans, not a promise.

A micro-batch takes as long as its arithmetic or its reading of weights, whichever is longer, plus what launching the
kernels costs. Nothing here is measured; every number that is assumed is a constant below. Units: seconds, bytes, FLOP.
"""

from dataclasses import dataclass

UTILISATION = 0.5  # share of the dense peak that training reaches on large micro-batches (41-55% is published for 8B LoRA)
LAUNCH_S_PER_LAYER = 0.4e-3  # kernel launches of one layer, forward and backward
NF4_UNPACK_BYTES = 4.5  # per weight and pass: 0.5 read, 2 written, 2 read again
OPTIMIZER_BYTES = 32  # per trained parameter: gradient, weight and two moments in fp32, read and written
CPU_FLOPS_PER_CORE = 30e9  # fp32, vector units; for ranking on machines without a GPU
CPU_BANDWIDTH = 10e9


@dataclass(frozen=True)
class Workload:
    """What the model asks of the device, per token or per pass."""

    matmul_parameters: int  # that each token meets: MoE counts the experts in use; with the output head
    trained_parameters: int
    weight_bytes: int
    quantised_parameters: int  # 4-bit ones
    layers: int
    attention_width: int  # heads x head_dim


@dataclass(frozen=True)
class Speed:
    """What the device gives; None where its data sheet is not known."""

    flops: float | None
    bandwidth: float | None
    link_bandwidth: float | None = None  # bytes per second between two processes


def flops_per_token(work: Workload, sequence: int, *, passes: int = 2) -> int:
    """Arithmetic of a training step for one token: products with weights, attention to half of `sequence`, weight gradients.

    Args:
        work: of the model.
        sequence: tokens that one token can attend to at most.
        passes: forward and backward; 3 where the forward is computed twice, which model FLOPs utilisation does not count.
    """
    forward = 2 * work.matmul_parameters + 2 * sequence * work.attention_width * work.layers
    return passes * forward + 2 * work.trained_parameters


def seconds_per_step(
    work: Workload,
    speed: Speed,
    *,
    tokens: int,
    sequence: int,
    accumulation: int,
    checkpointing: bool,
    world_size: int,
) -> float | None:
    """Time of one optimizer step.

    Args:
        work: of the model.
        speed: of one device.
        tokens: of one micro-batch, padding included.
        sequence: tokens that one token can attend to at most.
        accumulation: micro-batches per step on each device.
        checkpointing: whether the forward pass is computed twice.
        world_size: devices.

    Returns:
        seconds, or None if the device's speed is not known.
    """
    if not speed.flops or not speed.bandwidth:
        return None
    passes = 3 if checkpointing else 2
    flops = tokens * flops_per_token(work, sequence, passes=passes)
    reading = passes * work.weight_bytes / speed.bandwidth
    unpacking = passes * work.quantised_parameters * NF4_UNPACK_BYTES / speed.bandwidth
    micro = max(flops / (speed.flops * UTILISATION), reading) + unpacking
    micro += LAUNCH_S_PER_LAYER * work.layers * passes / 2
    update = work.trained_parameters * OPTIMIZER_BYTES / speed.bandwidth
    return accumulation * micro + update + _exchange(work, speed, world_size)


def _exchange(work: Workload, speed: Speed, world_size: int) -> float:
    """Ring all-reduce of fp32 gradients, not overlapped with the backward pass; unknown links are left out."""
    if world_size == 1 or not speed.link_bandwidth:
        return 0.0
    return 2 * (world_size - 1) / world_size * 4 * work.trained_parameters / speed.link_bandwidth

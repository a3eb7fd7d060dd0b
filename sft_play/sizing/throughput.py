"""How fast a plan would run: a roofline with stated assumptions, good for ranking plans, not a promise.

A micro-batch takes as long as its arithmetic or its reading of weights, whichever is longer, plus what launching the
kernels costs. What processes exchange comes on top in full, as if nothing of it were hidden behind computing, so that the
speed-up by more processes is a lower bound. Nothing here is measured; every number that is assumed is a constant below.
Units: seconds, bytes, FLOP.
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
    link_bandwidth: float | None = None  # bytes per second from one device to another, one way


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
    exchanged_bytes: int = 0,
) -> float | None:
    """Time of one optimizer step.

    Args:
        work: of the model.
        speed: of one device.
        tokens: of one micro-batch, padding included.
        sequence: tokens that one token can attend to at most.
        accumulation: micro-batches per step on each device.
        checkpointing: whether the forward pass is computed twice.
        exchanged_bytes: that a process sends to others (`exchange`); over an unknown link they take no time.

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
    return accumulation * micro + update + exchanged_bytes / (speed.link_bandwidth or float("inf"))


def exchange(engine: str, world_size: int, trained: int, element_bytes: int, accumulation: int) -> int:
    """Bytes that each process sends to others in an optimizer step, by ring algorithms.

    DDP reduces all gradients to all processes once a step, in two rounds over the ring. ZeRO-2 reduces the gradients of each
    micro-batch to the process that owns them, and collects the updated weights once (DeepSpeed's stage_1_and_2.py).

    Args:
        engine: none, ddp or deepspeed_z2.
        world_size: processes.
        trained: parameters that have a gradient.
        element_bytes: of a gradient.
        accumulation: micro-batches per step.
    """
    rounds = {"none": 0, "ddp": 2, "deepspeed_z2": accumulation + 1}[engine]
    return rounds * trained * element_bytes * (world_size - 1) // world_size

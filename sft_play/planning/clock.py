"""Predicts how long an optimizer step of a plan takes.

The times of all operations of a traced step are added up, as the device's profile gives them. Communication
between processes is added in full, as if none of it overlapped with computation, so the predicted speed-up
from more processes is a lower bound. Units: seconds, bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.plan import Clock, Plan
from sft_play.planning.profile import DeviceProfile, MicroBatch
from sft_play.sizing.step import StepSpec
from sft_play.sizing.work import Work

# The speed of a CPU that has not been measured.
CPU_FLOPS_PER_CORE = 30e9  # fp32, vector units
CPU_BANDWIDTH = 10e9


@dataclass(frozen=True)
class Speed:
    """What the device's data sheet says; None if unknown."""

    flops: float | None
    bandwidth: float | None
    link_bandwidth: float | None = None  # bytes per second from one device to another, one way


@dataclass(frozen=True)
class StepSeconds:
    """The parts of an optimizer step's time on one device."""

    forward: float
    backward: float
    exchange: float
    update: float
    overhead: float  # data and trainer

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward + self.backward + self.exchange + self.update + self.overhead


def exchange(engine: str, world_size: int, trained: int, element_bytes: int, accumulation: int) -> int:
    """Bytes that each process sends to others in an optimizer step, by ring algorithms.

    DDP all-reduces the gradients once per step, in two rounds over the ring. ZeRO-2 reduces the gradients of
    each micro-batch to the process that owns them, and all-gathers the updated weights once (DeepSpeed's
    stage_1_and_2.py).

    Args:
        engine: none, ddp or deepspeed_z2.
        world_size: number of processes.
        trained: number of parameters that have a gradient.
        element_bytes: of a gradient.
        accumulation: micro-batches per step.
    """
    rounds = {"none": 0, "ddp": 2, "deepspeed_z2": accumulation + 1}[engine]
    return rounds * trained * element_bytes * (world_size - 1) // world_size


def exchanged_bytes(trained: int, run: RunConfig, plan: Plan) -> int:
    """Bytes that each process sends in an optimizer step of a plan that trains `trained` parameters."""
    element = StepSpec.of(run, plan).trained_element_bytes
    return exchange(plan.engine, plan.world_size, trained, element, plan.gradient_accumulation_steps)


def step_seconds(
    work: Work,
    profile: DeviceProfile,
    batch: MicroBatch,
    *,
    accumulation: int = 1,
    sent_bytes: int = 0,
    update_share: float = 1.0,
) -> StepSeconds:
    """The time of an optimizer step.

    Args:
        work: of a micro-batch of `batch.tokens` tokens.
        profile: of the device.
        batch: an average micro-batch.
        accumulation: micro-batches per step on each device.
        sent_bytes: that a process sends to others (`exchange`).
        update_share: share of the trained parameters that this process updates; ZeRO partitions them.
    """
    forward, backward = profile.micro_batch_seconds(work, batch)
    return StepSeconds(
        forward=accumulation * forward,
        backward=accumulation * backward,
        exchange=profile.exchange_seconds(sent_bytes),
        update=profile.update_seconds(
            update_share * work.trained_elements, update_share * work.trained_tensors
        ),
        overhead=accumulation * profile.micro_batch_s + profile.step_s,
    )


WorkOf = Callable[[RunConfig, Plan, float], Work]  # of a micro-batch with this number of tokens
MicroBatchOf = Callable[[Plan], MicroBatch]


def clock(work_of: WorkOf, profile: DeviceProfile | None, batch_of: MicroBatchOf) -> Clock:
    """A function that predicts the seconds of an optimizer step of a plan.

    Args:
        work_of: what a micro-batch of a plan computes and moves.
        profile: of the device of each process; None if unknown.
        batch_of: an average micro-batch of a plan.
    """

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        if profile is None:
            return None
        batch = batch_of(plan)
        work = work_of(run, plan, batch.tokens)
        return step_seconds(
            work,
            profile,
            batch,
            accumulation=plan.gradient_accumulation_steps,
            sent_bytes=exchanged_bytes(work.trained_elements, run, plan),
            update_share=1 / plan.world_size if plan.engine == "deepspeed_z2" else 1.0,
        ).total

    return seconds

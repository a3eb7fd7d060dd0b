"""Predicts how long an optimizer step of a plan takes.

The times of all operations of a traced step are added up, as the device's profile gives them. Communication
between processes is added in full, as if none of it overlapped with computation, so the predicted speed-up
from more processes is a lower bound. Units: seconds, bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.plan import Clock, Plan
from sft_play.planning.collectives import Collectives, messages_of
from sft_play.planning.profile import DeviceProfile, MicroBatch
from sft_play.work import Work

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


def step_seconds(
    work: Work,
    profile: DeviceProfile,
    batch: MicroBatch,
    *,
    accumulation: int = 1,
    exchange: float = 0.0,
    update_share: float = 1.0,
) -> StepSeconds:
    """The time of an optimizer step.

    Args:
        work: of a micro-batch of `batch.tokens` tokens.
        profile: of the device.
        batch: an average micro-batch.
        accumulation: micro-batches per step on each device.
        exchange: seconds of communication between the processes.
        update_share: share of the trained parameters that this process updates; ZeRO partitions them.
    """
    forward, backward = profile.micro_batch_seconds(work, batch)
    return StepSeconds(
        forward=accumulation * forward,
        backward=accumulation * backward,
        exchange=exchange,
        update=profile.update_seconds(
            update_share * work.trained_elements, update_share * work.trained_tensors
        ),
        overhead=accumulation * profile.micro_batch_s + profile.step_s,
    )


WorkOf = Callable[[RunConfig, Plan, float], Work]  # of a micro-batch with this number of tokens
MicroBatchOf = Callable[[Plan], MicroBatch]


def clock(
    work_of: WorkOf,
    profile: DeviceProfile | None,
    batch_of: MicroBatchOf,
    collectives: Collectives | None = None,
) -> Clock:
    """A function that predicts the seconds of an optimizer step of a plan.

    Args:
        work_of: what a micro-batch of a plan computes and moves.
        profile: of the device of each process; None if unknown.
        batch_of: an average micro-batch of a plan.
        collectives: of the processes; None leaves communication out.
    """

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        if profile is None:
            return None
        batch = batch_of(plan)
        work = work_of(run, plan, batch.tokens)
        exchanged = messages_of(work.trained_elements, run, plan)
        return step_seconds(
            work,
            profile,
            batch,
            accumulation=plan.gradient_accumulation_steps,
            exchange=collectives.seconds(exchanged) if collectives else 0.0,
            update_share=engine_of(plan.engine).update_share(plan.world_size),
        ).total

    return seconds

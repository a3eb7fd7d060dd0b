"""Predicts how long an optimizer step of a plan takes, and what its processes exchange.

The times of all operations of a traced step are added up, as the device's profile gives them. Communication
between processes is added in full, as if none of it overlapped with computation. On GPUs some of it does, but
dividing a model has made published steps longer by more than this (benchmarks/evidence/overlap.py): links are
slower than in data sheets, and computation is, while they are in use. Units: seconds, bytes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.engines.base import Message
from sft_play.engines.registry import engine_of
from sft_play.machine.gpus import Machine
from sft_play.plan import Clock, Plan
from sft_play.planning.budget import training_threads
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.devices import ROUNDS, Collectives, collectives_of, host_link, profile_of
from sft_play.planning.speed.profile import DeviceProfile, MicroBatch
from sft_play.sizing.architecture import AnyArchitecture, Architecture
from sft_play.sizing.estimator import BatchesOf, work_of_plans
from sft_play.sizing.step import StepSpec
from sft_play.work import ALL_TO_ALL, TRANSFER, Work


class StepSeconds(NamedTuple):
    """The parts of an optimizer step's time on one device, which add up."""

    forward: float
    backward: float
    exchange: float
    update: float
    overhead: float  # data and trainer


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
        update_share: share of the trained parameters that this process updates.
    """
    forward, backward = profile.micro_batch_seconds(work, batch)
    elements, tensors = update_share * work.trained_elements, update_share * work.trained_tensors
    return StepSeconds(
        forward=accumulation * forward,
        backward=accumulation * backward,
        exchange=exchange,
        update=profile.update_element_s * elements + profile.update_tensor_s * tensors,
        overhead=accumulation * profile.micro_batch_s + profile.step_s,
    )


def plan_clock(request: Request, *, link: bool = True, profile: DeviceProfile | None = None) -> Clock:
    """A clock that predicts the seconds of an optimizer step of a plan for a request.

    It goes by a `profile`, by default the one that plans count on. Without `link`, communication between
    processes takes no time. Where weights are sent for each micro-batch, the seconds are unknown if
    communication is.
    """
    facts, machine, processes = request.facts, request.machine, request.processes
    profile = profile or profile_of(machine, processes)
    work_of = work_of_request(request)
    inside = cache(lambda count: collectives_of(machine, count))
    collectives_with = cache(lambda replicas: collectives_of(machine, processes, replicas))

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        engine = engine_of(plan.sharing.engine)
        collectives = collectives_with(plan.sharing.replicas) if link else None
        sends = engine.shards_weights or plan.sharing.divides_tokens
        unknown = link and collectives is None and sends and processes > 1
        if profile is None or unknown:
            return None
        batch = mean_micro_batch(facts, plan)
        work = work_of(run, plan, batch.tokens)
        parts = step_seconds(
            work,
            profile,
            batch,
            accumulation=plan.batch.accumulation,
            exchange=_exchange(work, run, plan, collectives, inside(plan.sharing.sequence_ranks)),
            update_share=engine.update_share(plan.sharing.shards),
        )
        if plan.device == "cpu" or (not plan.sharing.offloads and not plan.offloads_activations):
            return sum(parts)
        if not plan.sharing.offloads:
            return _with_transfers(parts, work, plan, machine)
        return _offloaded(parts, work, plan, machine)

    return seconds


def _with_transfers(parts: StepSeconds, work: Work, plan: Plan, machine: Machine) -> float | None:
    """The time of a step whose layers are recomputed from inputs in RAM; None if the link is unknown.

    Copies are made beside the computation, by how much of which nobody has timed, so they are added in full.
    """
    link, copied = host_link(machine), sum(work.exchanged(TRANSFER).elements())
    # a copy counts as read and written, which is once over the link
    return sum(parts) + plan.batch.accumulation * copied / 2 / link if link else None


def _exchange(
    work: Work, run: RunConfig, plan: Plan, all_ranks: Collectives | None, group: Collectives | None
) -> float:
    """Seconds of all messages; `group` is what communication costs between those that divide tokens."""
    if all_ranks is None:
        return 0.0
    divided = (group or all_ranks).seconds(sequence_messages(work, plan))
    return divided + all_ranks.seconds(messages_of(work, run, plan))


def _offloaded(parts: StepSeconds, work: Work, plan: Plan, machine: Machine) -> float | None:
    """The time of a step whose weights come from RAM, and which the CPU updates; None if that is unknown.

    Copies are added in full, as if none of them overlapped with computation.
    """
    engine, here = engine_of(plan.sharing.engine), min(plan.sharing.world_size, len(machine.gpus))
    link, cpu = host_link(machine), profile_of(replace(machine, gpus=()), here)
    if link is None or cpu is None:
        return None
    share = engine.update_share(plan.sharing.shards)
    copied, summed = engine.moved_by_offload(work, plan.batch.accumulation)
    update = cpu.update_element_s * share * work.trained_elements
    update += cpu.update_tensor_s * share * work.trained_tensors
    # a copy counts as read and written, which is once over the link
    transfer = copied / 2 / link + float(cpu.elementwise.at(np.array(summed)) if summed else 0.0)
    return sum(parts) - parts.update + update + transfer


def work_of_request(request: Request) -> Callable[[RunConfig, Plan, float], Work]:
    """The work of a micro-batch of its plans."""
    threads = training_threads(request.machine, request.processes) or 1
    return work_of_plans(request.architecture, batches_of(request.architecture, request.facts), threads)


def batches_of(config: AnyArchitecture, facts: DataFacts) -> BatchesOf:
    """The function that the estimator and `work_of_plans` take."""
    return partial(facts.batches_of, hidden_size=Architecture.of(config).facts.hidden_size)


def mean_micro_batch(facts: DataFacts, plan: Plan) -> MicroBatch:
    """A micro-batch of average size; attention runs once per row if rows are joined."""
    tokens = facts.tokens_per_process(plan) / plan.batch.accumulation
    rows = tokens / facts.mean_tokens
    return MicroBatch(tokens, rows * facts.mean_squared_tokens, max(1.0, rows) if plan.rows.joined else 1.0)


def messages_of(work: Work, run: RunConfig, plan: Plan) -> tuple[Message, ...]:
    """What the processes of a plan exchange in an optimizer step."""
    element_bytes = StepSpec.of(run, plan).trained_element_bytes
    return engine_of(plan.sharing.engine).messages(work, element_bytes, plan)


def sequence_messages(work: Work, plan: Plan) -> tuple[Message, ...]:
    """What processes that divide the tokens of a micro-batch exchange for attention in an optimizer step."""
    return tuple(
        Message("all_to_all", size, plan.batch.accumulation * times)
        for size, times in work.exchanged(ALL_TO_ALL).items()
    )


def sent_bytes(exchanged: Iterable[Message], processes: int, replicas: int = 1) -> int:
    """Bytes that each process sends to others, by ring algorithms; replicas reduce gradients among them."""
    rings = dict.fromkeys(ROUNDS, processes // replicas) | ({"all_reduce": replicas} if replicas > 1 else {})
    sent = (
        ROUNDS[one.kind] * one.tensor_bytes * one.times * (rings[one.kind] - 1) / rings[one.kind]
        for one in exchanged
    )
    return round(sum(sent))

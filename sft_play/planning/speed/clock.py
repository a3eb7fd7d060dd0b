"""Predicts how long an optimizer step of a plan takes, and what its processes exchange.

The times of all operations of a traced step are added up, as the device's profile gives them. Communication
between processes is added in full, as if none of it overlapped with computation. On GPUs some of it does, but
dividing a model has made published steps longer by more than this (benchmarks/evidence/overlap.py): links are
slower than in data sheets, and computation is, while they are in use. Where a link may be one or another, the
slower one counts; `with_range` says what the other end would be. Processes wait for the one that has most
tokens, so its tokens count. Units: seconds, bytes.
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
from sft_play.machine.links import DISK, host_link, links_of, rate_of
from sft_play.plan import EARLIER, Clock, Plan
from sft_play.planning.budget import training_threads
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.search.less_sent import at_worst
from sft_play.planning.speed.devices import ROUNDS, Collectives, collectives_of, profile_of
from sft_play.planning.speed.profile import DeviceProfile, MicroBatch
from sft_play.sizing.estimate.estimator import BatchesOf, work_of_plans
from sft_play.sizing.facts.architecture import AnyArchitecture, Architecture
from sft_play.sizing.step import StepSpec
from sft_play.work import ALL_TO_ALL, TRANSFER, Work, fused

ONE_NUMBER = 0.02  # a range that is narrower is not worth a word
OVERLAP = "communication beside computation, or between its parts"


class StepSeconds(NamedTuple):
    """The parts of an optimizer step's time on one device, which add up."""

    forward: float
    backward: float
    exchange: float
    update: float
    overhead: float  # data and trainer
    copies: float = 0.0  # between GPU and RAM

    def overlapped(self, exchange: float) -> float:
        """Their sum if so many seconds of communication, and all copies, go on beside the passes."""
        return sum(self) - min(exchange + self.copies, self.forward + self.backward)


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


def plan_clock(
    request: Request,
    *,
    link: bool = True,
    best: bool = False,
    exchanged: bool = True,
    profile: DeviceProfile | None = None,
) -> Clock:
    """A clock that predicts the seconds of an optimizer step of a plan for a request.

    It goes by a `profile`, by default the one that plans count on.
    Without `link`, communication between processes takes no time. Where weights are sent for each
    micro-batch, the seconds are unknown if communication is. At `best`, links are as fast as they can be, and
    communication that was not measured goes on beside computation, as copies to and from RAM do. Without
    gradients that are `exchanged`, it is the least that a step can take whose weights are divided, and takes
    no trace of one whose gradients wait.
    """
    facts, machine, processes = request.facts, request.machine, request.processes
    profile = profile or profile_of(machine, processes)
    work_of, hidden_size = work_of_request(request), request.architecture.facts.hidden_size
    inside = cache(lambda count: collectives_of(machine, count, best=best))
    collectives_with = cache(lambda replicas: collectives_of(machine, processes, replicas, best=best))

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        engine = engine_of(plan.sharing.engine)
        collectives = collectives_with(plan.sharing.replicas) if link else None
        sends = engine.shards_weights or plan.sharing.sequence_parallel
        unknown = link and collectives is None and sends and processes > 1
        if profile is None or unknown:
            return None
        share = facts.busiest_share(plan, hidden_size)
        batch = mean_micro_batch(facts, plan, share)
        if not exchanged:
            plan = replace(plan, sharing=replace(plan.sharing, defers_exchange=False))
        work = work_of(run, plan, batch.tokens)
        work = work if exchanged else work.unexchanged()
        if plan.kernels.compiled and plan.device == "cuda":  # on a CPU, compiled layers were no faster
            work = fused(work)
        exchange = _exchange(work, run, plan, collectives, inside(plan.sharing.sequence_ranks))
        parts = step_seconds(
            work,
            profile,
            batch,
            accumulation=plan.batch.accumulation,
            exchange=exchange,
            update_share=engine.update_share(plan.sharing.shards),
        )
        if plan.device == "cuda" and (plan.sharing.offloads or plan.offloads_activations):
            parts = _copying(parts, work, run, plan, machine, best=best)
        hidden = 0.0 if collectives and collectives.measured else exchange
        return parts.overlapped(hidden) if best and plan.device == "cuda" else sum(parts)

    return _asked_once(seconds)


def _asked_once(clock: Clock) -> Clock:
    """The same clock, which looks at each plan once; a search asks for most of them several times."""
    known: dict[tuple[int, Plan], tuple[RunConfig, float | None]] = {}

    def seconds(run: RunConfig, plan: Plan) -> float | None:
        key = id(run), replace(plan, memory=None, step_seconds=None, why=(), alternatives=())
        if key not in known:
            known[key] = run, clock(run, plan)  # a run that is kept shares its id with no other
        return known[key][1]

    return seconds


def _copying(
    parts: StepSeconds, work: Work, run: RunConfig, plan: Plan, machine: Machine, *, best: bool
) -> StepSeconds:
    """The parts of a step with inputs of layers, or weights that the CPU updates, in RAM or on a disk."""
    accumulation, engine, update = plan.batch.accumulation, engine_of(plan.sharing.engine), parts.update
    if plan.sharing.offloads:
        copied, summed = engine.moved_by_offload(work, accumulation)
        update = _update_by_cpu(work, run, plan, machine, summed, best=best)
    else:
        copied = accumulation * sum(work.exchanged(TRANSFER).elements())
    # a copy counts as read and written, which is once over the link
    copies = copied / 2 / rate_of(host_link(machine), best)
    return StepSeconds(parts.forward, parts.backward, parts.exchange, update, parts.overhead, copies)


def _update_by_cpu(
    work: Work, run: RunConfig, plan: Plan, machine: Machine, summed: float, *, best: bool
) -> float:
    """Seconds in which the CPU adds up so many bytes of gradients, and updates what may be on a disk."""
    engine, here = engine_of(plan.sharing.engine), min(plan.sharing.world_size, len(machine.gpus))
    cpu, share = profile_of(replace(machine, gpus=()), here), engine.update_share(plan.sharing.shards)
    assert cpu  # of a CPU at least as assumed
    update = cpu.update_element_s * share * work.trained_elements
    update += cpu.update_tensor_s * share * work.trained_tensors
    update += float(cpu.elementwise.at(np.array(summed)) if summed else 0.0)
    if run.parallel.nvme_path:  # the processes of a machine share the disk
        moved = engine.moved_by_disk(work, plan.batch.accumulation, share)
        update += here * moved / rate_of(DISK, best)
    return update


def _exchange(
    work: Work, run: RunConfig, plan: Plan, all_ranks: Collectives | None, group: Collectives | None
) -> float:
    """Seconds of all messages; `group` is what communication costs between those that divide tokens."""
    if all_ranks is None:
        return 0.0
    divided = (group or all_ranks).seconds(sequence_messages(work, plan))
    return divided + all_ranks.seconds(messages_of(work, run, plan))


def with_range(request: Request, plan: Plan) -> Plan:
    """The plan with the least and the most that its step may take, and what decides between them.

    The least is over the fastest links that there may be, beside computation; the most is what divided
    weights may add besides (`at_worst`). What an earlier run or the first one measured is one number.
    """
    if plan.step_seconds is None:
        return plan
    least = most = plan.step_seconds
    predicted = plan.step_seconds_origin != EARLIER and plan.device == "cuda"
    links, copies = (_unknown_links(request, plan), _unknown_copies(request, plan)) if predicted else ([], [])
    if links or copies:
        least = plan_clock(request, best=True)(request.config, plan) or least
    if links:
        most = at_worst(lambda one: one.step_seconds)(plan) or most
    reason: str | None = "; ".join(dict.fromkeys([*links, *copies]))
    if most - least < ONE_NUMBER * most:
        least, most, reason = plan.step_seconds, plan.step_seconds, None
    return replace(plan, step_seconds_range=(least, most), step_seconds_range_reason=reason)


def _unknown_links(request: Request, plan: Plan) -> list[str]:
    """What decides about the seconds of communication between GPUs; nothing that was measured."""
    machine, processes, replicas = request.machine, request.processes, plan.sharing.replicas
    collectives = collectives_of(machine, processes, replicas)
    if plan.sharing.world_size == 1 or (collectives and collectives.measured):
        return []
    links = links_of(machine, processes, replicas)
    return [link.either for link in links if link.either] or [OVERLAP]


def _unknown_copies(request: Request, plan: Plan) -> list[str]:
    """What decides about the seconds of copies to and from RAM and a disk."""
    if not (plan.sharing.offloads or plan.offloads_activations):
        return []
    found = [host_link(request.machine).either or "copies beside computation, or between its parts"]
    return [*found, *[DISK.either] * bool(plan.sharing.offloads and request.config.parallel.nvme_path)]


def work_of_request(request: Request) -> Callable[[RunConfig, Plan, float], Work]:
    """The work of a micro-batch of its plans."""
    threads = training_threads(request.machine, request.processes) or 1
    return work_of_plans(request.architecture, batches_of(request.architecture, request.facts), threads)


def batches_of(config: AnyArchitecture, facts: DataFacts) -> BatchesOf:
    """The function that the estimator and `work_of_plans` take."""
    architecture = Architecture.of(config)
    return partial(facts.batches_of, hidden_size=architecture.facts.hidden_size)


def mean_micro_batch(facts: DataFacts, plan: Plan, share: float = 1.0) -> MicroBatch:
    """A micro-batch of average size, or of a process with so many times as many tokens as an average one.

    Attention runs once per row if rows are joined.
    """
    tokens = share * facts.tokens_per_process(plan) / plan.batch.accumulation
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

"""Predicts the time of a plan from the operations of a trace and their cost in the device's profile."""

from functools import partial

from sft_play.machine.gpus import Machine
from sft_play.plan import Clock, Plan
from sft_play.planning.clock import clock
from sft_play.planning.devices import device_speed
from sft_play.planning.facts import DataFacts
from sft_play.planning.profile import MicroBatch
from sft_play.planning.profiles import collectives_of, profile_of
from sft_play.reasons import Communication, ProfileSource, Reason
from sft_play.sizing.architecture import AnyArchitecture
from sft_play.sizing.estimator import work_of_plans


def mean_micro_batch(facts: DataFacts, plan: Plan) -> MicroBatch:
    """A micro-batch of average size; attention runs once per row if rows are joined."""
    tokens = facts.tokens_per_process(plan) / plan.gradient_accumulation_steps
    rows = tokens / facts.mean_tokens
    return MicroBatch(tokens, rows * facts.mean_squared_tokens, max(1.0, rows) if plan.padding_free else 1.0)


def profile_reasons(machine: Machine, processes: int) -> list[Reason]:
    """Where predicted seconds come from."""
    speed = device_speed(machine, processes)
    profile = profile_of(machine, speed, processes)
    if profile is None:
        return []
    found: list[Reason] = [ProfileSource(profile.device, profile.source)]
    if processes > 1:
        collectives = collectives_of(machine, speed, processes)
        measured = collectives is not None and collectives.measured
        link = speed.link_bandwidth if collectives else None
        found.append(Communication(processes, measured, link, not machine.what_if))
    return found


def plan_clock(
    config: AnyArchitecture, facts: DataFacts, machine: Machine, processes: int, *, link: bool = True
) -> Clock:
    """A clock that predicts the seconds of an optimizer step of a plan on this machine.

    Args:
        config: the architecture.
        facts: of the training rows.
        machine: that it runs on.
        processes: number of processes that share it.
        link: whether communication between processes takes time.
    """
    speed = device_speed(machine, processes)
    return clock(
        work_of_plans(config, facts.eval_shape),
        profile_of(machine, speed, processes),
        partial(mean_micro_batch, facts),
        collectives_of(machine, speed, processes) if link else None,
    )

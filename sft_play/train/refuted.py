"""What the seconds of a real step say of the profile by which the plan was chosen.

A profile can lie by orders of magnitude where no data sheet contradicts it. The first real step does: then
the data sheet's figures, in proportion to that step, choose again, and the next run measures the device.
"""

from dataclasses import replace
from typing import NamedTuple

from sft_play.job import Job, find_plan, request_of
from sft_play.plan import PROBED, PROFILED, Plan
from sft_play.planning.speed.clock import plan_clock
from sft_play.planning.speed.devices import derived_profile, forget_profile
from sft_play.planning.speed.measured_speed import Timing
from sft_play.sizing.estimate.corrections import ProbeResult
from sft_play.train.speeds import keep_times
from sft_play.units import format_duration

# Times that a step takes longer, or less long, than predicted. Limits of power and slices of a GPU make half
# or a third of its rates, and plans that are compared differ by less.
REFUTED = 5.0
NOTABLE_S = 60.0  # over the whole run; by less, nobody plans otherwise, and short steps vary


class Again(NamedTuple):
    """What rank 0 makes of a prediction that was refuted."""

    plan: Plan  # the same, with the seconds that were measured
    other: Plan | None  # the one to have instead, if its step takes as long as it should


def is_refuted(plan: Plan, seconds: float | None) -> bool:
    """Whether a step that took so long contradicts what the device's profile predicted for it."""
    predicted = plan.step_seconds
    if not predicted or not seconds or plan.step_seconds_origin != PROFILED:
        return False
    over_the_run = abs(predicted - seconds) * plan.schedule.total_steps
    return times_off(predicted, seconds) >= REFUTED and over_the_run >= NOTABLE_S


def times_off(predicted: float, measured: float) -> float:
    """How many times too high or too low a prediction is."""
    return max(predicted / measured, measured / predicted)


def choose_again(job: Job, result: ProbeResult, cost: float) -> Again:
    """The plan that is fastest by other figures than those that were refuted, for the main rank alone.

    Another one is worth it if the run gains more seconds by it than the `cost` of a probe.
    """
    seconds, plan = result.step_seconds, job.plan
    assert seconds and result.seconds_per_token and plan.step_seconds
    said = f"a step took {format_duration(seconds)}, not {format_duration(plan.step_seconds)} as predicted"
    known = replace(as_probed(plan, seconds), why=(*plan.why, said))
    by_sheet = forget_if_wrong(job, seconds)
    if by_sheet is None:
        return Again(known, None)
    known = replace(known, profile_seconds=by_sheet, refuted_seconds=plan.step_seconds)
    keep_times(job, Timing.of(known, seconds, result.seconds_per_token))  # by which the next one is corrected
    other = find_plan(job, lambda draft: True)
    if other is None or not other.step_seconds:
        return Again(known, None)
    gained = (seconds - other.step_seconds) * plan.schedule.total_steps
    if gained <= cost:
        return Again(known, None)
    why = (*other.why, f"chosen again, since with another plan {said}")
    return Again(known, replace(other, why=why, refuted_seconds=plan.step_seconds))


def as_probed(plan: Plan, seconds: float | None) -> Plan:
    """The plan whose seconds are those that its probe measured."""
    known = (seconds, seconds) if seconds else None
    plan = replace(plan, step_seconds_range=known, step_seconds_range_reason=None)
    return replace(plan, step_seconds=seconds, step_seconds_origin=PROBED)


def forget_if_wrong(job: Job, seconds: float) -> float | None:
    """Forgets the profile if the data sheet predicts such steps far better; returns what that predicts."""
    plan = job.plan
    assert plan.step_seconds
    sheet = derived_profile(job.machine, plan.sharing.world_size)
    by_sheet = plan_clock(request_of(job), profile=sheet)(job.config, plan) if sheet else None
    if by_sheet is None or REFUTED * times_off(by_sheet, seconds) > times_off(plan.step_seconds, seconds):
        return None
    forget_profile(job.machine, plan.sharing.world_size)
    return by_sheet

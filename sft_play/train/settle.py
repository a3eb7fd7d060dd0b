"""Settles the plan by probing: it is kept, or all ranks switch together to another one that was measured."""

import math
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sft_play.choices.kernels import COMPILED, LAYERS
from sft_play.errors import DoesNotFitError
from sft_play.job import Job, find_plan, takes_less
from sft_play.plan import PROBED, Plan
from sft_play.planning.speed.measured_speed import Timing, read_speed
from sft_play.report.memory import probe_line
from sft_play.report.tables import step_line
from sft_play.sizing.estimate.corrections import ProbeResult
from sft_play.start import part
from sft_play.train.checkpoints import step_of
from sft_play.train.kernel_turns import both_forwards, require_same_results, switch, timed_kernels
from sft_play.train.probe import memory_advice, probe
from sft_play.train.ranks import all_agree, from_main
from sft_play.train.refuted import as_probed, choose_again, is_refuted
from sft_play.train.session import Session, close_session, prepare_session
from sft_play.train.speeds import keep_times, speed_file
from sft_play.ui.console import console, warn
from sft_play.units import format_bytes, format_duration

SEARCH_SECONDS = 60.0  # with train.probe=search
WORTH_SPENDING = 0.02  # of the expected training time
RIVAL = 0.8  # of the chosen plan's predicted speed; slower plans are not timed
RIVALS = 2  # plans that are timed of those that differ from the chosen one in their micro-batch alone


def settle_plan(session: Session) -> tuple[Session, ProbeResult | None]:
    """A session whose plan was measured to fit, and the probe result.

    If the plan is over budget, one smaller plan is tried. Plans that are predicted to be about as fast are
    timed as well if the run is long enough to be worth it, because time is predicted less accurately than
    memory. Probe results are stored, so that the next run starts at once.

    Raises:
        DoesNotFitError: the smaller plan does not fit either, or the config allows none.
        ConfigError: compiled layers compute something else than plain ones.
        LaunchError: the ranks do not agree.
    """
    setting = session.job.config.train.probe
    if setting is False:
        return session, None
    began = time.monotonic()
    result = _probe_and_print(session)
    if not result.fits(session.job.plan):
        session = prepare_session(close_session(session, _smaller_plan(session, result)))
        result = _probe_and_print(session)
        if not result.fits(session.job.plan):
            plan = session.job.plan
            raise DoesNotFitError(f"{_too_much(plan, result)}\n{memory_advice(plan)}")
        _keep_results(session.job, (session.job.plan, result))
        require_same_results(session)
        return session, result
    worth_spending = WORTH_SPENDING * (result.step_seconds or 0.0) * session.job.plan.schedule.total_steps
    allowance = SEARCH_SECONDS if setting == "search" else worth_spending
    cost, better = time.monotonic() - began, None
    if is_refuted(session.job.plan, result.step_seconds):
        session, better = _chosen_again(session, result, cost)
    searched = time.monotonic()
    session, result = _fastest_by_measurement(session, result, allowance, cost, better)
    require_same_results(session)
    return _with_fastest_kernels(session, result, allowance - (time.monotonic() - searched))


def _with_fastest_kernels(
    session: Session, result: ProbeResult, allowance: float
) -> tuple[Session, ProbeResult]:
    """The session with the kernels that are faster here, if some are and it fits with them."""
    before, plan = session.job.plan, timed_kernels(session, result, allowance)
    if plan is None:
        return session, result
    if plan.kernels.compiled:  # a model that is loaded anew would be compiled anew
        model: Any = session.trainer.model
        switch(both_forwards(model, COMPILED.name, before.kernels.layers)[1])
        session = _with_plan(session, plan)
    else:
        session = prepare_session(close_session(session, plan), announce=False)
    found = _probe_and_print(session)
    if not found.fits(plan):
        setting = COMPILED.setting if plan.kernels.compiled else LAYERS[plan.kernels.layers].setting
        warn(f"{_too_much(plan, found)} with {setting}; the kernels stay as they were")
        return prepare_session(close_session(session, before), announce=False), result
    _keep_results(session.job, (plan, found))
    return _with_plan(session, as_probed(plan, found.step_seconds)), found


def _chosen_again(session: Session, result: ProbeResult, cost: float) -> tuple[Session, Plan | None]:
    """The session, which knows how long steps take, and a plan that should be faster, if there is one."""
    job, wrong = session.job, session.job.plan.step_seconds
    plan, better = from_main(lambda: choose_again(job, result, cost))
    said = step_line(wrong, result.step_seconds, refuted=plan.refuted_seconds)
    warn(f"the step {said}" + (f"; chosen again: {better.why[0]}" if better else "; the plan stays"))
    return _with_plan(session, plan), better


def _with_plan(session: Session, plan: Plan) -> Session:
    """The session, as one of a plan that computes as it does."""
    return replace(session, job=replace(session.job, plan=plan))


def _keep_results(job: Job, *probed: tuple[Plan, ProbeResult]) -> None:
    """As `keep_times`, of probes, as far as they came to an end."""
    times = [
        Timing.of(plan, result.step_seconds, result.seconds_per_token)
        for plan, result in probed
        if result.seconds_per_token is not None
    ]
    keep_times(job, *times)


def _probe_and_print(session: Session) -> ProbeResult:
    with part("probe"):
        result = probe(session)
    job = session.job
    done = step_of(job.checkpoint) if job.checkpoint else None
    line = probe_line(job.plan.to_json(), asdict(result), done or 0)
    console().print(f"  {line}")
    return result


def _too_much(plan: Plan, result: ProbeResult) -> str:
    measured = None if plan.memory is None else result.budgeted_bytes(plan.memory)
    if result.ran_out or measured is None or plan.memory is None:
        return f"micro-batch {plan.batch.micro} does not fit: memory ran out in the probe"
    return (
        f"micro-batch {plan.batch.micro} does not fit: the probe measured {format_bytes(measured)}, "
        f"the budget is {format_bytes(plan.memory.budget_bytes)}"
    )


def _smaller_plan(session: Session, result: ProbeResult) -> Plan:
    """A plan that needs less memory, with the same effective batch and engine; rank 0 makes it for all."""
    job, plan = session.job, session.job.plan
    found, problem = from_main(lambda: find_plan(job, takes_less(plan))), _too_much(plan, result)
    if found is None:
        raise DoesNotFitError(f"{problem}, and the config allows no smaller plan\n{memory_advice(plan)}")
    warn(f"{problem}; planned again: {found.why[0]}")
    return replace(found, why=(*found.why, f"chosen because {problem}"))


def _fastest_by_measurement(
    session: Session, result: ProbeResult, allowance: float, cost: float, better: Plan | None
) -> tuple[Session, ProbeResult]:
    """Times the plans that may be faster, one after the other, and continues with the fastest.

    The allowance is in seconds, for all of them, and so is the cost of one, as the first one took. Timing a
    plan is not cut short. A plan that was chosen again is timed in any case, and alone.
    """
    job, began, spent = session.job, time.monotonic(), 0.0
    timed = [(job.plan, result)]
    worth_it = all_agree(result.step_seconds is not None and cost <= allowance)
    rivals = [better] if better else from_main(lambda: _plans_to_time(job)) if worth_it else []
    for number, other in enumerate(rivals):
        if not better and not all_agree(spent + cost <= allowance):
            break
        if number == 0 and not better:
            console().print(f"  timing other plans, for at most {format_duration(allowance)}")
        session = prepare_session(close_session(session, other), announce=False)
        found = probe(session)
        seconds = found.step_seconds if found.fits(other) else None
        said = "does not fit" if seconds is None else f"{format_duration(seconds)} per step"
        tried = f"micro-batch {other.batch.micro}, activations {other.activations.words}"
        console().print(f"  tried {tried}: {said}", style="dim")
        if seconds is not None:
            timed.append((other, found))
        spent = time.monotonic() - began
    timed.sort(key=lambda each: each[1].step_seconds or math.inf)
    _keep_results(job, *timed)
    plan, result = timed[0]
    if session.job.plan != plan:
        session = prepare_session(close_session(session, plan), announce=False)
    if plan.refuted_seconds:
        session = _with_plan(session, as_probed(plan, result.step_seconds))
    return session, result


def _plans_to_time(job: Job) -> list[Plan]:
    """Plans of this engine that fit, should be about as fast and were not timed lately; best first."""
    found, now, speed = [], time.time(), read_speed(speed_file(job))
    for split in _worth_timing(job):
        plan = find_plan(job, partial(_is_split, split))  # as the probe may have corrected it
        if plan is not None and not speed.timed_lately(plan, now):
            found.append(plan)
    return found


def _is_split(split: tuple[int, bool], plan: Plan) -> bool:
    return (plan.batch.accumulation, plan.activations.recomputes) == split


def _worth_timing(job: Job) -> list[tuple[int, bool]]:
    """Accumulation and checkpointing of plans that may be faster than predicted; best first.

    Recomputing activations where they fit only costs time, so such plans are left out.
    """
    plan = job.plan  # if its seconds were refuted, those of others say nothing
    everything = job.config.train.probe == "search" or plan.step_seconds_origin == PROBED
    slowest = 0.0 if everything else RIVAL
    close = [
        (row["gradient_accumulation_steps"], row["gradient_checkpointing"])
        for row in plan.alternatives
        if row["fits"] and row["engine"] == plan.sharing.engine and (row["relative_speed"] or 1) >= slowest
    ]
    chosen = plan.batch.accumulation, plan.activations.recomputes
    fitting = {accumulation for accumulation, checkpointing in [*close, chosen] if not checkpointing}
    close = [split for split in close if not (split[1] and split[0] in fitting)]
    alike = [split for split in close if split[1] == plan.activations.recomputes and split != chosen]
    return [split for split in close if split not in alike[RIVALS:]]

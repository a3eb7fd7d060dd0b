"""The same run by the other methods, and with weights in RAM: a plan that fits, found in few traces.

It is not the fastest one, whose search would take as long again as that of the plan which was asked for.
What is held throughout and alone exceeds the memory takes no trace at all.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.errors import ConfigError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import what_if
from sft_play.machine.prices import price_of
from sft_play.parts import flat
from sft_play.plan import Plan
from sft_play.planning.allowed import candidates, estimator_of
from sft_play.planning.answers.other_machines import COUNTS, cost_at, gpu_hours, run_hours
from sft_play.planning.candidates.weights_alone import held_bytes
from sft_play.planning.request import Request
from sft_play.planning.speed.clock import plan_clock, with_range

NONE = (ConfigError, DoesNotFitError, UntraceableModel)  # what there is no plan for


def other_methods(request: Request, chosen: Plan, *, fewer: bool) -> list[dict[str, Any]]:
    """A row for each method: `plan_row` of a plan that fits, of the chosen one, or `fits` is false.

    `fewer` says whether fewer GPUs may do for another method, since nobody said how many there are.
    """
    counts = [count for count in COUNTS if count < request.processes] if fewer else []
    rows = []
    for mode in METHODS:
        plan: Plan | None = chosen
        if mode != request.config.tuning.mode:
            try:
                run = request.changed({"tuning.mode": mode})
                places = [*(run.on_gpus(count) for count in counts), run]
                found = (plan_like(each.with_offload("none"), chosen) for each in places)
                plan = next(filter(None, found), None) or plan_in_ram(run)
            except NONE:  # also where settings contradict the method
                continue
        rows.append({"method": mode, "fits": plan is not None} | (plan_row(request, plan) if plan else {}))
    return rows


def cheapest_ways(
    request: Request, modes: Sequence[str], cards: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each method the fewest GPUs of a table, of these the smallest; and the smallest one with RAM.

    Where the user has set prices, what costs least of the GPUs that have one. `cards` are rows with `gpu`,
    its `total_bytes`, and `plans` as `plans_by_mode` gives them.

    Returns:
        Rows of such plans with `method`, `gpu` and its `total_bytes`; none for a method that fits nowhere.
    """
    rows = list[dict[str, Any]]()
    by_size = sorted(cards, key=lambda card: card["total_bytes"])
    for mode in modes:
        smaller = by_size
        fitting = [card for card in by_size if "problem" not in card["plans"][mode]]
        if fitting:
            priced = [card for card in fitting if _price(card, mode) is not None]
            best = min(priced or fitting, key=lambda card: (_price(card, mode) or 0, _gpus(card, mode)))
            rows.append(_way(mode, best, best["plans"][mode]))
            if _gpus(best, mode) == 1:
                smaller = by_size[: by_size.index(best)]
        run = request.changed({"tuning.mode": mode})
        for card in smaller:
            with suppress(*NONE):
                one = replace(run, machine=what_if(card["gpu"])).on_gpus(1)
                if plan := plan_in_ram(one):
                    rows.append(_way(mode, card, plan_row(one, plan)))
                    break
    return rows


def _price(card: Mapping[str, Any], mode: str) -> float | None:
    """Of the run on such GPUs, of which its number of rows may be assumed; None if it is unknown."""
    price, plan = price_of(card["gpu"]), card["plans"][mode]
    return cost_at(price, plan["hours"] and plan["hours"] * plan["gpus"])


def _gpus(card: Mapping[str, Any], mode: str) -> int:
    return int(card["plans"][mode]["gpus"])


def _way(mode: str, card: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    return {"method": mode, "gpu": card["gpu"], "total_bytes": card["total_bytes"], **plan}


def plan_row(request: Request, plan: Plan) -> dict[str, Any]:
    """The key numbers of a plan whose memory is known."""
    assert plan.memory
    spent = gpu_hours(plan) if request.facts.seen else None
    return {
        "gpus": plan.sharing.world_size,
        "engine": plan.sharing.engine,
        "replicas": plan.sharing.replicas,
        "offload": plan.sharing.offload,
        "micro_batch_size": plan.batch.micro,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "gradient_checkpointing": plan.activations.recomputes,
        **flat(plan.activations),
        "process_bytes": plan.memory.process_bytes,
        "ram_bytes": plan.memory.host.needed_bytes if plan.memory.host else None,
        "tokens_per_second": request.facts.tokens_per_second(plan),
        "step_seconds": plan.step_seconds,
        "step_seconds_range": plan.step_seconds_range,
        "step_seconds_range_reason": plan.step_seconds_range_reason,
        "hours": run_hours(plan),
        "cost": cost_at(price_of(request.machine.gpus[0].name), spent),
    }


def plan_like(request: Request, other: Plan) -> Plan | None:
    """A plan that fits with the micro-batch of another one, or with the smallest; None if none was found.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        UntraceableModel: nothing tells its memory.
    """
    drafts = _without_last_resorts(request, candidates(request))
    least = min((draft.batch.micro for draft in drafts), default=1)
    return _first_that_fits(request, drafts, [other.batch.micro, least])


def plan_in_ram(request: Request) -> Plan | None:
    """A plan with weights, gradients and states in RAM, if the config leaves that open; errors as above.

    Large micro-batches come first, since weights are copied for each of them.
    """
    run = request.with_offload("ram")
    if run.config.parallel.offload != "ram":
        return None
    drafts = _without_last_resorts(run, candidates(run))
    drafts = [draft for draft in drafts if draft.activations.recomputes] or drafts
    sizes = sorted({draft.batch.micro for draft in drafts}, reverse=True)
    return _first_that_fits(run, drafts, [*sizes[::2], *sizes[-1:]])


def _without_last_resorts(request: Request, drafts: list[Plan]) -> list[Plan]:
    """The drafts without activations in RAM and MLPs in tiles, unless the config asks for these."""
    if request.config.train.asked_activations != "auto" or request.config.train.asks_tiles:
        return drafts
    ways = [(draft, draft.activations) for draft in drafts]
    return [draft for draft, way in ways if way.policy != "offload" and not way.in_tiles]


def _first_that_fits(request: Request, drafts: list[Plan], sizes: Sequence[int]) -> Plan | None:
    """The first draft that fits: engine by engine, by micro-batch in this order, kept activations first."""
    if (budget := request.budget) is None:
        return None
    config, estimate, seconds = request.config, estimator_of(request), plan_clock(request)
    engines = list(dict.fromkeys(map(_engine, drafts)))
    wanted = [draft for draft in drafts if draft.batch.micro in sizes]
    wanted.sort(key=lambda draft: (engines.index(_engine(draft)), sizes.index(draft.batch.micro)))
    for draft in wanted:
        held = 0 if draft.sharing.offloads else held_bytes(config, request.architecture, draft)
        if held > budget.budget_bytes:
            continue
        memory = estimate(config, draft, complete=True)
        if memory.fits:
            sized = replace(draft, memory=memory, step_seconds=seconds(config, draft))
            return with_range(request, sized)
    return None


def _engine(draft: Plan) -> tuple[str, int]:
    return draft.sharing.engine, draft.sharing.replicas

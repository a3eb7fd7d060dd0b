"""The plan of a request, and whether its tokens are divided among groups of processes.

Groups wait for each other in every layer, so rows stay whole that fit on the devices whole. Where they do
not, or only with a last resort (MLPs in tiles, RAM), the predicted seconds decide how large groups are.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DoesNotFitError, UntraceableModel
from sft_play.plan import Plan
from sft_play.planning.allowed import allowed_plans, candidates, leanest_memories, traced_estimator
from sft_play.planning.budget import memory_reasons
from sft_play.planning.candidates.drafts import draft_reasons
from sft_play.planning.candidates.sequence import group_sizes
from sft_play.planning.candidates.weights_alone import not_too_large
from sft_play.planning.explain import also_trained, profile_reasons, step_reasons, waiting_reasons
from sft_play.planning.request import Request
from sft_play.planning.search.choice import TIE, choose_plan
from sft_play.planning.speed.clock import plan_clock, with_range
from sft_play.planning.speed.devices import profile_of
from sft_play.planning.speed.measured_speed import corrected_clock, speeds_of
from sft_play.reasons.choices import sequence_parallel
from sft_play.reasons.evidence import assumed_rows, unknown_free_memory
from sft_play.sizing.estimate.corrections import corrected_estimator, records_of

BY_TOKENS = ("activations", "loss", "temporaries")  # terms of a peak that divided tokens make smaller
Accept = Callable[[Plan], bool]


def every(draft: Plan) -> bool:
    """Accepts each plan."""
    return True


def fastest_plan(request: Request, accept: Accept = every, *, explain: bool = True) -> Plan:
    """The fastest plan that fits.

    Tokens are divided if nothing else fits, or if a last resort would take longer; not if the config says how
    large groups are, or the accumulation, which grows with them.

    Args:
        request: what is to be planned.
        accept: which of the plans that the config allows are considered.
        explain: as in `choose_plan`.

    Raises:
        ConfigError: settings contradict each other, the model or the machine.
        DoesNotFitError: nothing fits.
    """
    found, ruled_out = list[Plan](), False
    problem: DoesNotFitError | None = None

    def planned(each: Request) -> Plan:
        return _with_these_groups(each, accept, explain=explain)

    try:
        found.append(planned(request))
    except DoesNotFitError as error:
        problem = error
    with suppress(ConfigError, UntraceableModel):  # groups are refused for what the model or the config is
        ruled_out = _add_larger_groups(found, request, accept, planned)
    if not found:
        assert problem
        raise problem
    chosen = _fastest(found)
    if (
        found == [chosen]
        and chosen.sharing.sequence_ranks == request.config.parallel.sequence_ranks
        and not ruled_out
    ):
        return chosen
    slower = [
        (plan.sharing.sequence_ranks, plan.step_seconds / chosen.step_seconds)
        for plan in found
        if plan is not chosen and plan.step_seconds and chosen.step_seconds
    ]
    reason = sequence_parallel(chosen.sharing.sequence_ranks, slower, ruled_out)
    return replace(chosen, why=(*chosen.why, reason))


def _with_these_groups(request: Request, accept: Accept, *, explain: bool) -> Plan:
    """The fastest plan whose groups are as large as the config says; else rows stay whole."""
    config, architecture, facts, device = request.config, request.architecture, request.facts, request.device
    allowed, of_rows = allowed_plans(request)
    if not (drafts := [draft for draft in allowed if accept(draft)]):
        raise DoesNotFitError("the config allows no other plan")
    more = [*also_trained(request), *of_rows]
    more += [] if facts.seen else [assumed_rows(len(facts.lengths), facts.longest_row)]
    if (budget := request.budget) is None:
        plan, why = choose_plan(config, drafts, None, None)
        found = [unknown_free_memory(device.name)]
    else:
        machine, processes = request.machine, request.processes
        drafts, too_large = not_too_large(config, architecture, drafts, budget.budget_bytes)
        more += [*too_large, *memory_reasons(config, machine, processes, budget)]
        seconds, predict = plan_clock(request), traced_estimator(request, budget)
        least = plan_clock(request, exchanged=False)
        record_of = records_of(architecture.text, device.name)
        speed_of = speeds_of(architecture.text, device.name, profile_of(machine, processes))
        memory_of = corrected_estimator(predict, record_of)
        tokens_of = facts.tokens_per_process
        time_of, least_of = (corrected_clock(each, speed_of, tokens_of) for each in (seconds, least))
        layers = len(architecture.modules.layer_kinds)
        try:
            plan, why = choose_plan(
                config, drafts, memory_of, time_of, least_of, explain=explain, layers=layers
            )
            plan = with_range(request, speed_of(config, plan).labelled(plan, seconds(config, plan)))
            more += waiting_reasons(request, plan)
            more += profile_reasons(machine, processes, plan.step_seconds_origin, plan.sharing.replicas)
            found = step_reasons(request, plan, record_of(config, plan), predict if explain else None)
        except UntraceableModel as error:
            plan, why = choose_plan(config, drafts, None, None)
            found = [str(error).splitlines()[0]]
    return replace(plan, why=(*why, *draft_reasons(config, device, plan), *found, *more))


def _add_larger_groups(
    found: list[Plan], request: Request, accept: Accept, planned: Callable[[Request], Plan]
) -> bool:
    """Adds plans of larger and larger groups to those found, as long as they may be the fastest.

    True: it ended because no larger groups can be.
    """
    config, sizes = request.config, sizes_of_groups(request)
    if not sizes or (found and not _saves_memory(config, found[0])):
        return False
    if not groups_may_help(request.with_offload("none") if found else request, sizes[-1]):
        return False
    for size in sizes:
        in_groups = request.in_groups_of(size)
        if not found:
            if not any(memory.fits for memory in leanest_memories(in_groups)):
                continue
        elif not _saves_memory(config, best := _fastest(found)):
            break
        else:
            least = _least_seconds(in_groups, accept)
            if least is None or best.step_seconds is None:
                break
            if least >= (1 - TIE) * best.step_seconds:
                return True
        with suppress(DoesNotFitError):
            found.append(planned(in_groups))
    return False


def sizes_of_groups(request: Request) -> list[int]:
    """Sizes of groups that a plan may choose, ascending; none if the config has decided about it."""
    config = request.config
    if config.parallel.sequence_parallel_size != "auto" or config.train.grad_accum != "auto":
        return []
    return group_sizes(config, request.architecture, request.processes, request.on_machines)


def groups_may_help(request: Request, size: int) -> bool:
    """Whether whole rows would fit if all that grows with their tokens were divided among so many processes.

    If not, groups need not be traced.
    """
    return any(memory.fits_without(BY_TOKENS, size) for memory in leanest_memories(request))


def _fastest(plans: Sequence[Plan]) -> Plan:
    """Of plans whose groups grow; the earlier one of two that tie, or if nothing tells which is faster."""
    fastest = plans[0]
    for plan in plans[1:]:
        if (
            plan.step_seconds
            and fastest.step_seconds
            and plan.step_seconds < (1 - TIE) * fastest.step_seconds
        ):
            fastest = plan
    return fastest


def _saves_memory(config: RunConfig, plan: Plan) -> bool:
    """Whether a plan does what nobody asked for, and takes time, merely to save memory.

    Of whole rows, recomputing them does not count: groups that would not have to are left out.
    """
    train, auto = config.train, config.train.asked_activations == "auto"
    divided = plan.sharing.sequence_parallel
    recomputes = plan.offloads_activations or (plan.activations.recomputes and divided)
    in_ram = config.parallel.offload == "auto" and plan.sharing.offloads
    return in_ram or (auto and recomputes) or (plan.activations.in_tiles and not train.asks_tiles)


def _least_seconds(request: Request, accept: Accept) -> float | None:
    """Seconds of a step that no plan of these groups is below, whatever memory it takes; None if unknown.

    Engines that divide weights are left out, unless there is no other: they send more, and have traces of
    their own.
    """
    config = request.config
    drafts = [draft for draft in candidates(request) if accept(draft) and not _saves_memory(config, draft)]
    whole = [draft for draft in drafts if not engine_of(draft.sharing.engine).shards_weights]
    seconds = plan_clock(request)
    return min(filter(None, (seconds(config, draft) for draft in whole or drafts)), default=None)

"""Plans that divide the tokens of micro-batches among groups of processes, where that is worth it.

Groups wait for each other in every layer, so rows stay whole that fit on the devices whole. Where they do
not, or only with a last resort (MLPs in tiles, RAM), the predicted seconds decide how large groups are.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DoesNotFitError, UntraceableModel
from sft_play.machine.gpus import Machine
from sft_play.plan import Memory, Plan
from sft_play.planning.clock import plan_clock
from sft_play.planning.devices import machines_of
from sft_play.planning.drafts import leanest, with_groups, with_offload
from sft_play.planning.facts import DataFacts
from sft_play.planning.run import drafts_of, estimator_of_run, plan_run
from sft_play.planning.search import TIE
from sft_play.planning.sequence import group_sizes
from sft_play.reasons.choices import TokensDivided
from sft_play.sizing.architecture import AnyArchitecture, Architecture

BY_TOKENS = ("activations", "loss", "temporaries")  # terms of a peak that divided tokens make smaller
Run = tuple[RunConfig, Architecture, DataFacts, Machine, int]  # the first arguments of `plan_run`
Accept = Callable[[Plan], bool]


def plan_in_groups(
    config: RunConfig,
    model_config: AnyArchitecture,
    facts: DataFacts,
    machine: Machine,
    processes: int,
    *,
    machines: int | None = None,
    accept: Accept = lambda draft: True,
    **how: Any,
) -> Plan:
    """As `plan_run`; tokens are divided if nothing else fits, or if a last resort would take longer.

    Not if the config says how large groups are, or the accumulation, which grows with them.
    """
    run = config, Architecture.of(model_config), facts, machine, processes
    machines = machines or machines_of(machine, processes)
    found, ruled_out = list[Plan](), False
    problem: DoesNotFitError | None = None

    def planned(each: Run) -> Plan:
        return plan_run(*each, machines=machines, accept=accept, **how)

    try:
        found.append(planned(run))
    except DoesNotFitError as error:
        problem = error
    with suppress(ConfigError, UntraceableModel):  # groups are refused for what the model or the config is
        ruled_out = _add_larger_groups(found, run, machines, accept, planned)
    if not found:
        assert problem
        raise problem
    chosen = _fastest(found)
    ranks = chosen.sharing.sequence_ranks
    if found == [chosen] and ranks == config.parallel.sequence_ranks and not ruled_out:
        return chosen
    slower = [
        (plan.sharing.sequence_ranks, plan.step_seconds / chosen.step_seconds)
        for plan in found
        if plan is not chosen and plan.step_seconds and chosen.step_seconds
    ]
    reason = TokensDivided(ranks, tuple(slower), ruled_out)
    return replace(chosen, why=(*chosen.why, str(reason)))


def _add_larger_groups(
    found: list[Plan], run: Run, machines: int, accept: Accept, planned: Callable[[Run], Plan]
) -> bool:
    """Adds plans of larger and larger groups to those found, as long as they may be the fastest.

    Returns:
        Whether it ended because no larger groups can be.
    """
    config, *_ = run
    sizes = sizes_of_groups(run, machines)
    if not sizes or (found and not _saves_memory(config, found[0])):
        return False
    if not _may_help((with_offload(config, "none") if found else config, *run[1:]), machines):
        return False
    for size in sizes:
        in_groups = with_groups(config, size), *run[1:]
        if not found:
            if not any(memory.fits for memory in leanest_memories(in_groups, machines)):
                continue
        elif not _saves_memory(config, best := _fastest(found)):
            break
        else:
            least = _least_seconds(in_groups, machines, accept)
            if least is None or best.step_seconds is None:
                break
            if least >= (1 - TIE) * best.step_seconds:
                return True
        with suppress(DoesNotFitError):
            found.append(planned(in_groups))
    return False


def sizes_of_groups(run: Run, machines: int) -> list[int]:
    """Sizes of groups that a plan may choose, ascending; none if the config has decided about it."""
    config, architecture, *_, processes = run
    if config.parallel.sequence_parallel_size != "auto" or config.train.grad_accum != "auto":
        return []
    return group_sizes(config, architecture, processes, machines)


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
    divided = plan.sharing.divides_tokens
    recomputes = plan.offloads_activations or (plan.activations.recomputes and divided)
    in_ram = config.parallel.offload == "auto" and plan.sharing.offload != "none"
    return in_ram or (auto and recomputes) or (train.mlp_tiles == "auto" and plan.activations.in_tiles)


def _least_seconds(run: Run, machines: int, accept: Accept) -> float | None:
    """Seconds of a step that no plan of these groups is below, whatever memory it takes; None if unknown.

    Engines that divide weights are left out, unless there is no other: they send more, and have traces of
    their own.
    """
    config, architecture, facts, machine, processes = run
    drafts = [
        draft for draft in drafts_of(*run, machines) if accept(draft) and not _saves_memory(config, draft)
    ]
    whole = [draft for draft in drafts if not engine_of(draft.sharing.engine).shards_weights]
    seconds = plan_clock(architecture, facts, machine, processes)
    return min(filter(None, (seconds(config, draft) for draft in whole or drafts)), default=None)


def leanest_memories(run: Run, machines: int) -> list[Memory]:
    """The memory of the plans of a run that take least.

    Raises:
        ConfigError: as in `plan_run`, or it is unknown how much memory is free.
    """
    estimate = estimator_of_run(*run)
    return [estimate(run[0], draft, complete=True) for draft in leanest(drafts_of(*run, machines))]


def fits_in_groups(
    config: RunConfig, model_config: AnyArchitecture, facts: DataFacts, machine: Machine, processes: int
) -> bool:
    """Whether a run whose whole rows do not fit does if the largest groups divide their tokens."""
    run = config, Architecture.of(model_config), facts, machine, processes
    machines = machines_of(machine, processes)
    if sizes := sizes_of_groups(run, machines):
        with suppress(ConfigError, UntraceableModel):
            in_groups = with_groups(config, sizes[-1]), *run[1:]
            return _may_help(run, machines) and any(
                memory.fits for memory in leanest_memories(in_groups, machines)
            )
    return False


def _may_help(run: Run, machines: int) -> bool:
    """Whether whole rows would fit if nothing grew with their tokens; if not, groups need not be traced."""
    return any(
        memory.process_bytes - sum(memory.terms.get(term, 0) for term in BY_TOKENS) < memory.budget_bytes
        for memory in leanest_memories(run, machines)
    )

"""The search for the plan that is predicted to be fastest among those that fit the memory budget.

The drafts come in preferred order: engine by engine, without checkpointing before with it, small
micro-batches before large ones. Sizing a draft (calling the estimator) is the expensive part, so the search
avoids it where the answer is known:

- Memory grows with the micro-batch. Once a micro-batch does not fit, no larger one of that engine and
  checkpointing setting is sized, unless it does without accumulation, and so without earlier gradients.
- Recomputing activations only costs time where they fit, unless divided weights can then stay gathered. With
  checkpointing, micro-batches are sized that do not fit without it, and the chosen one, to report what
  checkpointing would save.
- Where a micro-batch fits only with its activations recomputed, some of the layers may keep theirs: as many
  as fit, since each of them takes memory and saves time.
- MLPs that compute long rows in tiles are slower, and so is offloading to RAM. Such plans are sized if no
  other plan fits: tiles first, then what layers are recomputed from in RAM, if the speed of the GPU's link is
  known, then weights in RAM; each without tiles before with them.
- Some engines trade speed for memory. If the best plan of an engine before them would not become faster with
  more memory, they are sized for that plan only, to report what they would save. Those that divide the
  weights, whose steps have traces of their own, are sized then only if all weights are trained: each process
  updates its part of them, which may be faster, if the plan accumulates in others of their own.

Among the plans that fit, the one with the shortest predicted step is chosen; plans within 1% of it (`TIE`)
count as a tie, which the larger micro-batch wins; but weights are not divided for a tie, nor for a gain
within the error of such predictions. A plan with which memory ran out in an earlier run counts as one that
does not fit, unless no other is left: then the prediction counts, and of several plans the one that needs
least is chosen. If no plan fits, the error lists single changes to the config that would make the smallest
one fit.

Pure: memory and time are functions, so traced, measured and made-up numbers are interchangeable.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.parts import RECOMPUTED
from sft_play.plan import Clock, Estimator, Memory, Plan
from sft_play.planning.candidates.drafts import by_offload
from sft_play.planning.candidates.tiles import why_tiled, worth_sizing
from sft_play.planning.search.costs import master_weights, states_on_disk
from sft_play.planning.search.less_sent import at_worst, with_less_sent
from sft_play.planning.search.partly_recomputed import partly_recomputed
from sft_play.reasons import choices
from sft_play.report.misfit import misfit_text

# Predictions that differ by less are a tie, which the larger micro-batch wins: it needs fewer passes.
TIE = 0.01

MemoryOf = Callable[[Plan], Memory]  # of a plan of this run
SecondsOf = Callable[[Plan], float | None]  # of its optimizer step; None if unknown

ENGINE = ("sharing.engine", "sharing.replicas", "sharing.offload")
# alike for plans that differ in the micro-batch, and in how many layers keep their activations
KIND = (*ENGINE, "activations.policy", "activations.in_tiles")
_engine, _kind = attrgetter(*ENGINE), attrgetter(*KIND)
# what the plans of a table are told apart by, besides their micro-batch
_row_kind = attrgetter(*KIND, "activations.partly_kept")
# what plans of different engines may have in common
_split = attrgetter("batch.accumulation", "activations.policy")
_recomputing = attrgetter("activations.recomputes")


def choose_plan(
    config: RunConfig,
    drafts: list[Plan],
    estimate: Estimator | None,
    clock: Clock | None,
    least: Clock | None = None,
    *,
    explain: bool = True,
    layers: int = 0,
) -> tuple[Plan, list[str]]:
    """The plan to run, and why.

    Args:
        config: the run's config.
        drafts: the plans that the config allows, in preferred order (`drafts.draft_plans`).
        estimate: predicts the memory of a plan; None if the model cannot be traced.
        clock: predicts the time of a step; None if unknown.
        least: a time that it is not below; None if unknown.
        explain: also size what is only reported: the chosen plan with activations recomputed and with its
            weights in another type, and changes that would help if no draft fits.
        layers: of the model, if it can recompute some and not others.

    Raises:
        DoesNotFitError: no draft fits; the message says by how much.
    """
    if estimate is None:
        return drafts[0], _reasons_unsized(config, drafts)
    memory_of: MemoryOf = partial(estimate, config)
    seconds_of: SecondsOf = partial(clock, config) if clock else lambda plan: None
    compared = at_worst(seconds_of)
    at_least = at_worst(partial(least, config) if least else lambda plan: None)
    sized, mix = list[Plan](), layers > 1 and config.train.asked_activations == "auto"
    waiting = by_offload(config, drafts, seconds_of, lambda group: worth_sizing(group, sized))
    while True:
        if not _fitting(sized) and (group := next(waiting, None)) is not None:
            try:
                sized += _size_all(group, memory_of, compared, trains_all=config.tuning.mode == "full")
            except ConfigError:  # offloading, which nobody asked for, cannot do it
                if not sized:
                    raise
            continue
        sized += _mixes(sized, layers, memory_of, compared) if mix else []
        mix = False  # from now on
        if not (fitting := _fitting(sized) or _least_of_those_that_ran_out(sized)):
            raise DoesNotFitError(_misfit(sized, explain))
        fastest, _ = _pick_fastest(fitting, compared)
        chosen = replace(fastest, memory=estimate(config, fastest, complete=True))
        sized[sized.index(fastest)] = chosen
        if chosen.memory and chosen.memory.within_budget:  # with fragmentation, which sizing may leave out
            break
    others = fitting if _recomputing(chosen) else [*fitting, *_recomputed(drafts, chosen)]
    chosen, gathered = with_less_sent(config, chosen, others, estimate, compared, at_least, by=1 - TIE)
    if explain and not any(map(_recomputing, sized)):
        sized += [replace(one, memory=memory_of(one)) for one in _recomputed(drafts, chosen)]
    alternatives = _alternatives(chosen, sized, seconds_of)
    why = [*_reasons(config, chosen, sized, seconds_of, layers), *gathered]
    if explain:
        why += [*master_weights(config, chosen, estimate), *states_on_disk(config, chosen, estimate)]
    return replace(chosen, step_seconds=seconds_of(chosen), alternatives=alternatives), why


def _misfit(sized: list[Plan], explain: bool) -> str:
    """Why none of these plans fits."""
    alike = [plan for plan in sized if plan.sharing.offload == sized[0].sharing.offload]
    alike = [plan for plan in alike if plan.activations.policy != "offload"] or alike  # the last resort
    return misfit_text(min(alike, key=_needed), explain=explain)


def _fitting(sized: list[Plan]) -> list[Plan]:
    return [plan for plan in sized if plan.memory and plan.memory.fits]


def _least_of_those_that_ran_out(sized: list[Plan]) -> list[Plan]:
    within = [plan for plan in sized if plan.memory and plan.memory.within_budget]
    return [min(within, key=_needed)] if within else []


def _needed(plan: Plan) -> int:
    assert plan.memory
    return plan.memory.decisive_bytes


def _size_all(
    drafts: list[Plan], memory_of: MemoryOf, seconds_of: SecondsOf, *, trains_all: bool
) -> list[Plan]:
    """The drafts worth sizing, with their memory."""
    sized: list[Plan] = []
    for engine in dict.fromkeys(map(_engine, drafts)):
        best = _best_without_memory_limit(drafts, sized, seconds_of)
        of_engine = [draft for draft in drafts if _engine(draft) == engine]
        if any(plan.sharing.engine == engine[0] and not seconds_of(plan) for plan in _fitting(sized)):
            continue  # divided inside each machine, whose links are faster than a network
        # divided weights are sent for each micro-batch: fewer may be faster, even where layers are recomputed
        own = trains_all and engine_of(engine[0]).shards_weights and best and best.batch.accumulation > 1
        if best is not None and not own:
            alike = [draft for draft in of_engine if _split(draft) == _split(best)]
            of_engine = [draft for draft in alike if trains_all or not _divides(draft)]
        sized += _size_engine(of_engine, memory_of)
    return sized


def _size_engine(drafts: list[Plan], memory_of: MemoryOf) -> list[Plan]:
    """Sizes one engine's drafts up to the first that does not fit, separately for each checkpointing mode.

    And the one that does not accumulate, if it might fit: in its forward pass there are no gradients yet.
    """
    sized, misfits = list[Plan](), dict[str, Memory]()
    for draft in drafts:
        needless = any(_recomputes(draft, plan) for plan in _fitting(sized))
        misfit = misfits.get(draft.activations.policy)
        alone = draft.batch.accumulation == 1 and misfit and misfit.fits_without(("gradients",))
        if (alone or not misfit) and not needless:
            memory = memory_of(draft)
            sized.append(replace(draft, memory=memory))
            if not memory.fits:
                misfits[draft.activations.policy] = memory
    return sized


def _mixes(sized: list[Plan], layers: int, memory_of: MemoryOf, seconds_of: SecondsOf) -> list[Plan]:
    """Plans that may be faster, of those that may be chosen and fit only with activations recomputed."""
    fitting = _without_needless(_fitting(sized))
    best = min((time for plan in fitting if (time := seconds_of(plan))), default=0.0)
    recomputing = [plan for plan in fitting if plan.activations == RECOMPUTED]
    needy = [plan for plan in recomputing if not any(_recomputes(plan, other) for other in fitting)]
    return partly_recomputed(needy, layers, memory_of, seconds_of, below=best * (1 - TIE), by=1 - TIE)


def _recomputes(one: Plan, other: Plan) -> bool:
    """Whether they differ only in that `one` recomputes activations that the other keeps."""
    alike = (_engine(one), _size(one)) == (_engine(other), _size(other))
    return alike and one.activations.saved > other.activations.saved


def _recomputed(drafts: list[Plan], plan: Plan) -> list[Plan]:
    """The plan with activations recomputed that it keeps, if the config allows that."""
    return [one for one in drafts if one.activations == RECOMPUTED and _recomputes(one, plan)]


def _size(plan: Plan) -> int:
    """Grows with the micro-batch."""
    return -plan.batch.accumulation


def _best_without_memory_limit(drafts: list[Plan], sized: list[Plan], seconds_of: SecondsOf) -> Plan | None:
    """The fastest plan so far if more memory would not make it faster; None if it might."""
    fitting = _fitting(sized)
    if not fitting:
        return None
    best, seconds = _pick_fastest(fitting, seconds_of)
    larger_is_slower = any(_size(plan) > _size(best) for plan in fitting)
    largest = _size(best) == max(map(_size, drafts))
    could_keep = _recomputing(best) and not all(map(_recomputing, drafts))
    return best if seconds and (larger_is_slower or largest) and not could_keep else None


def _pick_fastest(fitting: list[Plan], seconds_of: SecondsOf) -> tuple[Plan, float | None]:
    """The fastest plan, and of plans that tie the one with the largest micro-batch.

    Some engines cost speed that a clock does not know of, so they are left out where another one fits with
    the same split. If speed is unknown, the largest micro-batch with the first plan's engine and
    checkpointing. A plan of unknown speed is not faster than one whose speed is known.
    """
    fitting = _without_needless(fitting)
    times = [seconds_of(plan) for plan in fitting]
    known = [(plan, time) for plan, time in zip(fitting, times, strict=True) if time is not None]
    if not known:
        alike = [plan for plan in fitting if _kind(plan) == _kind(fitting[0])]
        return max(alike, key=_size), None
    best = min(time for _, time in known)
    tied = [(plan, time) for plan, time in known if time <= best * (1 + TIE)]
    return min(tied, key=lambda pair: (_divides(pair[0]), -_size(pair[0]), pair[1]))


def _label(plan: Plan) -> str:
    return engine_of(plan.sharing.engine).label


def _divides(plan: Plan) -> bool:
    return engine_of(plan.sharing.engine).shards_weights


def _without_needless(fitting: list[Plan]) -> list[Plan]:
    """Those that do not trade speed for memory where another one fits with the same split."""
    trading = [plan for plan in fitting if engine_of(plan.sharing.engine).trades_speed]
    others = [_split(plan) for plan in fitting if plan not in trading]
    return [plan for plan in fitting if plan not in trading or _split(plan) not in others]


def _reasons(
    config: RunConfig, chosen: Plan, sized: list[Plan], seconds_of: SecondsOf, layers: int
) -> list[str]:
    fitting, seconds = _fitting(sized), seconds_of(chosen)
    return [
        choices.effective_batch(chosen),
        choices.rows_in_a_micro_batch(chosen),
        _why_no_larger(chosen, sized, seconds),
        _why_recomputed(config, chosen, fitting, layers),
        *why_tiled(config.train, chosen),
        *([_why_engine(config, chosen, fitting, seconds_of)] if chosen.sharing.world_size > 1 else []),
        *_why_offloaded(config, chosen),
    ]


def _reasons_unsized(config: RunConfig, drafts: list[Plan]) -> list[str]:
    first, given = drafts[0], len({draft.batch.micro for draft in drafts}) == 1
    return [choices.effective_batch(first), choices.unsized(given), *_why_offloaded(config, first)]


def _why_no_larger(chosen: Plan, sized: list[Plan], seconds: float | None) -> str:
    """Why not a larger micro-batch; of the chosen kind, unless only others have one that fits."""
    say = partial(choices.micro_batch, chosen.batch.micro, timed=bool(seconds))
    larger = [plan for plan in sized if _size(plan) > _size(chosen)]
    alike = [plan for plan in larger if _kind(plan) == _kind(chosen)]
    if fitting := _fitting(alike):
        return say(fits=max(plan.batch.micro for plan in fitting))
    if chosen.batch.accumulation == 1:
        return say(whole_step=True)
    if alike:
        following = min(alike, key=lambda plan: plan.batch.micro)
        ran_out = following.memory is not None and following.memory.ran_out
        say = partial(say, misfit=following.batch.micro, ran_out=ran_out)
    if fitting := _fitting(larger):
        other = max(fitting, key=lambda plan: plan.batch.micro)
        policy = other.activations.policy
        return say(
            other=other.batch.micro,
            engine=None if other.sharing.engine == chosen.sharing.engine else _label(other),
            activations=None if policy == chosen.activations.policy else policy,
        )
    return say()


def _why_recomputed(config: RunConfig, chosen: Plan, fitting: list[Plan], layers: int) -> str:
    way, asked = chosen.activations, config.train.asked_activations
    if way.policy == "offload":
        cause: Any = "exceed" if asked == "auto" else "config"
        host = chosen.memory.host if chosen.memory else None
        return choices.inputs_in_ram(chosen.device, cause, host)
    if asked != "auto":
        return choices.recomputing(way.recomputes, "config")
    if way.partly_kept:
        return choices.partly_recomputing(way.apart, layers)
    if not way.recomputes:
        return choices.recomputing(False, "fit")
    if any(_recomputes(chosen, plan) for plan in fitting):
        return choices.recomputing(True, "gathered")
    needed = all(map(_recomputing, fitting))
    return choices.recomputing(True, "exceed" if needed else "faster")


def _why_engine(config: RunConfig, chosen: Plan, fitting: list[Plan], seconds_of: SecondsOf) -> str:
    """What the engine does for this run, compared with the leanest other one that fits.

    What divides weights is compared with the first one, which divides least.
    """
    engine = engine_of(chosen.sharing.engine)
    say = partial(
        choices.engine,
        engine=engine.label,
        principle=engine.principle,
        trades_speed=engine.trades_speed,
        world_size=chosen.sharing.world_size,
        replicas=chosen.sharing.replicas,
        exchanges_once=chosen.sharing.defers_exchange,
    )
    others = [
        plan
        for plan in fitting
        if plan.sharing.engine != chosen.sharing.engine and _split(plan) == _split(chosen)
    ]
    if not others:
        free = config.parallel.engine == "auto"
        alone = (
            _divides(chosen)
            and free
            and all(plan.sharing.engine == chosen.sharing.engine for plan in fitting)
        )
        return say(alone=alone)
    other = others[0] if _divides(chosen) else min(others, key=_needed)
    more = _needed(other) - _needed(chosen)
    ours, theirs = seconds_of(chosen), seconds_of(other)
    slower = theirs / ours if ours and theirs and theirs > ours * (1 + TIE) else None
    return say(other=_label(other), more_bytes=more, slower=slower)


def _why_offloaded(config: RunConfig, chosen: Plan) -> list[str]:
    if not chosen.sharing.offloads:
        return []
    cause: Any = "config" if config.parallel.offload != "auto" else "exceed"
    host = chosen.memory.host if chosen.memory else None
    held = "weights, gradients and optimizer states"
    if config.parallel.nvme_path:
        on_disk = engine_of(chosen.sharing.engine).weights_on_disk
        held = "gradients" if on_disk else "weights and gradients"
    return [choices.offload(chosen.device, _label(chosen), cause, host, held)]


def _alternatives(chosen: Plan, sized: list[Plan], seconds_of: SecondsOf) -> tuple[dict[str, Any], ...]:
    """Other plans for the report: all that were sized of the chosen kind, and the best of each other kind.

    A kind is an engine with or without checkpointing.
    """
    base = seconds_of(chosen)
    kinds: dict[tuple[Any, ...], list[tuple[Plan, float | None]]] = {}
    for plan in sized:
        if (*_row_kind(plan), _size(plan)) == (*_row_kind(chosen), _size(chosen)):
            continue
        time = seconds_of(plan)
        speed = base / time if base and time else None
        if speed and _recomputes(plan, chosen):  # a measured time beside a predicted one may say otherwise
            speed = min(speed, 1.0)
        kinds.setdefault(_row_kind(plan), []).append((plan, speed))
    others: list[tuple[Plan, float | None]] = []
    for kind, found in kinds.items():
        others += sorted(found, key=_preference)[: None if kind == _row_kind(chosen) else 1]
    return tuple(plan.as_alternative(speed) for plan, speed in sorted(others, key=_preference))


def _preference(timed: tuple[Plan, float | None]) -> tuple[bool, float]:
    """Sorts plans and their relative speeds: those that fit first, then the fastest."""
    plan, speed = timed
    return not (plan.memory and plan.memory.fits), -(speed or 0)

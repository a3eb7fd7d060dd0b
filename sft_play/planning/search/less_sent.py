"""What a plan that divides weights does with memory that is left: it sends less. Pure.

Gradients may wait for the last micro-batch of a step, and weights may stay gathered from the forward to the
backward pass. Either computes the same and takes memory. Only the chosen plan is sized in these ways, and
those that would be faster than it in one of them: as drafts, they would multiply the traces of divided
models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.parts import MOST_SHARDS
from sft_play.plan import Estimator, Plan
from sft_play.reasons.choices import GatheredCause, gathered_weights

# Each process has the scales of all NF4 weights: absmax of 64 in a byte, and fp32 for 256 of these, beside
# half a byte for each element.
SCALES = 0.032

# By how much more than DDP's, steps of divided models have taken longer than predicted at most: two and four
# processes of a CPU (benchmarks/results/sharding_time.json), QLoRA on two A100 (published, overlap.json; none
# on PCIe).
LONGER = {"cpu": 1.3, "cuda": 1.06}

HELD_ANYWAY = "gradients", "optimizer"  # at the end of the forward pass, whatever is recomputed

SecondsOf = Callable[[Plan], float | None]


def at_worst(seconds_of: SecondsOf) -> SecondsOf:
    """The seconds that plans are compared by: those that divide weights as much longer as they may take.

    So weights are divided for speed only where that is predicted to be faster even then.
    """

    def seconds(plan: Plan) -> float | None:
        predicted = seconds_of(plan)
        divides = engine_of(plan.sharing.engine).shards_weights
        return predicted * LONGER[plan.device] if predicted and divides else predicted

    return seconds


def with_less_sent(
    config: RunConfig,
    chosen: Plan,
    others: Sequence[Plan],
    estimate: Estimator,
    seconds_of: SecondsOf,
    least_of: SecondsOf,
    *,
    by: float,
) -> tuple[Plan, list[str]]:
    """The fastest plan in the fastest of these ways that fits, and why its weights stay gathered or do not.

    Args:
        config: the run's config.
        chosen: the fastest plan so far, with its memory.
        others: that fit too, and without memory those that save some by recomputing what fits.
        estimate: predicts the memory of a plan.
        seconds_of: the time of its step; None if unknown.
        least_of: a time that it is not below, which takes no trace of gradients that wait; None if unknown.
        by: a step whose weights stay gathered, or of another plan, must be below this share of the one that
            it replaces.
    """

    def fastest_way(plan: Plan) -> Plan:
        may_keep = (
            config.parallel.reshard_after_forward == "auto"
            and engine_of(plan.sharing.engine).can_keep_gathered
        )
        exceeds = plan.memory is not None and _exceeds(config, plan)
        frees = plan.sharing.reshard_after_forward and (not may_keep or exceeds)
        return _sending(plan, frees, max(_waits(config, plan)))

    def least(plan: Plan) -> float:
        return seconds_of(fastest_way(plan)) or inf

    chosen, why = _in_the_fastest_way(config, chosen, estimate, seconds_of, least_of, by=by)
    below = by * (seconds_of(chosen) or 0.0)
    # if they stay gathered already, or never can, to recompute what fits would only cost time
    saves = chosen.sharing.reshard_after_forward and not _exceeds(config, chosen, HELD_ANYWAY)
    divided = [plan for plan in others if engine_of(plan.sharing.engine).shards_weights]
    divided = [plan for plan in divided if plan.memory or saves]
    divided = [plan for plan in divided if (least_of(fastest_way(plan)) or 0.0) < below]
    for rival in sorted(divided, key=least):
        if not (seconds := seconds_of(chosen)) or least(rival) >= by * seconds:
            break
        complete = replace(rival, memory=estimate(config, rival, complete=True))
        faster, about = _in_the_fastest_way(config, complete, estimate, seconds_of, least_of, by=by)
        if faster.memory and faster.memory.fits and (seconds_of(faster) or inf) < by * seconds:
            chosen, why = faster, about
    return chosen, why


def _sending(plan: Plan, frees: bool, waits: bool) -> Plan:
    sharing = replace(plan.sharing, reshard_after_forward=frees, defers_exchange=waits)
    return replace(plan, sharing=sharing)


def _waits(config: RunConfig, plan: Plan) -> tuple[bool, ...]:
    """Whether gradients wait for the last micro-batch of a step: as the config says, or both."""
    if config.parallel.defer_exchange != "auto" or not _may_wait(plan):
        return (plan.sharing.defers_exchange,)
    return True, False


def _may_wait(plan: Plan) -> bool:
    """Whether its gradients can wait for the last micro-batch, and might fit, being whole until then."""
    several = plan.batch.accumulation > 1 and not plan.sharing.offloads
    if not (several and engine_of(plan.sharing.engine).can_defer and plan.memory):
        return False
    own = plan.memory.phase_terms.get("optimizer", {}).get("gradients", 0)
    whole = own * min(plan.sharing.shards, MOST_SHARDS) / (2 if _casts(plan) else 1)
    return whole <= plan.memory.budget_bytes


def _casts(plan: Plan) -> bool:
    """Whether weights are gathered, and have gradients, in half the bytes in which it keeps them."""
    return plan.precision.dtype == "float32" and plan.precision.autocast != "no"


def _in_the_fastest_way(
    config: RunConfig,
    plan: Plan,
    estimate: Estimator,
    seconds_of: SecondsOf,
    least_of: SecondsOf,
    *,
    by: float,
) -> tuple[Plan, list[str]]:
    """As `with_less_sent`, of one plan."""
    engine, asked = engine_of(plan.sharing.engine), config.parallel.reshard_after_forward
    freed = [plan.sharing.reshard_after_forward]
    cause: GatheredCause = "freed" if plan.sharing.reshard_after_forward else "kept"
    share = 0.0
    if engine.can_keep_gathered and asked == "auto":
        cause, share = _gain(config, plan, seconds_of, by)
        freed = [False, True] if cause == "faster" else [True]
    ways = [_sending(plan, frees, wait) for frees, wait in product(freed, _waits(config, plan))]
    seconds = seconds_of(plan) or inf
    ways = [way for way in ways if way == plan or (least_of(way) or 0.0) <= seconds]
    for way in sorted(ways, key=lambda way: seconds_of(way) or 0.0):
        if way == plan:
            break
        memory = estimate(config, way, complete=True)
        if memory.fits:
            plan = replace(way, memory=memory)
            break
    if cause == "faster" and plan.sharing.reshard_after_forward:
        cause = "exceed"
    return plan, [gathered_weights(cause, share)] if engine.can_keep_gathered else []


def _gain(config: RunConfig, plan: Plan, seconds_of: SecondsOf, by: float) -> tuple[GatheredCause, float]:
    """What it would gain to keep weights gathered, and which share of a step: if it is within the budget."""
    if _exceeds(config, plan):
        return "exceed", 0.0
    freed, kept = seconds_of(plan), seconds_of(_sending(plan, False, plan.sharing.defers_exchange))
    if freed is None or kept is None:
        return "unknown", 0.0
    return ("faster", 1 - kept / freed) if kept < by * freed else ("tie", 0.0)


def _exceeds(config: RunConfig, plan: Plan, beside: Sequence[str] = (*HELD_ANYWAY, "activations")) -> bool:
    """Whether a process has no memory for all weights at the end of the forward pass, without a trace of it.

    The least that it takes is counted: shards as they are gathered, and the terms that are there beside them.
    """
    memory, shards = plan.memory, min(plan.sharing.shards, MOST_SHARDS)
    assert memory
    terms = memory.phase_terms.get("forward", {})
    held = sum(terms.get(name, 0) for name in ("weights", "adapters"))
    scales = SCALES * shards if config.tuning.mode == "qlora" else 0.0
    whole = shards * held / (1 + scales) / (2 if _casts(plan) else 1)
    others = sum(terms.get(name, 0) for name in beside)
    return whole + held + others + memory.terms.get("context", 0) > memory.budget_bytes

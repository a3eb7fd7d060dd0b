"""Plans that keep the activations of some layers and recompute those of the others. Pure.

Memory between the two extremes is speed for free. Each layer that keeps its activations takes memory and
saves time, so the most that fit are looked for. They are the last ones (model/layers/recomputation.py).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from sft_play.errors import UntraceableModel
from sft_play.parts import Activations
from sft_play.plan import Memory, Plan

MemoryOf = Callable[[Plan], Memory]
SecondsOf = Callable[[Plan], float | None]


def partly_recomputed(
    recomputing: Sequence[Plan],
    layers: int,
    memory_of: MemoryOf,
    seconds_of: SecondsOf,
    *,
    below: float,
    by: float,
) -> list[Plan]:
    """Plans with as many layers that keep their activations as fit, each faster than all before it.

    A plan that would not be fast enough with all activations kept is not looked at.

    Args:
        recomputing: plans that fit with all layers recomputed.
        layers: of the model.
        memory_of: the memory of a plan.
        seconds_of: the time of its step; None if unknown.
        below: seconds that a plan must be below to be worth it.
        by: after each that is found, the next one must be below this share of its seconds.
    """
    found: list[Plan] = []
    kept = [(plan, seconds_of(replace(plan, activations=Activations()))) for plan in recomputing]
    known = [(plan, seconds) for plan, seconds in kept if seconds is not None]
    for plan, least in sorted(known, key=lambda pair: pair[1]):
        if least >= below:
            break
        fewest = _fewest_worth_it(plan, layers, seconds_of, below, least)
        try:
            mixed = _with_most_kept(plan, fewest, layers, memory_of)
        except UntraceableModel:  # with its layers told apart
            break
        seconds = seconds_of(mixed) if mixed else None
        if mixed and seconds is not None:
            found.append(mixed)
            below = by * seconds
    return found


def _keeping(plan: Plan, count: int) -> Plan:
    return replace(plan, activations=plan.activations.with_apart(count))


def _fewest_worth_it(plan: Plan, layers: int, seconds_of: SecondsOf, below: float, least: float) -> int:
    """How many layers have to keep their activations for the step to take less than so many seconds.

    It takes its `least` if all do. Each layer saves about as much, so two counts should be enough.
    """

    def is_worth_it(count: int) -> bool:
        return (seconds_of(_keeping(plan, count)) or 0) < below

    most = seconds_of(plan) or below
    guess = ceil(layers * (most - below) / (most - least)) if most > below else 1
    first, last = 1, layers
    for count in (guess - 1, guess):
        if first <= count < last:
            first, last = (first, count) if is_worth_it(count) else (count + 1, last)
    return first + bisect_left(range(first, last), True, key=is_worth_it)


def _with_most_kept(plan: Plan, fewest: int, layers: int, memory_of: MemoryOf) -> Plan | None:
    """The plan with the most layers that can keep their activations; None if not even the `fewest` can.

    To size a plan that fills the budget takes a replay. Layers take about as much each, so two guesses should
    be enough, the first from what all of them take; where they are not, the rest is halved.
    """
    found, misfits = None, layers
    guesses = [(layers, memory_of(replace(plan, activations=Activations())))]
    while left := range(found.activations.apart + 1 if found else fewest, misfits):
        guess = _guess(plan, *guesses[-1]) if len(guesses) < 3 else left[len(left) // 2]
        count = min(max(guess, left[0]), left[-1])
        mixed = _keeping(plan, count)
        memory = memory_of(mixed)
        guesses.append((count, memory))
        if memory.fits:
            found = replace(mixed, memory=memory)
        else:
            misfits = count
    return found


def _guess(plan: Plan, kept: int, memory: Memory) -> int:
    """How many layers would fill the budget, if each took what the `kept` ones of this memory do."""
    assert plan.memory
    more = memory.process_bytes - plan.memory.process_bytes
    free = memory.budget_bytes - plan.memory.process_bytes
    return free * kept // max(more, 1)

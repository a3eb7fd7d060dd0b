"""The most layers that can keep their activations, whatever each of them takes."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest

from sft_play.plan import Memory, Plan
from sft_play.planning.search.partly_recomputed import partly_recomputed
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

RECOMPUTING = plan_with(PLAN, activations="recompute", kept_layers=0, mlp_tiles=1)


def most_kept(bytes_of_layers: list[int], budget: int, below: float = 2.0) -> tuple[int, int]:
    """How many layers keep theirs, and how many plans were sized for it."""
    taken, asked = [0, *accumulate(bytes_of_layers)], list[int]()

    def memory_of(plan: Plan) -> Memory:
        kept = plan.activations.kept_layers if plan.activations.recomputes else len(bytes_of_layers)
        asked.append(kept)
        return Memory(budget_bytes=budget, peak_bytes=taken[kept], peak_phase="backward")

    def seconds_of(plan: Plan) -> float:
        return 1 + plan.activations.recomputes - plan.activations.kept_layers / 1000

    start = replace(RECOMPUTING, memory=memory_of(RECOMPUTING))
    found = partly_recomputed([start], len(bytes_of_layers), memory_of, seconds_of, below=below, by=0.99)
    return (found[0].activations.kept_layers if found else 0), len(asked) - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_most_that_fit_are_found_with_few_plans_sized(seed):
    draw = random.Random(seed)
    layers = draw.randint(2, 200)
    taken = [draw.choice((0, 0, 1, 10, 1000)) for _ in range(layers)]
    budget = draw.randint(0, sum(taken))
    most, sized = most_kept(taken, budget)
    assert most == max(count for count in range(layers) if sum(taken[:count]) <= budget)
    assert sized <= 3 + layers.bit_length()


@pytest.mark.parametrize("budget", [0, 99, 100, 6_300, 12_400, 12_599])
def test_layers_that_take_the_same_are_counted_with_three_plans(budget):
    most, sized = most_kept([100] * 126, budget)
    assert most == budget // 100 and sized <= 3


def test_fewer_layers_than_are_worth_it_are_not_sized():
    """Where only so few would fit, as where even one of them is too much."""
    fit_none, fit_few = (most_kept([100] * 126, budget, below=1.98) for budget in (0, 1_900))
    assert fit_none[0] == fit_few[0] == 0 and max(fit_none[1], fit_few[1]) <= 2
    assert most_kept([100] * 126, 2_100, below=1.98)[0] == 21

"""Which other plans a run times."""

from types import SimpleNamespace

from sft_play.train.settle import _worth_timing
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def row(accumulation, checkpointing=False, speed=0.95, engine="none", fits=True):
    return {
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpointing,
        "engine": engine,
        "fits": fits,
        "relative_speed": speed,
    }


def worth(*rows, probe=True, **plan):
    config = SimpleNamespace(train=SimpleNamespace(probe=probe))
    return _worth_timing(SimpleNamespace(plan=plan_with(PLAN, alternatives=rows, **plan), config=config))


def test_plans_that_are_close_in_speed_fit_and_have_this_engine():
    other = row(16, engine="ddp"), row(32, fits=False), row(64, speed=0.5)
    assert worth(row(1), *other) == [(1, False)]
    assert worth(row(1), *other, probe="search") == [(1, False), (64, False)]


def test_of_plans_that_differ_in_the_micro_batch_alone_the_two_best():
    assert worth(row(1), row(4), row(8), row(1, True)) == [(1, False), (4, False)]


def test_activations_are_not_recomputed_where_keeping_them_fits():
    assert worth(row(2, True), row(1, True), probe="search") == [(1, True)]
    recomputed = dict(activations="recompute")
    assert worth(row(4), row(4, True), row(1, True), **recomputed) == [(4, False), (1, True)]

"""When a step contradicts what was predicted for it."""

import pytest

from sft_play.plan import EARLIER, PROBED
from sft_play.train.refuted import is_refuted
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


def refuted(predicted, measured, **plan):
    return is_refuted(plan_with(PLAN, step_seconds=predicted, total_steps=100, **plan), measured)


@pytest.mark.parametrize("predicted, measured", [(1309.5, 0.372), (0.372, 1309.5), (5.0, 1.0)])
def test_a_profile_is_refuted_by_a_step_that_takes_far_more_or_far_less(predicted, measured):
    assert refuted(predicted, measured)


def test_it_is_not_by_half_a_rate_by_short_steps_or_where_a_step_was_measured_before():
    assert not refuted(1.0, 4.9) and not refuted(0.01, 0.5)
    assert not any(refuted(1309.5, 0.372, step_seconds_origin=origin) for origin in (EARLIER, PROBED))
    assert not refuted(None, 0.372) and not refuted(1309.5, None)

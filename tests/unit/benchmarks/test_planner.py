"""What the benchmark of the planner takes for a prediction."""

from dataclasses import replace

import pytest

from benchmarks.planner import require_predicted
from sft_play.plan import EARLIER
from tests.unit.train.plans import PLAN


def test_seconds_of_an_earlier_run_are_no_prediction():
    assert require_predicted(PLAN) is PLAN
    with pytest.raises(SystemExit, match="come from 'earlier run'"):
        require_predicted(replace(PLAN, step_seconds_origin=EARLIER))

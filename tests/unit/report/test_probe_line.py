"""The line of a probe that has no figures says why."""

from dataclasses import asdict

import pytest

from sft_play.report.memory import probe_line
from sft_play.sizing.estimate.corrections import ProbeResult
from tests.plans import plan_with
from tests.unit.train.plans import PLAN


@pytest.mark.parametrize(
    ("engine", "device", "ran_out", "said"),
    [
        ("ddp", "cpu", False, "succeeded; memory could not be measured"),
        ("fsdp2", "cuda", True, "out of memory"),
    ],
)
def test_a_probe_without_figures_says_why(engine, device, ran_out, said):
    plan = plan_with(PLAN, engine=engine, device=device)
    assert probe_line(plan.to_json(), asdict(ProbeResult(ran_out=ran_out))) == f"probe: {said}"


def test_a_resumed_run_has_the_steps_left_that_it_has_not_done():
    tree, result = PLAN.to_json(), asdict(ProbeResult(phases={"forward": 2**20}, step_seconds=2.0))
    tree["plan"]["total_steps"] = 40
    assert probe_line(tree, result).endswith("about 2.0 s per step, 1 min 20 s for all of 40 steps")
    assert probe_line(tree, result, 30).endswith(
        "about 2.0 s per step, 20.0 s for the 10 steps that are left"
    )

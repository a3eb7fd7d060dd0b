"""What a run directory holds, for those who need a part of it."""

import json

import pytest

from sft_play.report.record import planned_batch
from sft_play.runlog import RunDir


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ({"micro_batch_size": 8, "max_seq_len": 100, "packing": False}, (8, 100, False)),
        ({"micro_batch_size": 800, "max_seq_len": 100, "packing": True}, (800, 100, True)),
        *(({"micro_batch_size": bad, "max_seq_len": 100}, None) for bad in ("x", None, 0, True, [8])),
        *((bad, None) for bad in ("x", [], None, {})),
    ],
)
def test_a_batch_is_that_of_a_sound_plan_alone(tmp_path, plan, found):
    run = RunDir(tmp_path)
    assert planned_batch(run) is None
    run.plan.write_text(json.dumps({"plan": plan}))
    assert planned_batch(run) == found

import json

import pytest
import torch

from benchmarks.measurement_log import RESULTS, MeasurementLog, versions
from benchmarks.random_cases import draw
from benchmarks.random_results import found_of, row_of

pytest.importorskip("deepspeed")

from benchmarks.random_runs import ENGINES, forget, log_of, run_of, take_over

RESULT = json.loads((RESULTS / "random.json").read_text(encoding="utf-8"))
MEASURED = next(row for row in RESULT["rows"] if "measured" in row and not row["number"] % 2)
REFUSED = next(row for row in RESULT["rows"] if "refused" in row)


@pytest.fixture
def log(tmp_path):
    return MeasurementLog(tmp_path / "lines.jsonl", torch.device("cpu"))


def run(row):
    return run_of({name: row[name] for name in draw(0, 0, ENGINES).__dataclass_fields__})


def test_the_runs_of_the_result_are_those_that_its_seed_gives():
    assert all(run(row) == draw(row["number"], RESULT["seed"], ENGINES) for row in RESULT["rows"])


@pytest.mark.parametrize("row", [MEASURED, REFUSED], ids=["measured", "refused"])
def test_a_row_is_the_same_again_from_what_it_says(row):
    again = json.loads(json.dumps(row_of(run(row), [found_of(row)])))
    assert again == ({"plan": None, "probed": False} if "measured" in row else {}) | row


def test_what_a_result_has_is_not_measured_again_unless_it_is_asked_for(tmp_path, log):
    result = tmp_path / "random.json"
    take_over(result, log)
    assert log_of(log) == {}
    result.write_text(json.dumps({"versions": {"torch": "1.0"}, "rows": [MEASURED]}))
    take_over(result, log)
    assert log_of(log) == {}
    result.write_text(json.dumps({"versions": versions(), "rows": [MEASURED | {"probed": True}]}))
    take_over(result, log)
    assert log_of(log) == {}  # it would not be probed now
    result.write_text(json.dumps({"versions": versions(), "rows": [MEASURED, REFUSED]}))
    take_over(result, log)
    assert list(log_of(log)) == [run(MEASURED).key, run(REFUSED).key]
    forget([run(REFUSED)], log)
    take_over(result, log)
    assert list(log_of(log)) == [run(MEASURED).key]

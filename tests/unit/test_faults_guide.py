"""docs/faults.md says what was measured."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text()
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())


def test_every_row_is_a_measurement():
    measured = TEXT.partition("## How it works")[0]
    rows = re.findall(r"^\| .* \| ([^|]*) \| ([\d.]+) \|$", measured, re.MULTILINE)
    order = [
        "raise",
        "kill",
        "segfault",
        "exit",
        "sleep",
        "spin",
        "stop",
        "kill -9 of the launcher",
        "kill -9 of the command",
    ]
    found = {fault["fault"]: fault for fault in MEASURED["faults"]}
    names = [*order, "torchrun raise", "torchrun sleep"]
    assert set(names) == set(found) and len(rows) == len(names)
    for name, (code, seconds) in zip(names, rows, strict=True):
        assert float(seconds) == round(found[name]["seconds"], 1) and found[name]["left_over"] == 0
        assert not code.isdigit() or int(code) == found[name]["exit_code"]


def test_the_number_of_runs_that_were_killed_in_a_save_is_that_of_the_results():
    kinds = json.loads((ROOT / "benchmarks" / "results" / "kills.json").read_text())["kinds"]
    words = {"one": "of one process", "ddp": "with DDP", "zero2": "with ZeRO-2"}
    plain = TEXT.replace("\n", " ")
    for kind, found in kinds.items():
        assert f"{found['trials']} runs {words[kind]}" in plain
        assert found["went_on_to_the_same_weights"] == found["trials"] and found["wrong"] == []
        assert found["most_intervals_lost"] <= 1


def test_what_was_promised_was_kept():
    limit = MEASURED["limit_s"]
    assert f"`parallel.timeout_s={limit}`" in TEXT
    for fault in MEASURED["faults"]:
        hangs = any(word in fault["fault"] for word in ("sleep", "spin", "stop"))
        assert fault["seconds"] < (limit + 10 if hangs else 5), fault

"""docs/guides/faults.md says what was measured."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guides" / "faults.md").read_text()
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


def test_the_number_of_runs_that_were_killed_is_that_of_the_results():
    kinds = json.loads((ROOT / "benchmarks" / "results" / "kills.json").read_text())["kinds"]
    words = {
        "data": "while they prepared data",
        "save": "in a save",
        "result": "in the final save",
        "merge": "in a merge",
        "ddp": "with DDP",
        "zero2": "with ZeRO-2",
    }
    assert kinds.keys() == words.keys()
    plain = TEXT.replace("\n", " ")
    for kind, found in kinds.items():
        assert f"{found['trials']} {words[kind]}" in plain
        assert found["went_on_to_the_same_weights"] == found["trials"] and found["wrong"] == []
        assert found["most_intervals_lost"] <= 1


def test_what_was_promised_was_kept():
    limit = MEASURED["limit_s"]
    assert f"`parallel.timeout_s={limit}`" in TEXT
    for fault in MEASURED["faults"]:
        hangs = any(word in fault["fault"] for word in ("sleep", "spin", "stop"))
        assert fault["seconds"] < (limit + 10 if hangs else 5), fault


def names_of_tests() -> set[str]:
    """The names of all tests, and of the programs in benchmarks/."""
    files = (ROOT / "tests").rglob("test_*.py")
    found = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    return found | {f"benchmarks/{file.name}" for file in (ROOT / "benchmarks").glob("*.py")}


def test_every_fault_and_every_bad_input_names_a_test_that_exists_or_says_why_not():
    known, seen = names_of_tests(), []
    rows = re.findall(r"^\| ([FB]\d+[^|]*) \| (.*) \|$", TEXT, re.MULTILINE)
    for ids, rest in rows:
        for part in ids.split(", "):
            numbers = [int(number) for number in re.findall(r"\d+", part)]
            seen += [f"{part[0]}{number}" for number in range(numbers[0], numbers[-1] + 1)]
        named = re.findall(r"`(test_\w+|benchmarks/\w+\.py)`", rest)
        assert named or "not tested" in rest, ids
        assert set(named) <= known, set(named) - known
    assert seen == [*(f"F{number}" for number in range(1, 35)), *(f"B{number}" for number in range(1, 65))]


def test_what_is_compared_with_plain_trl_is_tested():
    rows = TEXT.partition("## Beside TRL")[2].partition("\n## ")[0].splitlines()
    compared = [row for row in rows if row.startswith("| ")][2:]
    assert len(compared) == 21
    for row in compared:
        named = re.findall(r"`(test_\w+)`", row.rpartition("|")[0].rpartition("|")[2])
        assert named or "make bench-faults" in row, row
        assert set(named) <= names_of_tests(), row

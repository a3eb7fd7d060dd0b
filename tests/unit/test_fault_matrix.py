"""Every fault and bad input that was thought of (tests/faults.yaml) is seen by a test, or says why not."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MATRIX = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text())
GUIDE = (ROOT / "docs" / "reference" / "faults.md").read_text()
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())


def names_of_tests() -> set[str]:
    """The names of all tests, and of the programs in tests/stress/."""
    files = (ROOT / "tests").rglob("test_*.py")
    found = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    return found | {f"tests/stress/{file.name}" for file in (ROOT / "tests" / "stress").glob("*.py")}


def numbers_of(ids: str) -> list[str]:
    """F8, F9 -> [F8, F9]; B1-B4 -> [B1, B2, B3, B4]."""
    found = []
    for part in ids.split(", "):
        first, *last = map(int, re.findall(r"\d+", part))
        found += [f"{part[0]}{number}" for number in range(first, (last or [first])[0] + 1)]
    return found


@pytest.mark.parametrize(("kind", "letter", "count"), [("faults", "F", 33), ("inputs", "B", 64)])
def test_every_number_is_there_once(kind, letter, count):
    seen = [number for entry in MATRIX[kind] for number in numbers_of(entry["ids"])]
    assert seen == [f"{letter}{number}" for number in range(1, count + 1)]


@pytest.mark.parametrize("kind", ["faults", "inputs", "beside_trl"])
def test_every_entry_names_tests_that_exist_or_says_why_not(kind):
    known = names_of_tests()
    wrong = []
    for entry in MATRIX[kind]:
        unknown = set(entry["seen_by"]) - known
        if unknown or not (entry["seen_by"] or "not tested" in entry["happens"]):
            wrong.append(f"{entry}: {unknown}")
    assert not wrong, "\n".join(wrong)


def test_what_was_promised_was_kept():
    limit = MEASURED["limit_s"]
    assert f"`parallel.timeout_s={limit}`" in GUIDE
    for fault in MEASURED["faults"]:
        hangs = any(word in fault["fault"] for word in ("sleep", "spin", "stop"))
        assert fault["seconds"] < (limit + 10 if hangs else 5), fault
        assert fault["left_over"] == 0, fault


def test_all_runs_that_were_killed_went_on():
    kinds = json.loads((ROOT / "benchmarks" / "results" / "kills.json").read_text())["kinds"]
    for found in kinds.values():
        assert found["went_on_to_the_same_weights"] == found["trials"] and found["wrong"] == []
        assert found["most_intervals_lost"] <= 1

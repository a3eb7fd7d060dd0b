"""The proof on a GPU, tried out on the CPU: what counts as done, and that a slice goes on where the last one stopped."""

import json
import time

import pytest
import torch

from benchmarks import gpu_proof
from benchmarks.gpu_proof import PARTS, Slice, all_cases_done, all_turns_done, gathered, outcome, page
from benchmarks.throughput import COURSES, ROUNDS
from benchmarks.throughput_sides import sides
from scripts.docs.memory_tables import gpu_proofs


@pytest.fixture
def now(tmp_path):
    return Slice(torch.device("cpu"), tmp_path, time.monotonic() + 600)


def test_a_result_counts_only_on_the_same_hardware_with_the_same_versions(now):
    path = now.results / "x.json"
    assert now.result("x.json") == {}
    path.write_text(json.dumps({**now.made, "passed": 3}))
    assert now.result("x.json")["passed"] == 3
    path.write_text(json.dumps({**now.made, "versions": {"torch": "1.0"}, "passed": 3}))
    assert now.result("x.json") == {}


def test_a_benchmark_is_done_when_nothing_of_it_is_left():
    assert not all_cases_done({}) and not all_cases_done({"cases": {"done": 3, "planned_for": 4}})
    assert all_cases_done({"cases": {"done": 4, "planned_for": 4}})
    turns = [{}] * (ROUNDS * sum(len(sides("cuda", course.mode)) for course in COURSES))
    assert all_turns_done({"turns": turns}) and not all_turns_done({"turns": turns[1:]})


def test_a_report_is_counted_and_failures_are_named(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    assert outcome(report) == {"passed": 1, "failed": ["b"], "skipped": ["c"]}


def test_what_is_done_is_not_repeated_and_the_page_says_what_was_found(now, monkeypatch, capsys):
    ran = []
    parts = [
        gpu_proof.Part(
            part.name,
            part.file,
            lambda now, name=part.name: ran.append(name) or name == "speed",
            part.is_done,
        )
        for part in PARTS
    ]
    monkeypatch.setattr(gpu_proof, "PARTS", tuple(parts))
    record = {**now.made, "passed": 40, "failed": ["that one"], "skipped": []}
    (now.results / gpu_proof.TESTS).write_text(json.dumps(record))
    assert gpu_proof.prove(now) == 1 and ran == ["heads", "speed", "memory", "sharded"]
    assert "Tests: 40 passed, 1 failed ['that one']" in page(now)
    assert "failed: speed" in capsys.readouterr().out
    late = Slice(now.device, now.results, time.monotonic() + 10)
    assert gpu_proof.prove(late) == 0 and ran == ["heads", "speed", "memory", "sharded"]


@pytest.mark.slow
def test_the_memory_benchmark_runs_from_it_with_a_tiny_model(now):
    """The speed benchmark is started in the same way; test_throughput.py runs what it does."""
    (memory,) = [part for part in PARTS if part.name == "memory"]
    assert memory.run(now) == 0


def test_all_results_of_this_hardware_are_in_one_file_and_in_a_table(now):
    assert gpu_proofs(now.results / "gpu") == "No file yet."
    errors = {"allocated": {"median": 0.0012, "p95": 0.01, "worst": -0.02}}
    found = {
        "gpu_tests.json": {"passed": 40, "failed": ["one"], "skipped": []},
        "sizing_gpu.json": {"cases": {"done": 2, "planned_for": 3}, "errors": errors},
        "throughput_gpu.json": {"turns": [], "summary": [{"times_as_fast": 1.25}, {"times_as_fast": None}]},
    }
    for name, record in found.items():
        (now.results / name).write_text(json.dumps({**now.made, **record}))
    path = gathered(now)
    tree = json.loads(path.read_text())
    assert tree["made_on"] == now.made["made_on"] and tree["parts"]["sharded"] == {}
    assert tree["parts"]["memory"]["errors"] == errors
    row = gpu_proofs(path.parent).splitlines()[-1]
    assert row.split(" | ")[2:] == ["40, 1 failed", "0.12% / -2.00%", "-", "-", "1.25 to 1.25 |"]


def test_parts_share_the_time_but_tests_take_theirs(now, monkeypatch):
    had = []
    parts = [
        gpu_proof.Part(
            part.name,
            part.file,
            lambda slice, name=part.name: had.append((name, round(slice.left_s, -1))) or 0,
            part.is_done,
            part.continues,
        )
        for part in PARTS
    ]
    monkeypatch.setattr(gpu_proof, "PARTS", tuple(parts))
    gpu_proof.prove(now)
    assert had == [("tests", 600), ("heads", 600), ("speed", 200), ("memory", 300), ("sharded", 600)]


def test_without_a_gpu_it_says_how_to_try_it_out():
    with pytest.raises(SystemExit, match='ARGS="--device cpu"'):
        gpu_proof.main([])

"""The proof on a GPU, tried out on the CPU: its order, what counts as done, and that it goes on where it stopped."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_proof, gpu_run, gpu_tests
from benchmarks.gpu_cases import Target
from benchmarks.gpu_proof import PARTS, Slice, all_cases_done, all_turns_done, gathered, page
from benchmarks.measurement_log import MeasurementLog
from benchmarks.throughput import ROUNDS, all_turns
from scripts.docs.memory_tables import gpu_proofs

CPU = torch.device("cpu")
RUN = {
    "run": "again", "model": "small-llama", "problem": None, "predicted_peak_bytes": 1000, "measured_peak_bytes": 1001,
    "tokens_per_second": 50.0, "command_seconds": 9.6,
}  # fmt: skip


@pytest.fixture
def now(tmp_path):
    return Slice.begun(CPU, tmp_path, 10)


def put(now, **results):
    """Writes results of parts, as made here."""
    files = {part.name: part.file for part in PARTS}
    for name, record in results.items():
        (now.results / files[name]).write_text(json.dumps({**now.made, **record}))


def with_parts(monkeypatch, did):
    """Parts that call did(name, words), which says how each ends."""
    parts = [replace(part, main=lambda words, name=part.name: did(name, words)) for part in PARTS]
    monkeypatch.setattr(gpu_proof, "PARTS", tuple(parts))


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
    for rounds in (1, ROUNDS):
        turns = [{}] * len(all_turns(Target("cuda", ""), rounds))
        assert all_turns_done(rounds)({"turns": turns}) and not all_turns_done(rounds)({"turns": turns[1:]})


def test_the_default_is_timed_first_then_what_could_become_it():
    first, *others = all_turns(Target("cuda", "NVIDIA H200", (9, 0)), 1)
    assert first == (0, "LoRA 8B, packed", "sft-play")
    assert {side for _, course, side in others[:3] if course == first[1]} >= {"trl", "compiled"}


def test_what_counts_most_comes_first_and_what_is_done_is_not_repeated(now, monkeypatch, capsys):
    ran = []
    with_parts(monkeypatch, lambda name, words: ran.append((name, words)) or int(name == "speed"))
    put(
        now,
        memory={"cases": {"done": 4, "planned_for": 4}, "planned_runs": 0, "planned_runs_out_of_memory": 0},
    )
    assert gpu_proof.prove(now) == 1
    assert [name for name, _ in ran] == ["run", "speed", "heads", "tests", "sharded", "plans", "speed again"]
    minutes = {name: float(words[words.index("--minutes") + 1]) for name, words in ran}
    assert minutes["run"] == pytest.approx(10, abs=0.1) and minutes["speed"] == pytest.approx(6, abs=0.1)
    assert "failed: speed" in capsys.readouterr().out


def test_an_error_of_a_part_ends_no_other_and_without_time_none_begins(now, monkeypatch, capsys):
    ran = []

    def breaks(name, words):
        ran.append(name)
        raise RuntimeError("unforeseen")

    with_parts(monkeypatch, breaks)
    assert gpu_proof.prove(now) == 1 and len(ran) == len(PARTS)
    late = replace(now, deadline=now.deadline - 590)
    assert gpu_proof.prove(late) == 0 and len(ran) == len(PARTS)
    said = capsys.readouterr()
    assert "unforeseen" in said.err
    assert "The same command again goes on from here." in " ".join(said.out.split())


def test_the_page_says_what_was_found(now):
    put(now, tests={"passed": 40, "failed": ["that one"], "skipped": []}, run={"runs": [RUN]})
    said = page(now)
    assert "Tests: 40 passed, 1 failed ['that one']" in said
    assert (
        "small-llama, again run: peak 1,000 bytes predicted, 1,001 measured; 50 tokens/s; 10 s in all" in said
    )


def test_all_results_of_this_hardware_are_in_one_file_and_in_a_table(now):
    assert gpu_proofs(now.results / "gpu") == "No file yet."
    errors = {"allocated": {"median": 0.0012, "p95": 0.01, "worst": -0.02}}
    put(
        now,
        tests={"passed": 40, "failed": ["one"], "skipped": []},
        memory={"cases": {"done": 2, "planned_for": 3}, "errors": errors},
        speed={"turns": [], "summary": [{"times_as_fast": 1.25}, {"times_as_fast": None}]},
    )
    path = gathered(now)
    tree = json.loads(path.read_text())
    assert tree["made_on"] == now.made["made_on"] and tree["parts"]["sharded"] == {}
    assert tree["parts"]["memory"]["errors"] == errors and not {"plans", "speed again"} & set(tree["parts"])
    row = gpu_proofs(path.parent).splitlines()[-1]
    assert row.split(" | ")[2:] == ["40, 1 failed", "0.12% / -2.00%", "-", "-", "1.25 to 1.25 |"]


def test_without_a_gpu_it_says_how_to_try_it_out():
    with pytest.raises(SystemExit, match='ARGS="--device cpu"'):
        gpu_proof.main([])


def test_a_model_is_trained_that_the_gpu_can_hold():
    sizes = {24: "Llama-3.2-3B", 80: "Llama-3.1-8B", 8: "Qwen2.5-0.5B"}
    assert {size: gpu_run.model_for(size * 2**30) for size in sizes} == sizes


def test_a_test_whose_end_failed_has_failed(tmp_path):
    lines = MeasurementLog(tmp_path / "lines.jsonl", CPU)
    for name, outcome in (("a", "passed"), ("a", "failed"), ("b", "passed"), ("c", "skipped")):
        lines.add({"test": name, "outcome": outcome})
    assert gpu_tests.outcomes(lines) == {"a": "failed", "b": "passed", "c": "skipped"}


@pytest.fixture
def by_no_worker(monkeypatch):
    """What a worker of pytest-xdist starts would take itself for one, and log nothing."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("by_no_worker")
def test_tests_that_have_a_result_are_not_run_again(tmp_path):
    words = ["--device", "cpu", "--quick", "--results", str(tmp_path)]
    assert gpu_tests.main(words) == 0
    first = json.loads((tmp_path / "gpu_tests.json").read_text())
    lines = (tmp_path / "tests_cpu.lines.jsonl").read_text()
    assert first["finished"] and first["passed"] > 3 and not first["failed"]
    assert gpu_tests.main(words) == 0 and (tmp_path / "tests_cpu.lines.jsonl").read_text() == lines
    assert json.loads((tmp_path / "gpu_tests.json").read_text()) == first


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("by_no_worker")
def test_a_rehearsal_measures_everything_with_tiny_models(now, capsys):
    """Eight minutes on two idle cores: each figure starts a Python of its own."""
    patient = replace(now, deadline=now.deadline + 3600)
    assert gpu_proof.prove(patient) == 0, capsys.readouterr().out
    (path,) = (now.results / "gpu").iterdir()
    parts = json.loads(path.read_text())["parts"]
    assert [run["run"] for run in parts["run"]["runs"]] == list(gpu_run.RUNS)
    first, again = parts["run"]["runs"]
    assert again["predicted_peak_bytes"] == first["predicted_peak_bytes"] and again["device"] == "cpu"
    assert len(parts["speed"]["turns"]) > 3 and not any(turn["problem"] for turn in parts["speed"]["turns"])
    for name in ("memory", "sharded"):
        assert (
            parts[name]["cases"]["done"] == parts[name]["cases"]["planned_for"]
            and not parts[name]["problems"]
        )
    assert parts["memory"]["planned_runs"] > 0 and parts["tests"]["passed"] > 3 and parts["heads"]["found"]
    said = capsys.readouterr().out
    assert "This was a rehearsal: it measured no GPU" in said and "Please send it" not in said
    assert not (now.results / "run").exists()

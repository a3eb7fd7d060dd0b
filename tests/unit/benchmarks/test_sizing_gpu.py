"""The GPU benchmark without a GPU: its cases, its meter, and that a run that is cut off loses nothing."""

import json
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from benchmarks.device_meter import measure, two_steps
from benchmarks.gpu_cases import (
    MODES,
    Target,
    architecture,
    measured_cases,
    planned_groups,
    predict,
    spec_from_json,
    spec_to_json,
)
from benchmarks.measurement_log import MeasurementLog
from benchmarks.random_models import random_model
from benchmarks.sizing_gpu import alternately, figures, missed_targets, run_case, with_errors
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.sizing.meters.cpu import storage_bytes
from sft_play.sizing.meters.phases import CudaMeter
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import PaddedRows, StepSpec

CPU, H200 = torch.device("cpu"), Target("cuda", "NVIDIA H200", (9, 0))
HERE = Target("cpu", "the CPU")


def small_spec(**changes) -> StepSpec:
    return step_of(**{"mode": "lora", "lora": LoraSettings(r=4), "batch": PaddedRows(2, 32), **changes})


def tuning(spec: StepSpec) -> TuningConfig:
    return TuningConfig(mode=spec.mode, lora=spec.lora if spec.mode != "full" else LoraSettings())


def test_the_grid_is_the_issues_and_any_first_part_of_it_has_every_model_and_mode():
    cases = measured_cases(H200, quick=False)
    assert len(cases) >= 60 and len({case.key for case in cases}) == len(cases)
    assert {case.spec.activations.policy for case in cases} == {"keep", "recompute"}
    assert {case.spec.joined for case in cases} == {True, False}
    assert {case.spec.longest_sequence for case in cases} == {512, 1024, 2048, 4096, 8192}
    everything = {(case.model, case.spec.mode) for case in cases}
    assert {(case.model, case.spec.mode) for case in cases[: len(everything)]} == everything
    assert {mode for _, mode in everything} == set(MODES)
    assert len(list(planned_groups(H200, quick=False))) == len(everything)


def test_a_spec_survives_json():
    for case in measured_cases(H200, quick=False)[:6]:
        assert spec_from_json(json.loads(json.dumps(spec_to_json(case.spec)))) == case.spec


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_a_random_model_is_the_predicted_one(mode):
    spec = small_spec(mode=mode)
    assert (
        storage_bytes(random_model(architecture("small-qwen3"), spec, tuning(spec), CPU))
        == predict("small-qwen3", spec, HERE)["weights"]
    )


def test_the_meter_books_each_phase_of_the_second_step_by_the_allocators_counters(monkeypatch):
    """The counters of a GPU are played by a recorder that counts the real tensors of this CPU."""
    spec = small_spec(mode="full")
    model = random_model(architecture("small-llama"), spec, tuning(spec), CPU)
    recorder = AllocationRecorder()
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.add(tensor, "weights")
    assert recorder.live == storage_bytes(model)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: recorder.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: recorder.peak)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: setattr(recorder, "peak", recorder.live)
    )
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 0})
    with recorder:
        found = two_steps(model, spec, CPU, CudaMeter(CPU))
    predicted = predict("small-llama", spec, HERE)
    assert set(found.phases) == {"forward", "backward", "optimizer", "evaluation"}
    for phase, size in found.phases.items():
        assert size == pytest.approx(predicted["phases"][phase], rel=1e-3), phase
    assert found.in_layers["backward"] == pytest.approx(predicted["in_layers"]["backward"], rel=1e-3)
    assert found.reserved == max(found.phases.values()) and found.retries == 0


def test_a_case_is_measured_and_its_line_predicts_it_again(tmp_path):
    case = replace(measured_cases(HERE, quick=True)[1], allowed_bytes=2**40)
    lines = MeasurementLog(tmp_path / "lines.jsonl", CPU)
    lines.add(run_case(case, CPU))
    (row,) = lines.read()
    found = with_errors(row, predict(row["model"], spec_from_json(row["spec"]), HERE))
    assert row["key"] == case.key and row["measured"]["problem"] is None
    assert abs(found["error"]) < 1e-3 and abs(found["error_above_weights"]) < 1e-3
    assert not missed_targets(figures([found], 1), HERE)


def test_more_than_was_allowed_and_steps_that_break_are_results():
    case = replace(
        measured_cases(HERE, quick=True)[1], budget_bytes=1000, allowed_bytes=1000, memory_is_limit=True
    )
    line = run_case(case, CPU)
    assert line["measured"]["out_of_memory"]
    row = with_errors(line, predict(case.model, case.spec, HERE))
    assert "1 planned runs ran out of memory" in missed_targets(figures([row], 1), HERE)

    def no_model():
        raise RuntimeError("no such kernel\nmore")

    broken = measure(no_model, case.spec, CPU)
    assert broken.problem == "RuntimeError: no such kernel" and not broken.phases


def test_lines_that_were_cut_off_or_made_elsewhere_do_not_count(tmp_path):
    lines = MeasurementLog(tmp_path / "lines.jsonl", CPU)
    lines.add({"key": "one"})
    other = MeasurementLog(lines.path, CPU)
    other.made = other.made | {"versions": {"torch": "1.0"}}
    other.add({"key": "two"})
    with lines.path.open("a") as file:
        file.write('{"key": "thr')
    with pytest.warns(UserWarning, match="not valid JSON"):
        assert lines.read() == [{"key": "one"}]


def test_steps_are_measured_while_plans_are_made_and_then_in_turn():
    slow, fast = Future(), Future()
    fast.set_result(["p1", "p3"])
    order = alternately(["m1", "m2", "m3", "m4"], [fast, slow])
    assert [next(order), next(order)] == ["m1", "m2"]
    slow.set_result(["p2"])
    assert list(order) == ["m3", "p1", "m4", "p2", "p3"]


def test_targets_that_are_missed_are_named():
    grid = {"budget_bytes": None, "measured": {"problem": None, "out_of_memory": False}}
    rows = [
        grid
        | {"key": str(n), "error": e, "error_above_weights": e, "error_in_layers": e, "error_reserved": e}
        for n, e in enumerate((0.02, -0.05, 0.02))
    ]
    found = figures(rows, 3)
    assert found["worst_under_prediction_of_reserved"] == pytest.approx(1 / 0.95 - 1)
    assert missed_targets(found, H200) == ["allocated, median: 2.00% > 1%", "allocated, p95: 5.00% > 3%"]

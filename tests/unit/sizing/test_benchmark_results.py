"""Predicts the steps in benchmarks/results again, without running them: accuracy must not get worse."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_cases import Target, predict, spec_from_json
from benchmarks.published import deepspeed_figures, trl_loss_figures, trl_sft_figures
from benchmarks.sharded_cases import case_of
from benchmarks.sharding import TARGET as SHARDED_TARGET
from benchmarks.sharding import compare, precision_of
from benchmarks.sizing import SHAPES, Result, Shape, of_autocast, spec_of, spread
from benchmarks.sizing import TARGETS as CPU_TARGETS
from benchmarks.sizing import predict as predict_small
from benchmarks.sizing_gpu import with_errors
from benchmarks.small_models import small_config
from sft_play.choices.kernels import COMPILED
from sft_play.planning.speed.measurement import STEP_CALLS
from sft_play.sizing.estimate import budget
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.meters.product_scratch import product_scratch
from sft_play.units import GIB, MIB

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
GPU_TARGETS = {"median": 0.01, "p95": 0.03}
AGAIN = 16  # approximate number of steps to predict again


def results_of(name: str) -> dict[str, Any]:
    path = RESULTS / name
    if not path.exists():
        pytest.skip(f"benchmarks/results/{name} does not exist: the benchmark has not been run")
    return json.loads(path.read_text())


def every(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the rows, from the first to the last, with a stride that shares no factor with the grid's."""
    stride = max(1, len(rows) // AGAIN)
    while math.gcd(stride, 12) > 1:
        stride += 1
    return rows[::stride]


def assert_within(errors: list[float], targets: dict[str, float]) -> None:
    found = spread(errors)
    assert all(found[key] <= most for key, most in targets.items()), found


def test_the_measured_steps_of_the_cpu_meet_the_targets():
    rows = results_of("sizing_cpu.json")["configurations"]
    assert len(rows) >= 120
    for name in ("error", "error_above_weights"):
        for shape in SHAPES:
            errors = [row[name] for row in rows if row["shape"] == shape.name]
            assert_within(errors, CPU_TARGETS[shape.mixed_precision])


@pytest.mark.slow
def test_steps_of_the_cpu_are_predicted_again_within_the_targets():
    tree = results_of("sizing_cpu.json")
    shapes = {entry["name"]: Shape(**entry) for entry in tree["shapes"]}
    sample = every(tree["configurations"])
    assert len({row["architecture"] for row in sample}) == 12 and len({row["mode"] for row in sample}) == 3
    results = []
    for row in sample:
        shape = shapes[row["shape"]]
        spec = spec_of(shape, row["mode"], row["checkpointing"], row["packing"])
        step = predict_small(Traces(small_config(row["architecture"], shape.geometry)), spec)
        peaks = {phase: peak.bytes for phase, peak in step.peaks().items() if phase in row["measured"]}
        known = {name: row[name] for name in Result.__dataclass_fields__}
        results.append(replace(Result(**known), predicted=peaks))
    for autocast, targets in CPU_TARGETS.items():
        again = of_autocast(results, autocast)
        assert_within([result.error for result in again], targets)
        assert_within([result.error_above_weights for result in again], targets)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharding.json", "sharding_mixed.json", "sharding_in_ram.json"])
def test_steps_that_fsdp2_divided_are_predicted_again_within_the_target(name):
    """In fp32 alone on a processor whose products of 16 bits no rule describes, as with AMX."""
    known, regular = results_of(name)["rows"], all(rule.holds for _, rule in product_scratch("bfloat16", 1))
    alike = [row for row in known if regular or precision_of(row) == "fp32"]
    rows = [compare(case_of(row), row["measured"]) for row in every(alike)]
    assert len({row["architecture"] for row in rows}) >= 6
    assert max(abs(row["error"]) for row in rows) <= SHARDED_TARGET


def test_steps_of_a_gpu_are_predicted_again_within_the_targets():
    tree = results_of("sizing_gpu.json")
    made = tree["made_on"]
    target = Target(made["device"], made["gpu"], tuple(made["compute_capability"]))
    rows = [row for row in tree["cases_run"] if row["measured"]["phases"]]
    again = [
        with_errors(row, predict(row["model"], spec_from_json(row["spec"]), target)) for row in every(rows)
    ]
    assert_within([row["error"] for row in again], GPU_TARGETS)
    assert_within([row["error"] for row in rows if row["budget_bytes"] is None], GPU_TARGETS)


def test_what_the_trainer_takes_between_two_steps_of_a_gpu_was_measured():
    calls = [run["calls"] for run in results_of("between_steps.json")["runs"]]
    assert min(calls) <= STEP_CALLS <= max(calls)


@pytest.mark.thorough
def test_steps_on_an_h200_are_predicted_again_to_what_they_reserved():
    """Full steps of two micro-batches, too, whose gradients are born between the activations of the first one."""
    tree = results_of("gpu/NVIDIA-H200-x1.json")
    made = tree["made_on"]
    target = Target(made["device"], made["gpu"], tuple(made["compute_capability"]))
    full = [row for row in tree["steps"] if row["spec"]["mode"] == "full"]
    for row in full:
        found, measured = predict(row["model"], spec_from_json(row["spec"]), target), row["measured"]
        assert found["reserved"] == row["predicted"]["reserved"]
        process = measured["reserved"] + measured["outside_allocator"]
        assert found["reserved"] == pytest.approx(measured["reserved"], rel=0.002)
        assert found["reserved"] + found["context"] == pytest.approx(process, rel=0.002)
    assert len(full) == 2 and all(abs(row["error_reserved"]) < 0.002 for row in tree["steps"])


def test_planned_runs_of_a_gpu_did_not_run_out_of_memory_and_used_the_budget():
    tree = results_of("sizing_gpu.json")
    assert tree["planned_runs"] >= 60 and tree["planned_runs_out_of_memory"] == 0
    assert tree["least_used_of_budget"] >= 0.9


@pytest.mark.thorough
def test_published_figures_are_predicted_as_committed():
    known = {figure["what"]: figure["predicted"] for figure in results_of("sizing_published.json")["figures"]}
    found = {
        figure.what: figure.predicted
        for figure in (*deepspeed_figures(), *trl_loss_figures(), *trl_sft_figures())
    }
    assert len(found) >= 10
    for what, predicted in found.items():
        assert predicted == pytest.approx(known[what], rel=1e-4), what


def assert_covers(known: budget.MeasuredError, worst: float, kept_free: budget.Guard) -> None:
    """The committed figure is the measured one, and the guard covers it with the stated safety factor."""
    assert worst <= known.worst <= 1.05 * worst + 1e-6, f"{known.where}: write worst={worst:.4g}"
    assert kept_free.bytes >= budget.SAFETY * worst * 80 * GIB


def test_the_guard_covers_what_was_under_predicted_on_the_cpu():
    rows = results_of("sizing_cpu.json")["configurations"]
    worst = max(1 / (1 + row["error"]) - 1 for row in rows)
    assert_covers(budget.CPU_ERROR, worst, budget.guard("cpu", 80 * GIB))


def test_the_guard_covers_what_was_under_predicted_on_a_gpu():
    worst: dict[tuple[int, int], float] = {}
    for path in sorted((RESULTS / "gpu").glob("*.json")):
        tree = json.loads(path.read_text())
        on, memory = tuple(tree["made_on"]["compute_capability"]), tree["parts"]["memory"]
        worst[on] = max(worst.get(on, 0.0), memory["worst_under_prediction_of_reserved"] or 0.0)
    assert worst.keys() == budget.GPU_ERRORS.keys()
    for on, error in worst.items():
        assert_covers(budget.GPU_ERRORS[on], error, budget.guard("cuda", 80 * GIB, measured_on=on))


def test_the_context_of_a_measured_gpu_is_what_its_steps_took_at_most():
    steps = results_of("gpu/NVIDIA-H200-x1.json")["steps"]
    most = max(step["measured"]["outside_allocator"] for step in steps)
    assert 0 <= budget.CONTEXTS[9, 0] - most < MIB


def test_drawn_runs_with_compiled_layers_took_what_was_predicted():
    result = results_of("compiled_drawn_cpu.json")
    errors = [row["error"] for row in result["rows"] if "error" in row]
    assert len(result["rows"]) == 40 and len(errors) == 32
    assert max(map(abs, errors)) < result["target"]


def test_runs_with_images_on_two_processes_took_what_the_docs_say():
    errors = results_of("vision_runs_cpu.json")["errors"]
    assert (errors["all"]["within_target"], errors["all"]["runs"]) == (59, 60)
    assert errors["all"]["worst_low"] > -0.001 and errors["all"]["worst_high"] == errors["ddp"]["worst_high"]
    divided = results_of("vision_zero3_cpu.json")["errors"]["deepspeed_z3"]
    assert (divided["within_target"], divided["runs"]) == (10, 12)
    assert divided["worst_low"] > -0.001 and round(divided["worst_high"], 3) == 0.004


def test_steps_on_a_gpu_took_what_is_predicted_of_them_now():
    turns = results_of("gpu/NVIDIA-H200-x1.json")["turns"]
    errors = {
        turn["course"] + turn["side"]: turn["predicted_peak_bytes"] / turn["peak_bytes"] - 1
        for turn in turns
        if turn["side"] != "trl_tuned" and "refuted" not in turn
    }
    assert errors and all(abs(error) < 1e-6 for error in errors.values())


def test_what_compiled_layers_are_expected_to_cost_was_measured_and_their_gain_is_predicted():
    turns = results_of("gpu/NVIDIA-H200-x1.json")["turns"]
    own, compiled = (
        next(turn for turn in turns if turn["course"].startswith("LoRA") and turn["side"] == side)
        for side in ("sft-play", "compiled")
    )
    seconds, times_as_fast = COMPILED.expected["cuda"]
    assert round(compiled["step_seconds"][0]) == seconds
    own, fused = (sum(side["data_sheet_step_seconds"]) for side in (own, compiled))
    assert round(own / fused, 2) == times_as_fast

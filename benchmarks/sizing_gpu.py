"""Measures the accuracy of the memory prediction on a GPU: real steps of models from 0.5B to 8B parameters.

    make bench-sizing-gpu                                     # on a CUDA machine, under nine minutes
    make bench-sizing-gpu ARGS="--device cpu --quick"         # the same program with tiny models

The first form writes benchmarks/results/sizing_gpu.json, the second one writes nothing.

Each step is two optimizer steps of two micro-batches and an evaluation batch, with the trainer's code for
building the model and computing the loss, and random weights that are created on the device. Measured are
PyTorch's allocated and reserved peaks by phase, memory kept by libraries (cuBLAS workspaces) and memory
outside the allocator (the CUDA context). Then plans are made for random budgets, the allocator is limited
to budget and guard (torch.cuda.set_per_process_memory_fraction), and the planned step is run; it must not run
out of memory. Measurements are logged one by one: run the same command again to continue an interrupted
benchmark.

Until benchmarks/results/sizing_gpu.json exists, there are no GPU results.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in training

import torch
from rich.table import Table

from benchmarks.alone import figure
from benchmarks.device_meter import Measured, measure
from benchmarks.gpu_cases import (
    Case,
    Target,
    architecture,
    case_from_json,
    case_to_json,
    measured_cases,
    planned_cases,
    planned_groups,
    planned_tokens,
    predict,
    spec_from_json,
)
from benchmarks.measurement_log import RESULTS, MeasurementLog, made_on, write_result
from benchmarks.random_models import random_model
from benchmarks.sizing import spread
from sft_play.config.schema import TuningConfig
from sft_play.ui.console import console
from sft_play.units import format_bytes

TARGETS = {"median": 0.01, "p95": 0.03}  # of the allocated peak
USED_AT_LEAST = 0.9  # of the budget, if memory is the limit
FINISHING_S = 20  # time reserved for the predictions and the result
ERRORS = {
    "allocated": "error",
    "allocated - weights": "error_above_weights",
    "highest in a decoder layer - weights": "error_in_layers",
    "reserved": "error_reserved",
}


def local_target(device: torch.device) -> Target:
    """This machine's device."""
    made = made_on(device)
    if device.type == "cpu":
        return Target("cpu", "the CPU")
    return Target("cuda", made["gpu"], tuple(made["compute_capability"]))


def run_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Measures one case; the result is complete enough to predict the case again."""
    torch.manual_seed(0)
    # The real packed batch has one sequence per row, the traced one has two halves.
    spec = replace(case.spec, cut_at_longest=case.spec.joined)
    tuning = TuningConfig(mode=spec.mode, lora=spec.lora)
    found = measure(
        lambda: random_model(architecture(case.model), spec, tuning, device),
        spec,
        device,
        allowed_bytes=case.allowed_bytes,
    )
    return measured_case(case, found)


def measured_case(case: Case, found: Measured) -> dict[str, Any]:
    """The case and what was measured, as JSON."""
    return case_to_json(case) | {"measured": asdict(found) | {"peak": found.peak}}


def step(tree: dict[str, Any], device_type: str) -> dict[str, Any]:
    """`run_case` for a process of its own."""
    warnings.simplefilter("ignore")
    return run_case(case_from_json(tree), torch.device(device_type))


def with_errors(line: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Adds the prediction and its relative errors, which are positive if the prediction is too high."""
    measured = line["measured"]
    errors = dict.fromkeys(ERRORS.values())
    if measured["phases"]:
        top, real = max(predicted["phases"].values()), measured["peak"]
        in_layers, real_in_layers = (max(side["in_layers"].values()) for side in (predicted, measured))
        weights = measured["weights"]
        errors["error"] = top / real - 1
        errors["error_above_weights"] = (top - weights) / (real - weights) - 1
        errors["error_in_layers"] = (in_layers - weights) / (real_in_layers - weights) - 1
        if measured["reserved"]:
            errors["error_reserved"] = predicted["reserved"] / measured["reserved"] - 1
    process = (measured["reserved"] or measured["peak"]) + predicted["context"]
    used = process / line["budget_bytes"] if line["budget_bytes"] else None
    return line | {"predicted": predicted, "used_of_budget": used, **errors}


def figures(rows: list[dict[str, Any]], of: int) -> dict[str, Any]:
    """Summarizes the rows: errors of measured steps, and how planned runs ended."""
    finished = [row for row in rows if not row["measured"]["problem"]]
    grid = [row for row in finished if row["budget_bytes"] is None]
    planned = [row for row in rows if row["budget_bytes"] is not None]
    limited = [row for row in planned if row["memory_is_limit"] and not row["measured"]["problem"]]
    values: dict[str, list[float]] = {}
    for name, key in ERRORS.items():
        values[name] = [row[key] for row in grid if row[key] is not None]
    # Relative to the prediction: what a guard in proportion to it must cover.
    under_predictions = [1 / (1 + error) - 1 for error in values["reserved"]]
    out_of_memory = [row for row in planned if row["measured"]["out_of_memory"]]
    problems = [row for row in rows if row["measured"]["problem"]]
    used = [row["used_of_budget"] for row in limited]
    errors = {name: spread(found) for name, found in values.items() if found}
    return {
        "cases": {"planned_for": of, "done": len(rows)},
        "measured_steps": len(grid),
        "errors": errors,
        "worst_under_prediction_of_reserved": max(0.0, *under_predictions) if under_predictions else None,
        "planned_runs": len(planned),
        "planned_runs_out_of_memory": len(out_of_memory),
        "planned_runs_where_memory_is_the_limit": len(limited),
        "least_used_of_budget": min(used, default=None),
        "problems": [f"{row['key']}: {row['measured']['problem']}" for row in problems],
    }


def missed_targets(found: dict[str, Any], target: Target) -> list[str]:
    """A sentence for each target that was missed."""
    allocated = found["errors"].get("allocated", {})
    missed = [
        f"allocated, {key}: {allocated[key]:.2%} > {most:.0%}"
        for key, most in TARGETS.items()
        if allocated.get(key, 0) > most
    ]
    if found["planned_runs_out_of_memory"]:
        missed.append(f"{found['planned_runs_out_of_memory']} planned runs ran out of memory")
    used = found["least_used_of_budget"]
    if target.kind == "cuda" and used is not None and used < USED_AT_LEAST:
        missed.append(f"a planned run used only {used:.0%} of its budget")
    return missed


def result_table(found: dict[str, Any], target: Target) -> Table:
    """The figures for the console."""
    table = Table(
        title=f"Predicted against measured memory: {found['measured_steps']} real steps on {target.name}"
    )
    for name in ("error of", "median", "95th percentile", "worst", "mean signed"):
        table.add_column(name, justify="left" if name == "error of" else "right")
    for name, errors in found["errors"].items():
        table.add_row(
            name, *(f"{errors[key]:.3%}" for key in ("median", "p95", "worst")), f"{errors['bias']:+.3%}"
        )
    table.caption = (
        f"{found['planned_runs']} planned runs: {found['planned_runs_out_of_memory']} out of memory"
    )
    used = found["least_used_of_budget"]
    if used is not None:
        table.caption += f", at least {used:.1%} of the budget used where memory was the limit"
    return table


def case_line(line: dict[str, Any]) -> str:
    """A measured case for the console."""
    measured = line["measured"]
    if measured["problem"]:
        return f"{line['key']:58} {measured['problem']}"
    reserved = f", reserved {format_bytes(measured['reserved'])}" if measured["reserved"] else ""
    return f"{line['key']:58} {format_bytes(measured['peak']):>10}{reserved}  {measured['seconds']} s"


def alternately(cases: list[Case], groups: list[Future]) -> Iterator[Case]:
    """Measured steps until the plans are ready, then alternating with planned runs."""
    rest = iter(cases)
    for case in rest:
        yield case
        if all(group.done() for group in groups):
            break
    plans = chain.from_iterable(zip_longest(*[group.result() for group in groups]))
    for pair in zip_longest(rest, (case for case in plans if case is not None)):
        yield from (case for case in pair if case is not None)


def run(
    lines: MeasurementLog, device: torch.device, quick: bool, deadline: float, plans: Executor | None
) -> int:
    """Measures the cases that are not in the log until the time is up; returns the total number of cases.

    Each case has a process of its own.

    Args:
        lines: the measurement log.
        device: the device.
        quick: tiny models only.
        deadline: time.monotonic() at which to stop.
        plans: processes that make plans; without them, only the steps of the grid are measured.
    """
    target = local_target(device)
    models = list(planned_groups(target, quick)) if plans else []
    groups = [plans.submit(planned_cases, *group) for group in models] if plans else []
    steps = measured_cases(target, quick)
    done = {line["key"] for line in lines.read()}
    for case in (each for each in alternately(steps, groups) if each.key not in done):
        line = figure("benchmarks.sizing_gpu:step", case_to_json(case), device.type, deadline=deadline)
        if line is None:
            break
        if "measured" not in line:
            line = measured_case(case, Measured(problem=line["problem"]))
        lines.add(line)
        console().print(case_line(line), highlight=False, soft_wrap=True, markup=False)
    for group in groups:
        group.cancel()
    return len(steps) + sum(len(planned_tokens(model, quick)) for model, *_ in models)


def predicted_rows(lines: MeasurementLog, target: Target, pool: Executor) -> list[dict[str, Any]]:
    """All measurements with their predictions, which need no GPU and can be repeated anywhere."""
    rows = lines.read()
    predictions = [pool.submit(predict, row["model"], spec_from_json(row["spec"]), target) for row in rows]
    return [with_errors(row, future.result()) for row, future in zip(rows, predictions, strict=True)]


def _quiet_worker() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker's CUDA context would use memory of the measured device
    warnings.simplefilter("ignore")


def workers() -> ProcessPoolExecutor:
    """Processes that predict while the device is busy."""
    count = max(1, min(8, (os.cpu_count() or 2) - 1))
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet_worker
    )


def arguments(description: str | None, minutes: float) -> argparse.ArgumentParser:
    """The arguments of all GPU benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few tiny models; no result in this project")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="time limit in minutes (default: %(default)g)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result")
    return parser


def local_device(args: argparse.Namespace) -> torch.device:
    """The device to measure.

    Raises:
        SystemExit: there is no GPU, or a CPU result would be written as a GPU result.
    """
    if args.device == "cpu" and not args.quick:
        raise SystemExit("--device cpu is only for testing the benchmark: add --quick")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            'no CUDA device found; ARGS="--device cpu --quick" runs the same benchmark with tiny models'
        )
    return torch.device(args.device)


def results_of(args: argparse.Namespace) -> Path:
    """The folder of results: those of tiny models are thrown away, unless a folder is named for them."""
    thrown_away = args.quick and args.results == RESULTS
    return Path(tempfile.mkdtemp()) if thrown_away else args.results


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a target is missed."""
    started = time.monotonic()
    parser = arguments(__doc__, 9.0)
    parser.add_argument("--steps", action="store_true", help="no plans for random budgets")
    args = parser.parse_args(argv)
    device = local_device(args)
    warnings.simplefilter("ignore")
    target = local_target(device)
    results = results_of(args)
    lines = MeasurementLog(results / f"sizing_{device.type}.lines.jsonl", device)
    with workers() as pool:
        deadline = started + 60 * args.minutes - FINISHING_S
        of = run(lines, device, args.quick, deadline, None if args.steps else pool)
        rows = predicted_rows(lines, target, pool)
    found = figures(rows, of)
    console().print(result_table(found, target))
    worst = found["worst_under_prediction_of_reserved"]
    if worst is not None:
        console().print(
            f"reserved memory is under-predicted by at most {worst:.4%}: set this in GPU_ERRORS in "
            "sft_play/sizing/estimate/budget.py"
        )
    path = results / "sizing_gpu.json"
    head = {"what": (__doc__ or "").splitlines()[0], **lines.made, "targets": TARGETS, **found}
    write_result(path, head, {"cases_run": rows})
    console().print(f"wrote {path}")
    if len(rows) < of:
        console().print(f"{len(rows)} of {of} cases are done; run the same command again to continue")
        return 0
    if not args.steps:
        lines.path.unlink()
    missed = missed_targets(found, target)
    if missed or found["problems"]:
        console().print(
            "\n".join([*(f"missed target: {one}" for one in missed), *found["problems"]]),
            markup=False,
            style="red",
        )
    return 1 if missed or found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the memory and seconds of steps whose model FSDP2 divides among the GPUs of this machine.

    make bench-sharded-gpu                                    # on a CUDA machine, under nine minutes
    make bench-sharded-gpu ARGS="--device cpu --quick"        # the same program with tiny models

The first form writes benchmarks/results/sharded_gpu.json, the second one writes nothing.

Each case is a step of bench-sizing-gpu, with the model divided by training's own code among all GPUs. On
a single GPU, its process keeps the model in RAM, and two processes that share the GPU try to divide it
over gloo, since NCCL refuses two on one GPU. Each case has processes of its own, so one that fails costs
no other.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as in training

import torch
from torch import distributed

from benchmarks.alone import ended
from benchmarks.device_meter import Measured, measure
from benchmarks.gpu_cases import MODES, Case, architecture, measured_cases, spec_from_json, spec_to_json
from benchmarks.measurement_log import MeasurementLog, write_result
from benchmarks.random_models import random_model
from benchmarks.sizing_gpu import (
    FINISHING_S,
    arguments,
    case_line,
    figures,
    local_device,
    local_target,
    predicted_rows,
    result_table,
    results_of,
    workers,
)
from benchmarks.steps import step_with
from sft_play.config.schema import TuningConfig
from sft_play.engines.fsdp2 import gathered_dtype
from sft_play.engines.shards import shard
from sft_play.machine.catalogue import LARGEST_MACHINE
from sft_play.model.architecture.shape import units_of
from sft_play.sizing.step import StepSpec
from sft_play.ui.console import console

SHARED = 2  # processes on a single GPU
CASE_S = 180  # that a case may take, loading included


def sharded_cases(device: torch.device, gpus: int, quick: bool) -> list[Case]:
    """Two steps of each model and mode on all GPUs; on a single one, one of each with the model in RAM.

    On several GPUs, the first one also with weights that stay gathered for the backward pass, and that are
    gathered two layers ahead.
    """
    target = local_target(device)
    steps = measured_cases(target, quick)
    models = len({case.model for case in steps})
    chosen = steps[: 2 * models * len(MODES)]
    if gpus > 1:
        worlds = [(case, gpus, False) for case in chosen]
    else:
        worlds = [(case, 1, True) for case in chosen[: models * len(MODES)]]
        worlds += [(case, SHARED, False) for case in chosen[:SHARED]]
    divided = [_divided(case, world, offload=offload) for case, world, offload in worlds]
    return [*divided, *([_kept_gathered(divided[0])] if gpus > 1 else [])]


def _kept_gathered(case: Case) -> Case:
    spec = step_with(case.spec, reshard_after_forward=False)
    return replace(case, key=f"{case.key}, kept gathered", spec=spec)


def _divided(case: Case, world: int, *, offload: bool) -> Case:
    where = "in RAM" if offload else f"divided by {world}"
    # gradients of a GPU's memory are reduced in each micro-batch, as a plan does where memory is short
    spec = step_with(case.spec, shards=world, offload=offload)
    return replace(case, key=f"{case.key} {where}", spec=spec)


def launched(case: Case, device: torch.device) -> dict[str, Any]:
    """The case with what its processes measured, or with what ended them."""
    spec = case.spec
    with tempfile.TemporaryDirectory() as name:
        tree, found = Path(name) / "case.json", Path(name) / "found.json"
        tree.write_text(json.dumps({"model": case.model, "spec": spec_to_json(spec), "device": device.type}))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.sharing.shards}"]
        words = ["-m", "benchmarks.sharded_gpu", "--work", str(tree)]
        said = Path(name) / "said.txt"
        with said.open("w", encoding="utf-8") as output:
            code = ended([sys.executable, *launch, *words], CASE_S, output)
        problem = f"not done after {CASE_S} s" if code is None else ""
        if code:
            problem = _last_error(said.read_text(encoding="utf-8", errors="replace"))
        if found.exists():
            return json.loads(found.read_text())  # type: ignore[no-any-return]
    return asdict(Measured(problem=problem or "no result"))


def _last_error(output: str) -> str:
    named = [line for line in output.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*Error: ", line)]
    return named[-1] if named else output.strip()[-200:]


def work(path: Path) -> None:
    """What each process does: measures the case in a file; the first writes what the highest of them had."""
    case = json.loads(path.read_text())
    spec, rank = spec_from_json(case["spec"]), int(os.environ["RANK"])
    device = torch.device(case["device"])
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group(_backend(spec, device))
    found = measure(_build(case["model"], spec, device), spec, device)
    ranks: list[Any] = [None] * spec.sharing.shards
    distributed.all_gather_object(ranks, asdict(found))
    if rank == 0:
        worst = max(ranks, key=lambda each: max(each["phases"].values(), default=0))
        failed = [each for each in ranks if each["problem"]]
        path.with_name("found.json").write_text(json.dumps((failed or [worst])[0]))
    distributed.destroy_process_group()


def _backend(spec: StepSpec, device: torch.device) -> str:
    if device.type == "cpu" or spec.sharing.shards > torch.cuda.device_count():
        return "gloo"
    return "cuda:nccl,cpu:gloo" if spec.sharing.offloads else "nccl"


def _build(model: str, spec: StepSpec, device: torch.device) -> Callable[[], Any]:
    """A function that makes the model with random weights, and divides it."""

    def build() -> Any:
        torch.manual_seed(0)
        tuning = TuningConfig(mode=spec.mode, lora=spec.lora)
        whole = random_model(architecture(model), spec, tuning, device)
        gathered = gathered_dtype(spec.mode, spec.precision.dtype, spec.precision.autocast)
        shard(
            units_of(whole),
            device.type,
            gathered_dtype=gathered,
            offload=spec.sharing.offloads,
            reshard_after_forward=spec.sharing.reshard_after_forward,
        )
        return whole

    return build


def run(lines: MeasurementLog, device: torch.device, cases: list[Case], deadline: float) -> None:
    """Measures the cases that are not in the log until the time is up, `deadline` of time.monotonic()."""
    known = {line["key"] for line in lines.read()}
    for case in (each for each in cases if each.key not in known):
        if time.monotonic() + CASE_S > deadline and known:
            return
        started = time.monotonic()
        measured = launched(case, device)
        measured["peak"] = max(measured["phases"].values(), default=0)
        measured["seconds"] = round(time.monotonic() - started, 1)
        known.add(case.key)
        line = {"key": case.key, "model": case.model, "spec": spec_to_json(case.spec), "measured": measured}
        lines.add(line | {"budget_bytes": None, "memory_is_limit": False})
        console().print(case_line(line), highlight=False, soft_wrap=True, markup=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, or is one of its processes; returns 1 if a case could not be measured."""
    started = time.monotonic()
    parser = arguments(__doc__, 9.0)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.work:
        work(args.work)
        return 0
    device = local_device(args)
    gpus = min(torch.cuda.device_count(), LARGEST_MACHINE) if device.type == "cuda" else SHARED
    results = results_of(args)
    lines = MeasurementLog(results / f"sharded_{device.type}.lines.jsonl", device)
    cases = sharded_cases(device, gpus, args.quick)
    run(lines, device, cases, started + 60 * args.minutes - FINISHING_S)
    target = local_target(device)
    with workers() as pool:
        rows = predicted_rows(lines, target, pool)
    found = figures(rows, len(cases))
    console().print(result_table(found, target))
    head = {"what": (__doc__ or "").splitlines()[0], **lines.made, "gpus": gpus, **found}
    write_result(results / "sharded_gpu.json", head, {"cases_run": rows})
    if len(rows) < len(cases):
        console().print(f"{len(rows)} of {len(cases)} cases are done; run the same command again to continue")
        return 0
    lines.path.unlink()
    for problem in found["problems"]:
        console().print(problem, markup=False, style="red")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

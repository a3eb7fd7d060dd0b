"""Measures each process's memory in real steps under FSDP2, on this CPU, and compares it with the prediction.

    make bench-sharding                            # 200 random cases, on 2 and 4 processes
    make bench-sharding ARGS="--cases 8 --seed 3"
    make bench-sharding ARGS=--again               # predicts what has been measured once more
    make bench-sharding ARGS="--cases 24 --sequence --out benchmarks/results/sequence.json"
    make bench-sharding ARGS="--cases 24 --gathered --out benchmarks/results/gathered.json"
    make bench-sharding ARGS="--cases 40 --mixed --out benchmarks/results/sharding_mixed.json"
    make bench-sharding ARGS="--cases 20 --in-ram --out benchmarks/results/sharding_in_ram.json"

Each process trains two steps of a small model with random weights, which training's own code has divided,
over gloo. The highest number of bytes in each phase of the second step, in all of its threads, is counted in
PyTorch's allocator by heap_meter.c and compared with that of a trace, which has no weights and no processes.
Inputs of layers that would be in RAM are copied within the heap (benchmarks/cpu_meter.py).
What oneDNN takes there for products of 16 bits is no tensor and not predicted: it is measured apart.
What is measured is kept beside the result until all is, so a run that was interrupted goes on where it was.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed
from torch.distributed.tensor import DTensor

from benchmarks.cpu_meter import copying_within_ram
from benchmarks.heap_meter import built_meter, loaded_meter, wait_for_gloo
from benchmarks.measurement_log import RESULTS, MeasurementLog, versions, write_result
from benchmarks.random_models import random_model
from benchmarks.sharded_cases import (
    WORLDS,
    Case,
    case_of,
    drawn_cases,
    in_ram,
    mixed,
    some_gathered,
)
from sft_play.choices.optimizers import make_optimizer
from sft_play.config.schema import TuningConfig
from sft_play.engines.fsdp2 import gathered_dtype
from sft_play.engines.shards import shard
from sft_play.model.architecture.shape import units_of
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.trace.trace import (
    forward,
    make_batch,
    prepare_for_training,
    run_step,
    trained_parameters,
)
from sft_play.timeline import PHASES, WHOLE_MODEL
from sft_play.ui.console import console

CPU = torch.device("cpu")
CASES, SEED = 200, 22
TARGET = 0.001  # of the peak
SCRATCH = "with_scratch"


class HeapMeter(AllocationRecorder):
    """A recorder that records nothing: it reads the meter's peak at the end of each phase."""

    def __init__(self, meter: ctypes.CDLL) -> None:
        super().__init__()
        self.meter, self.peaks, self.with_scratch = meter, dict[str, int](), 0

    def begin(self, phase: str, layer: int = WHOLE_MODEL) -> None:
        """Ends one phase and begins another one."""
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.meter.meter_peak())
        self.with_scratch = max(self.with_scratch, self.meter.meter_peak_with_scratch())
        self.meter.meter_reset()
        self.phase = phase

    def add(self, tensor: torch.Tensor, term: str, owner: int | None = None) -> None:
        """Records nothing."""


def measure(case: Case, meter: ctypes.CDLL) -> dict[str, int]:
    """The bytes of this process: the highest of each phase, with its shards of the weights.

    The highest of the second step with what oneDNN took is there by the name SCRATCH.
    """
    rank, marks = distributed.get_rank(), HeapMeter(meter)
    spec = case.step(rank)
    gc.collect()
    before = meter.meter_live()
    torch.manual_seed(case.number)
    model = random_model(case.config, spec, TuningConfig(mode=case.mode, lora=spec.lora), CPU)
    gc.collect()
    meter.meter_reset()
    gathered = gathered_dtype(spec.mode, spec.precision.dtype, spec.precision.autocast)
    shard(
        units_of(model),
        "cpu",
        gathered_dtype=gathered,
        replicas=case.replicas,
        defers_exchange=spec.sharing.defers_exchange,
        reshard_after_forward=spec.sharing.reshard_after_forward,
    )
    marks.begin("forward")
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    add_loss_head(model if spec.mode == "full" else model.get_base_model())
    prepare_for_training(model, spec)
    optimizer = make_optimizer(spec.optimizer, trained_parameters(model))
    for _ in range(2):
        if spec.accumulates:
            with model.no_sync():
                forward(model, make_batch(spec), spec).backward()
        load, marks.peaks = marks.peaks["load"], {}
        marks.begin("load")
        marks.with_scratch = 0
        run_step(model, optimizer, spec, marks)
        marks.begin("load")
        marks.peaks["load"] = load
    del model, optimizer
    gc.collect()
    if spec.mode == "qlora":  # random weights are not packed one by one, as those that are loaded
        del marks.peaks["load"]
    return {name: peak - before for name, peak in (*marks.peaks.items(), (SCRATCH, marks.with_scratch))}


def work(path: Path, log: MeasurementLog) -> None:
    """What each process does: measures the cases in a file and adds the figures to the log."""
    distributed.init_process_group("gloo")
    meter = loaded_meter()
    wait_for_gloo(meter)
    for tree in json.loads(path.read_text()):
        case = case_of(tree)
        with copying_within_ram():
            own = measure(case, meter)
        found: list[Any] = [None] * case.world
        distributed.all_gather_object(found, own)
        if distributed.get_rank() == 0:
            log.add({"case": asdict(case), "measured": found})
    distributed.destroy_process_group()


def measure_all(cases: list[Case], meter: Path, folder: Path, log: Path) -> None:
    """Measures cases on as many processes as they have, which are the same for all."""
    path = folder / "cases.json"
    path.write_text(json.dumps([asdict(case) for case in cases]))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cases[0].world}"]
    subprocess.run(
        [sys.executable, *launch, "-m", "benchmarks.sharding", "--work", str(path), "--lines", str(log)],
        env={**os.environ, "LD_PRELOAD": str(meter), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
    )


def measured_cases(
    cases: list[Case], folder: Path, log: MeasurementLog
) -> Iterator[tuple[Case, list[dict[str, int]]]]:
    """All cases with their figures; those that are in the log already are not measured again."""
    known, meter = {case_of(line["case"]).key for line in log.read()}, built_meter(folder)
    for world in WORLDS:
        missing = [case for case in cases if case.world == world and case.key not in known]
        if missing:
            measure_all(missing, meter, folder, log.path)
    found = {case_of(line["case"]).key: line["measured"] for line in log.read()}
    yield from ((case, found[case.key]) for case in cases)


def predicted(case: Case) -> list[dict[str, int]]:
    """The same from traces: one for each size of a micro-batch."""
    known: dict[int, dict[str, int]] = {}
    for rank, rows in enumerate(case.rows):
        if rows not in known:
            peaks = Traces(case.config).step(case.step(rank)).peaks()
            known[rows] = {phase: peak.bytes for phase, peak in peaks.items()}
    return [known[rows] for rows in case.rows]


def compare(case: Case, real: list[dict[str, int]]) -> dict[str, Any]:
    """A row of the result: bytes by process, and the errors of the peaks without loading, and by phase."""
    traced = predicted(case)
    phases = [name for name in real[0] if name != SCRATCH]
    steps = [name for name in phases if name != "load"]
    pairs = list(zip(traced, real, strict=True))
    errors = [max(p[n] for n in steps) / max(m[n] for n in steps) - 1 for p, m in pairs]
    by_phase = {name: max((p[name] / m[name] - 1 for p, m in pairs), key=abs) for name in phases}
    return {
        **asdict(case),
        "measured": real,
        "predicted": traced,
        "error": max(errors, key=abs),
        "scratch": round(max(m[SCRATCH] / max(m[name] for name in steps) - 1 for m in real), 6),
        "errors": {name: round(error, 6) for name, error in by_phase.items()},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the peaks by the types that products are computed in, and of each phase."""
    phases = {name: [abs(row["errors"].get(name, 0.0)) for row in rows] for name in PHASES}
    kinds = {
        kind: [row for row in rows if precision_of(row) == kind] for kind in ("fp32", "bf16", "autocast")
    }
    return {
        "cases": len(rows),
        "architectures": len({row["architecture"] for row in rows}),
        "by_precision": {kind: figures(found) for kind, found in kinds.items() if found},
        "worst_by_phase": {name: max(values) for name, values in phases.items()},
    }


def precision_of(row: dict[str, Any]) -> str:
    """As `draw` names it."""
    if row["mixed_precision"] != "no":
        return "autocast"
    return "fp32" if row["dtype"] == "float32" else "bf16"


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the errors of peaks; `worst` has its sign, and `scratch` is the most that oneDNN added to a peak."""
    errors = [row["error"] for row in rows]
    return {
        "cases": len(errors),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "within_target": sum(abs(error) <= TARGET for error in errors),
        "scratch": max(row["scratch"] for row in rows),
    }


def main() -> None:
    """Runs the benchmark, or is one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--sequence", action="store_true", help="processes divide the tokens too")
    parser.add_argument("--gathered", action="store_true", help="weights of some stay gathered")
    parser.add_argument("--mixed", action="store_true", help="some layers kept, or MLPs in tiles")
    parser.add_argument("--in-ram", action="store_true", help="inputs of recomputed layers are copied to RAM")
    parser.add_argument("--again", action="store_true", help="predict what has been measured once more")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "sharding.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the log keeps measurements by the number of threads
    log = MeasurementLog(options.lines or options.out.with_suffix(".lines.jsonl"), CPU)
    if options.work:
        work(options.work, log)
        return
    head = {"machine": platform.processor() or platform.machine(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        if options.again:
            earlier = json.loads(options.out.read_text())
            head = {key: earlier[key] for key in ("seed", *head)}
            found = ((case_of(row), row["measured"]) for row in earlier["rows"])
        else:
            cases = drawn_cases(options.cases, options.seed, sequence=options.sequence)
            cases = some_gathered(cases, options.seed) if options.gathered else cases
            cases = mixed(cases, options.seed) if options.mixed else cases
            cases = in_ram(cases) if options.in_ram else cases
            head = {"seed": options.seed, **head}
            found = measured_cases(cases, Path(name), log)
        for case, real in found:
            rows.append(compare(case, real))
            console().print(f"  {describe(rows[-1])}", highlight=False)
    write_result(options.out, {**head, **summary(rows)}, {"rows": rows})
    log.path.unlink(missing_ok=True)
    console().print(table(summary(rows)))


def describe(row: dict[str, Any]) -> str:
    """One line."""
    words = [row["architecture"], row["mode"], precision_of(row), row["activations"]]
    words += [f"tokens/{row['sequence_ranks']}"] if row["sequence_ranks"] > 1 else []
    words += [] if row["reshard_after_forward"] else ["gathered"]
    words += [f"{row['kept_layers']} kept"] if row["kept_layers"] else []
    words += ["tiles"] if row["mlp_tile"] else []
    words += [name for name in ("tied", "accumulates", "defers_exchange", "joined") if row[name]]
    phases = " ".join(f"{name} {error:+.3%}" for name, error in row["errors"].items())
    world = f"{row['replicas']}x{row['world'] // row['replicas']}"
    return f"{row['number']:>3} {world} {row['error']:+.4%}  {' '.join(words)}  ({phases})"


def table(found: dict[str, Any]) -> Table:
    """The summary for people."""
    grid = Table("precision", "cases", "median", "worst", f"within {TARGET:.1%}", "oneDNN adds at most")
    for kind, each in found["by_precision"].items():
        shares = (f"{each['median']:.4%}", f"{each['worst']:+.4%}", str(each["within_target"]))
        grid.add_row(kind, str(each["cases"]), *shares, f"{each['scratch']:.1%}")
    return grid


if __name__ == "__main__":
    main()

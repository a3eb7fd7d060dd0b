"""Measures each process's memory in real steps under FSDP2, on this CPU, and compares it with the prediction.

    make bench-sharding                            # 200 random cases, on 2 and 4 processes
    make bench-sharding ARGS="--cases 8 --seed 3"
    make bench-sharding ARGS="--cases 24 --sequence --out benchmarks/results/sequence.json"
    make bench-sharding ARGS="--cases 24 --gathered --out benchmarks/results/gathered.json"

Each process trains two steps of a small model with random weights, which training's own code has divided,
over gloo. The highest number of bytes in each phase of the second step, in all of its threads, is counted in
PyTorch's allocator by heap_meter.c and compared with that of a trace, which has no weights and no processes.
What oneDNN takes there for products of 16 bits is no tensor and not predicted: it is measured apart.
What is measured is kept beside the result until all is, so a run that was interrupted goes on where it was.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from benchmarks.heap_meter import built_meter, loaded_meter, wait_for_gloo
from benchmarks.measurement_log import RESULTS, MeasurementLog, versions, write_result
from benchmarks.random_models import MORE_NAMES, TIED, draw_geometry, drawn_config, random_model
from benchmarks.small_models import NAMES
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.engines.fsdp2 import gathered_dtype
from sft_play.engines.shards import shard
from sft_play.model.architecture import setting, units_of
from sft_play.model.attention_choice import calls_ours, why_padded
from sft_play.model.attention_table import NAME
from sft_play.model.loss_head import add_loss_head
from sft_play.runlog import console
from sft_play.sizing.optimizers import make_optimizer
from sft_play.sizing.recorder import AllocationRecorder
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace import (
    forward,
    make_batch,
    prepare_for_training,
    run_step,
    trace_step,
    trained_parameters,
)
from sft_play.timeline import PHASES, WHOLE_MODEL

CPU = torch.device("cpu")
WORLDS, CASES, SEED = (2, 4), 200, 22
UNPACKED = ("gpt2",)  # its products are no torch.nn.Linear, which random_models packs
FEW_TARGETS = ("q_proj", "v_proj")
TARGET = 0.001  # of the peak
SCRATCH = "with_scratch"
PRECISIONS = ("fp32", "bf16", "autocast")


@dataclass(frozen=True)
class Case:
    """A random model and step; each process has a micro-batch of its own size."""

    number: int
    world: int
    architecture: str
    geometry: dict[str, int]
    tied: bool
    mode: str
    dtype: str
    mixed_precision: str
    activations: str
    accumulates: bool
    joined: bool
    rows: tuple[int, ...]  # of each process
    row_tokens: int
    replicas: int  # of the model, divided among as many processes each
    defers_exchange: bool  # gradients stay whole until the last micro-batch
    sequence_ranks: int = 1  # processes that divide the tokens of a micro-batch
    few_targets: bool = False  # adapters beside the projections of queries and values alone
    reshard_after_forward: bool = True

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps(asdict(self))

    @property
    def config(self) -> PretrainedConfig:
        """The architecture."""
        return drawn_config(self.architecture, self.geometry, tied=self.tied)

    def step(self, rank: int) -> StepSpec:
        """The step of one process."""
        rows, tokens = self.rows[rank], self.row_tokens
        own = rows * tokens // self.sequence_ranks
        return StepSpec(
            mode=self.mode,
            lora=LoraSettings(r=8, target_modules=FEW_TARGETS if self.few_targets else "auto"),
            dtype=self.dtype,
            mixed_precision=self.mixed_precision,
            activations="recompute" if self.activations == "recompute" else "keep",
            batch=JoinedRows(own) if self.joined else PaddedRows(rows, tokens),
            longest=tokens if self.joined else None,
            accumulates=self.accumulates,
            sequence_ranks=self.sequence_ranks,
            shards=self.world // self.replicas,
            replicated=self.replicas > 1,
            defers_exchange=self.defers_exchange,
            reshard_after_forward=self.reshard_after_forward,
        )


def draw(number: int, world: int, seed: int) -> Case:
    """The case of this number, the same for the same seed."""
    pick = random.Random(f"{seed} {number}")
    architecture, heads = pick.choice((*NAMES, *MORE_NAMES)), pick.choice((3, 4, 6, 8))
    mode = pick.choice(("full", "lora") if architecture in UNPACKED else ("full", "lora", "qlora"))
    precision = pick.choice(PRECISIONS)
    return Case(
        number=number,
        world=world,
        architecture=architecture,
        geometry=draw_geometry(pick, heads),
        tied=architecture in TIED and pick.random() < 0.4,
        mode=mode,
        dtype="bfloat16" if precision == "bf16" else "float32",
        mixed_precision="bf16" if precision == "autocast" else "no",
        activations=pick.choice(("keep", "recompute")),
        accumulates=pick.random() < 0.5,
        joined=pick.random() < 0.5,
        rows=tuple(pick.choices(pick.sample(range(2, 7), 2), k=world)),
        row_tokens=pick.choice((48, 64, 96, 130)),
        replicas=pick.choice((1, 2)) if world == 4 else 1,
        defers_exchange=pick.random() < 0.5,
    )


def drawn_cases(count: int, seed: int, *, sequence: bool) -> list[Case]:
    """So many cases; with `sequence`, of joined rows whose tokens all processes divide, and half of them."""
    worlds = itertools.cycle(WORLDS)
    if not sequence:
        return [draw(number, next(worlds), seed) for number in range(count)]
    drawn = (draw(number, world, seed) for number, world in zip(itertools.count(), worlds, strict=False))
    groups = (divided(case, max(2, case.world // (1 + case.number // 2 % 2))) for case in drawn)
    return list(itertools.islice(filter(None, groups), count))


def some_gathered(cases: list[Case], seed: int) -> list[Case]:
    """The same cases, of which weights of about two in three stay gathered for the backward pass."""
    frees = (random.Random(f"gathered {seed} {case.number}").random() < 1 / 3 for case in cases)
    return [replace(case, reshard_after_forward=free) for case, free in zip(cases, frees, strict=True)]


def divided(case: Case, ranks: int) -> Case | None:
    """The same with joined rows whose tokens so many processes divide; None if they cannot."""
    config = case.config
    heads = setting(config.get_text_config(), "num_attention_heads")
    if heads % ranks or not calls_ours(config) or why_padded(False, "auto", config, NAME):
        return None
    return replace(case, joined=True, rows=(4,) * case.world, replicas=1, sequence_ranks=ranks)


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
    gathered = gathered_dtype(spec.mode, spec.dtype, spec.mixed_precision)
    shard(
        units_of(model),
        "cpu",
        gathered_dtype=gathered,
        replicas=case.replicas,
        defers_exchange=spec.defers_exchange,
        reshard_after_forward=spec.reshard_after_forward,
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
        found: list[Any] = [None] * case.world
        distributed.all_gather_object(found, measure(case, meter))
        if distributed.get_rank() == 0:
            log.add({"case": asdict(case), "measured": found})
    distributed.destroy_process_group()


def case_of(tree: dict[str, Any]) -> Case:
    """A case as JSON has it."""
    return Case(**{**tree, "rows": tuple(tree["rows"])})


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
    cases: list[Case], meter: Path, folder: Path, log: MeasurementLog
) -> Iterator[tuple[Case, list[dict[str, int]]]]:
    """All cases with their figures; those that are in the log already are not measured again."""
    known = {case_of(line["case"]).key for line in log.read()}
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
            peaks = trace_step(case.config, case.step(rank)).step.peaks()
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
    made = {"machine": platform.processor() or platform.machine(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        meter = built_meter(Path(name))
        cases = drawn_cases(options.cases, options.seed, sequence=options.sequence)
        cases = some_gathered(cases, options.seed) if options.gathered else cases
        for case, real in measured_cases(cases, meter, Path(name), log):
            rows.append(compare(case, real))
            console().print(f"  {describe(rows[-1])}", highlight=False)
    write_result(options.out, {"seed": options.seed, **made, **summary(rows)}, {"rows": rows})
    log.path.unlink()
    console().print(table(summary(rows)))


def describe(row: dict[str, Any]) -> str:
    """One line."""
    words = [row["architecture"], row["mode"], precision_of(row), row["activations"]]
    words += [f"tokens/{row['sequence_ranks']}"] if row["sequence_ranks"] > 1 else []
    words += [] if row["reshard_after_forward"] else ["gathered"]
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

"""Measures memory of steps with compiled layers against the prediction, by the code generated for them.

    python -m benchmarks.compiled               # goes on where it was interrupted
    python -m benchmarks.compiled --only 0 12   # these cases; writes nothing
    python -m benchmarks.compiled --drawn 40    # so many runs whose model, settings and rows are drawn

Each case is a run with rows of very different lengths, once with compiled layers and once without; drawn ones
are measured with compiled layers alone, in order: none is picked. As in
benchmarks/random_runs.py, its own trainer goes through its micro-batches twice, and what PyTorch's allocator
holds is counted in the second pass, in all threads of each process. Then a model is trained on micro-batches
that all have other lengths, and what the compiler did is counted.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from benchmarks.context import spec_of
from benchmarks.heap_meter import built_meter
from benchmarks.measurement_log import RESULTS, MeasurementLog, made_on, versions, write_result
from benchmarks.random_cases import FUSED, PADDED, RandomRun, draw
from benchmarks.random_results import TENSORS
from benchmarks.random_runs import log_of, measure_all, predict_again
from benchmarks.sizing import CPU, build
from benchmarks.small_models import WIDE, small_config
from sft_play.model.layers.compilation import compile_layers
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.step import JoinedRows
from sft_play.sizing.trace.trace import forward, make_batch, prepare_for_training
from sft_play.ui.console import console

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "phi3")
GEOMETRY = WIDE | {"vocabulary": 1000, "layers": 3}
ROWS, EVALUATED = 24, 6
LONGEST = 240  # tokens of a row
SEED = 11  # of drawn runs
TARGET = 0.001  # of their peaks
DTYPES = {"fp32": ("float32", "no"), "bf16": ("bfloat16", "no"), "autocast": ("float32", "bf16")}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"packing": False, "effective_batch_size": 8},
    {"packing": False, "effective_batch_size": 8, "padding_free": False},
    {"packing": True, "effective_batch_size": 4 * LONGEST},
)
REFUSED = {("lora", "bf16"), ("qlora", "bf16")}  # adapters compute in the type of the weights
ON_TWO = (
    ("ddp", "phi3", LAYOUTS[0], "full", "fp32", False),
    ("ddp", "llama", LAYOUTS[1], "full", "fp32", True),
    ("ddp", "qwen3", LAYOUTS[2], "lora", "autocast", False),
    ("fsdp2", "phi3", LAYOUTS[0], "full", "fp32", True),
    ("fsdp2", "llama", LAYOUTS[2], "lora", "autocast", False),
    ("fsdp2", "qwen3", LAYOUTS[1], "qlora", "autocast", True),
)
STEPS = ((60, 130, 7), (200,), (96, 96, 96, 96), (5, 9, 44, 71, 150, 20), (1, 64), (33,) * 9)


def cases() -> list[RandomRun]:
    """All runs, without compiled layers: modes, types and activations, over models and layouts."""
    kinds = enumerate(product(("full", "lora", "qlora"), DTYPES))
    alone = [
        (ARCHITECTURES[kind % 4], LAYOUTS[kind % 3], *each, recompute)
        for kind, each in kinds
        for recompute in (False, True)
    ]
    runs = [_case(number, "none", *each) for number, each in enumerate(alone)]
    runs += [_case(len(runs) + number, *each) for number, each in enumerate(ON_TWO)]
    return [run for run in runs if (run.tree["tuning"]["mode"], run.precision) not in REFUSED]


def _case(
    number: int,
    engine: str,
    architecture: str,
    layout: dict[str, Any],
    mode: str,
    precision: str,
    recompute: bool,
) -> RandomRun:
    pick, (dtype, autocast) = random.Random(number), DTYPES[precision]
    dtype = "bfloat16" if mode != "full" and autocast != "no" else dtype
    lengths = [LONGEST, *(pick.randint(2, LONGEST) for _ in range(ROWS + EVALUATED - 1))]
    rows = [(tokens, max(1, tokens // 3)) for tokens in lengths]
    tree = {
        "model": {"dtype": dtype},
        "tuning": {"mode": mode} | ({} if mode == "full" else {"lora": {"r": 8}}),
        "train": {
            "mixed_precision": autocast,
            "gradient_checkpointing": recompute,
            "grad_accum": 2,
            "max_steps": 3,
            **layout,
        },
        "eval": {"batch_size": "auto"},
    }
    return RandomRun(
        number=number,
        seed=0,
        architecture=architecture,
        geometry=GEOMETRY,
        tied=False,
        precision=precision,
        engine=engine,
        tree=tree,
        rows=tuple(rows[:ROWS]),
        val=tuple(rows[ROWS:]),
    )


def compiled(run: RandomRun) -> RandomRun:
    """The same run with compiled layers."""
    return replace(run, tree=run.tree | {"train": run.tree["train"] | {"compile": True}})


def drawn(count: int) -> list[RandomRun]:
    """The first runs of the seed, of one process, whose layers can be compiled; as those of random_runs."""
    drawn_runs = (draw(number, SEED, ("none",)) for number in itertools.count())
    able = (_compilable(run) for run in drawn_runs if run.architecture not in (*FUSED, *PADDED))
    return [compiled(run) for run in itertools.islice((run for run in able if run), count)]


def _compilable(run: RandomRun) -> RandomRun | None:
    """The same with adapters, if any, that compute in the type of the weights; None if they do not."""
    tuning = run.tree["tuning"]
    if tuning["mode"] != "full" and (run.precision == "bf16" or tuning["lora"].get("use_dora")):
        return None
    adapters_cast = tuning["mode"] != "full" and run.precision == "autocast"
    dtype = {"dtype": "bfloat16"} if adapters_cast else {}
    return replace(run, tree=run.tree | {"model": run.tree["model"] | dtype})


def row_of(run: RandomRun, plain: list[dict[str, Any]], fast: list[dict[str, Any]]) -> dict[str, Any]:
    """A case: bytes by phase as predicted without compiling, and as measured with compiling and without.

    Those of its highest process. `traced_error` is that of the prediction for compiled layers.
    """
    kept = ("number", "architecture", "precision", "engine", "tree")
    row: dict[str, Any] = {name: value for name, value in asdict(run).items() if name in kept}
    problems = [each[kind] for each in (*plain, *fast) for kind in ("refused", "crashed") if kind in each]
    if problems:
        return row | {"problem": problems[0]}
    phases = [phase for phase in fast[0]["measured"] if phase != TENSORS]
    row["predicted"] = {phase: plain[0]["predicted"][phase] for phase in phases}
    for name, found in (("plain", plain), ("compiled", fast)):
        row[name] = {phase: max(each["measured"][phase] for each in found) for phase in phases}
    top = max(row["predicted"].values())
    row["plain_error"] = top / max(row["plain"].values()) - 1
    row["error"] = top / max(row["compiled"].values()) - 1
    traced = max(fast[0]["predicted"][phase] for phase in phases)
    row["traced_error"] = traced / max(row["compiled"].values()) - 1
    row["errors"] = {phase: row["predicted"][phase] / row["compiled"][phase] - 1 for phase in phases}
    return row


def compilations(mode: str) -> dict[str, Any]:
    """What the compiler does in steps of other lengths: graphs so far, and seconds, after each of them."""
    spec, before = replace(spec_of(mode, "keep", joined=True), accumulates=False), counters["stats"].copy()
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(small_config("llama", GEOMETRY)).save_pretrained(folder)
        model = build(Path(folder), spec)
        add_loss_head(model)
        prepare_for_training(model, spec)
        compile_layers(model)
        for lengths in STEPS:
            own, began = replace(spec, batch=JoinedRows(sum(lengths)), lengths=lengths), time.perf_counter()
            forward(model, make_batch(own), own).backward()
            graphs = counters["stats"]["unique_graphs"] - before["unique_graphs"]
            seconds = round(time.perf_counter() - began, 1)
            steps.append({"lengths": lengths, "graphs": graphs, "seconds": seconds})
    return {"mode": mode, "steps": steps}


def logged(runs: list[RandomRun], log: MeasurementLog) -> dict[str, list[dict[str, Any]]]:
    """What was found of each run, by its key; those of an engine are measured by the same processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meter = built_meter(folder)
        for engine in dict.fromkeys(run.engine for run in runs):
            known = log_of(log)
            if left := [run for run in runs if run.engine == engine and run.key not in known]:
                measure_all(left, meter, folder, log.path, sys.float_info.max)
    return log_of(log)


def drawn_row(run: RandomRun, found: dict[str, Any]) -> dict[str, Any]:
    """A drawn run: predicted and measured bytes by phase, or why there are none."""
    row = asdict(run) | {name: value for name, value in found.items() if name not in ("plan", "code")}
    if "measured" in found:
        phases = [phase for phase in found["measured"] if phase != TENSORS]
        top = max(found["predicted"][phase] for phase in phases)
        row["error"] = top / max(found["measured"][phase] for phase in phases) - 1
        row["errors"] = {phase: found["predicted"][phase] / found["measured"][phase] - 1 for phase in phases}
    return row


def measure_drawn(count: int) -> int:
    """Measures drawn runs and writes their result; returns 1 if one is further off than TARGET, or failed."""
    runs, log = drawn(count), MeasurementLog(RESULTS / "compiled_drawn_cpu.lines.jsonl", CPU)
    logged(runs, log)
    with tempfile.TemporaryDirectory() as folder:
        predict_again(runs, Path(folder), log)
    lines = log_of(log)
    rows = [drawn_row(run, lines[run.key][0]) for run in runs if run.key in lines]
    errors = [row["error"] for row in rows if "error" in row]
    head = {
        "what": "Peak memory of drawn runs with compiled layers on the CPU, against the prediction",
        "made_on": made_on(CPU),
        "versions": versions(),
        "seed": SEED,
        "errors": {"least": min(errors), "most": max(errors), "runs": len(errors)},
        "target": TARGET,
    }
    write_result(RESULTS / "compiled_drawn_cpu.json", head, {"rows": rows})
    failed = [row for row in rows if "crashed" in row]
    return int(max(map(abs, errors)) > TARGET or bool(failed))


def measured(runs: list[RandomRun], log: MeasurementLog) -> list[dict[str, Any]]:
    """A row for each case; what the log lacks is measured, those of an engine by the same processes."""
    lines = logged([each for run in runs for each in (run, compiled(run))], log)
    found = [run for run in runs if run.key in lines and compiled(run).key in lines]
    return [row_of(run, lines[run.key], lines[compiled(run).key]) for run in found]


def main() -> int:
    """Runs the benchmark; returns 1 if compiled layers took more than predicted, or a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases; write no result")
    parser.add_argument("--drawn", type=int, help="measure so many drawn runs instead")
    arguments = parser.parse_args()
    only = arguments.only
    torch.set_num_threads(1)
    if arguments.drawn:
        return measure_drawn(arguments.drawn)
    runs = [run for run in cases() if only is None or run.number in only]
    log = MeasurementLog(RESULTS / "compiled_cpu.lines.jsonl", CPU)
    rows = measured(runs, log)
    for row in rows:
        said = row.get("problem") or f"plain {row['plain_error']:+.3%}, compiled {row['traced_error']:+.3%}"
        console().print(f"{row['number']:2} {row['architecture']:12} {row['engine']:4} {said}", markup=False)
    if only is not None or len(rows) < len(runs):
        return 0
    errors = [row["error"] for row in rows if "error" in row]
    head = {
        "what": "Peak memory of runs with compiled layers on the CPU, against the prediction without",
        "made_on": made_on(CPU),
        "versions": versions(),
        "errors": {"least": min(errors), "most": max(errors), "cases": len(errors)},
        "compilations": [compilations(mode) for mode in ("full", "lora")],
    }
    write_result(RESULTS / "compiled_cpu.json", head, {"cases": rows})
    log.path.unlink()
    console().print(f"{len(errors)} cases, predicted {min(errors):+.3%} to {max(errors):+.3%}")
    return int(min(errors) < 0 or len(errors) < len(rows))


if __name__ == "__main__":
    sys.exit(main())

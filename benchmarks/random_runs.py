"""Compares predicted with measured memory of random runs on this CPU, by phase.

    make bench-random                           # 100 runs
    make bench-random ARGS="--runs 20 --seed 3"
    make bench-random ARGS="--minutes 15"           # those that can be measured in this time
    make bench-random ARGS="--forget 9 61"          # these again, the others as they were measured
    make bench-random ARGS="--sequence --runs 20 --out benchmarks/results/random_sequence.json"

Each run has another architecture, other settings and rows of very different lengths, all drawn from a seed;
three of five are on two processes. Its plan predicts the peak of each phase. Every second run is probed as
training does it. Then the run's own trainer goes through its micro-batches twice; in the second pass, when
optimizer states exist, the bytes that PyTorch's allocator holds are counted in all threads of each process
(heap_meter.c), with what oneDNN takes there for products of 16 bits. The highest process counts. Joined rows
and loaded weights lie in other memory; here they are copied into PyTorch's, to be counted. Runs are measured
in the order of their numbers, BLOCK after BLOCK, and the result is of the first ones: none is picked. What is
measured is kept beside the result with its plan: a benchmark that was interrupted goes on where it was, and
plans that other code has predicted are predicted again. What the log lacks is taken from the result.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets
from deepspeed import DeepSpeedEngine
from torch.distributed.tensor import DTensor
from transformers import DefaultFlowCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from benchmarks.heap_meter import built_meter, loaded_meter, wait_for_gloo
from benchmarks.measurement_log import RESULTS, MeasurementLog, versions, write_result
from benchmarks.random_cases import (
    RandomRun,
    divided,
    draw,
    job_of,
    predicted_again,
    save_model,
    without_memory,
)
from benchmarks.random_results import TENSORS, describe, found_of, row_of, summary, table
from sft_play.engines.registry import engine_of
from sft_play.errors import SftPlayError
from sft_play.job import Job
from sft_play.launch.accelerate import launch_command
from sft_play.launch.ranks import RankEnvironment
from sft_play.model.weights.finished import release_memory
from sft_play.sizing.meters.cpu import storage_bytes
from sft_play.sizing.step import step_code
from sft_play.train.probe import probe
from sft_play.train.ranks import from_main
from sft_play.train.session import prepare_session
from sft_play.train.trainer import forget_embeddings
from sft_play.ui.console import console, quiet_libraries

RUNS, SEED = 100, 7
BLOCK = 20  # runs
ENGINES = ("none", "none", "ddp", "deepspeed_z2", "fsdp2")  # all but the first run on two processes
WAIT = timedelta(minutes=5)  # for another process


class Marks(TrainerCallback):
    """The highest number of bytes of each phase, from the first step of the second pass on."""

    def __init__(self, meter: ctypes.CDLL, trainer: Any, pass_steps: int, before: int) -> None:
        self.meter, self.trainer, self.pass_steps, self.before = meter, trainer, pass_steps, before
        self.phase, self.tensors = "load", 0
        self.peaks: dict[str, int] = {}

    def begin(self, phase: str) -> None:
        """Ends one phase and begins another one."""
        peak = self.meter.meter_peak_with_scratch() - self.before
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), peak)
        self.tensors = max(self.tensors, self.meter.meter_peak() - self.before)
        self.meter.meter_reset()
        self.phase = phase

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the first pass."""
        if state.global_step == self.pass_steps:
            self.begin("forward")
            self.peaks, self.tensors = {}, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The update begins."""
        self.begin("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """To fetch the next micro-batches belongs to their forward passes."""
        self.begin("forward")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """So it does after an evaluation."""
        self.begin("forward")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """DeepSpeed updates within what the trainer takes for the backward pass."""
        engine = self.trainer.model_wrapped
        if not isinstance(engine, DeepSpeedEngine):
            return
        step = engine.step

        def marked(*arguments: Any, **named: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                self.begin("optimizer")
            step(*arguments, **named)

        engine.step = marked


def measure(job: Job, meter: ctypes.CDLL, *, probes: bool) -> dict[str, int]:
    """The highest bytes of this process in each phase but loading; without oneDNN's by the name TENSORS."""
    session = prepare_session(job, announce=False)
    trainer: Any = session.trainer
    _take_over(trainer.model)
    if probes:
        probe(session)
    release_memory()
    before = meter.meter_live() - storage_bytes(trainer.model)
    steps, args = job.plan.schedule.total_steps, trainer.args
    marks = Marks(meter, trainer, steps, before)
    trainer.begin_phase = marks.begin
    for name in ("data_collator", "_train_collator", "_eval_collator"):
        setattr(trainer, name, _counted(getattr(trainer, name)))
    callbacks = [DefaultFlowCallback, marks]
    trainer.callback_handler = CallbackHandler(callbacks, trainer.model, job.tokenizer, None, None)
    trainer.train_dataset = concatenate_datasets([trainer.train_dataset] * 2)
    args.max_steps = 2 * steps
    args.eval_on_start = args.load_best_model_at_end = False
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.STEPS
    args.eval_steps, args.eval_delay = 1, steps + 1  # in the second pass
    trainer.train()
    marks.begin("load")
    trainer.accelerator.free_memory()
    forget_embeddings(args)
    return {name: peak for name, peak in marks.peaks.items() if name != "load"} | {TENSORS: marks.tensors}


def _take_over(model: torch.nn.Module) -> None:
    """Moves weights that are files, mapped into memory, to PyTorch's, as DDP and DeepSpeed do."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.clone()


def _counted(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same collator, with tensors in PyTorch's memory."""

    def collated(batches: Any) -> dict[str, Any]:
        tensors = collate(batches).items()
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors}

    return collated


def outcome(run: RandomRun, folder: Path, ranks: RankEnvironment, meter: ctypes.CDLL) -> dict[str, Any]:
    """Predicted and measured bytes of a run, or why there are none."""
    model, output = folder / f"model-{run.number}", folder / "runs"
    found: dict[str, Any] = {}
    try:
        if ranks.is_main:
            save_model(run, model)
        if ranks.world_size > 1:
            torch.distributed.barrier()
        job = job_of(run, model, output, ranks)
        assert job.plan.memory
        found |= {"plan": without_memory(job.plan), "code": step_code()}
        found["predicted"] = job.plan.memory.phases
        with quiet_libraries(folder / "log.txt"):
            found |= {"probed": run.probes, "measured": measure(job, meter, probes=run.probes)}
    except (SftPlayError, ValueError) as error:
        return _refused(error)
    except Exception as error:  # what the walk is there to find
        return {"crashed": f"{type(error).__name__}: {error} {traceback.format_exc()[-1500:]}"}
    finally:
        if ranks.is_main:
            shutil.rmtree(model, ignore_errors=True)
    gc.collect()
    return found


def work(path: Path, log: MeasurementLog, until: float) -> None:
    """What each process does: measures the runs in a file and adds the figures to the log."""
    warnings.simplefilter("ignore")
    ranks, meter = RankEnvironment.read(), loaded_meter()
    if ranks.world_size > 1:
        torch.distributed.init_process_group("gloo", timeout=WAIT)
        wait_for_gloo(meter)
    for tree in json.loads(path.read_text()):
        if from_main(lambda: time.time() > until):
            break
        run = run_of(tree)
        found: list[Any] = [outcome(run, path.parent, ranks, meter)]
        if ranks.world_size > 1:
            own, found = found[0], [None] * ranks.world_size
            torch.distributed.all_gather_object(found, own)
        if ranks.is_main:
            log.add({"run": asdict(run), "found": found})
    if ranks.world_size > 1:
        torch.distributed.destroy_process_group()


def run_of(tree: dict[str, Any]) -> RandomRun:
    """A run as JSON has it."""
    pairs = {name: tuple(map(tuple, tree[name])) for name in ("rows", "val")}
    return RandomRun(**{**tree, **pairs})


def measure_all(runs: list[RandomRun], meter: Path, folder: Path, log: Path, until: float) -> None:
    """Measures runs of one engine, launched as a run is; begins none after a time, in seconds since 1970."""
    path, engine, world = folder / "runs.json", engine_of(runs[0].engine), runs[0].world_size
    path.write_text(json.dumps([asdict(run) for run in runs]))
    own = ("-m", "benchmarks.random_runs", "--work", str(path), "--lines", str(log), "--until", str(until))
    launched(own, meter, folder, engine.name, world)


def launched(own: Sequence[str], meter: Path, folder: Path, engine: str, processes: int) -> None:
    """Runs Python with these arguments as each process of an engine, with the meter; no GPU, no Hub."""
    argv, environment = (sys.executable, *own), dict[str, str]()
    if processes > 1:
        launch = launch_command(own, engine=engine, device="cpu", processes=processes, cores=processes)
        argv, environment = launch.argv, launch.environment
    subprocess.run(
        argv,
        env={
            **os.environ,
            **environment,
            "LD_PRELOAD": str(meter),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "SFT_PLAY_CACHE": str(folder / "cache"),
        },
        check=False,
    )


def measure_missing(runs: list[RandomRun], folder: Path, log: MeasurementLog, minutes: float) -> None:
    """Measures the runs that are not in the log, in order; one whose processes end counts as crashed.

    Args:
        runs: of all engines. The processes of an engine measure all of its runs in a block, since to start
            them takes as long as to measure one.
        folder: for models and traces.
        log: of what is measured.
        minutes: after which no run begins.
    """
    meter, until = built_meter(folder), time.time() + 60 * minutes
    for first in range(0, len(runs), BLOCK):
        block = runs[first : first + BLOCK]
        for engine in dict.fromkeys(run.engine for run in block):
            own = [run for run in block if run.engine == engine]
            while (own := _unmeasured(own, log)) and time.time() < until:
                measure_all(own, meter, folder, log.path, until)
                left = _unmeasured(own, log)
                if left and time.time() < until:
                    log.add({"run": asdict(left[0]), "found": [{"crashed": "its processes ended"}]})


def _unmeasured(runs: list[RandomRun], log: MeasurementLog) -> list[RandomRun]:
    known = log_of(log)
    return [run for run in runs if run.key not in known]


def log_of(log: MeasurementLog) -> dict[str, list[dict[str, Any]]]:
    """What was found of each run last, by its key; an entry for each process."""
    latest = {run_of(line["run"]).key: line["found"] for line in log.read()}
    return {key: found for key, found in latest.items() if found}


def take_over(path: Path, log: MeasurementLog) -> None:
    """Adds to the log what a result that the same versions wrote says and the log does not."""
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if result.get("versions") != versions():
        return
    known = {run_of(line["run"]).key for line in log.read()}
    for row in result["rows"]:
        tree = {name: row[name] for name in RandomRun.__dataclass_fields__}
        alike = row.get("probed", False) == run_of(tree).probes and not row.get("scratch")
        if run_of(tree).key not in known and (alike or "measured" not in row):
            log.add({"run": tree, "found": [found_of(row)]})


def forget(runs: list[RandomRun], log: MeasurementLog) -> None:
    """Lets these be measured again."""
    for run in runs:
        log.add({"run": asdict(run), "found": []})


def predict_again(runs: list[RandomRun], folder: Path, log: MeasurementLog) -> None:
    """Adds to the log what today's code predicts of the plans that other code predicted."""
    latest = log_of(log)
    os.environ["OMP_NUM_THREADS"] = "1"  # as in the processes that measure; a plan goes by it
    for run in runs:
        found = latest.get(run.key, [{}])
        if "measured" not in found[0] or found[0].get("code") == step_code():
            continue
        model = folder / f"model-{run.number}"
        try:
            again = {"code": step_code()} | predicted_again(run, found[0].get("plan"), model)
            log.add({"run": asdict(run), "found": [each | again for each in found]})
        except ValueError as error:  # its settings were allowed when it was measured
            log.add({"run": asdict(run), "found": [_refused(error)]})
        shutil.rmtree(model)


def _refused(error: Exception) -> dict[str, Any]:
    return {"refused": " ".join(str(error).split())[:300]}


def main() -> None:
    """Runs the benchmark, or is one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of runs")
    parser.add_argument("--forget", type=int, nargs="*", default=[], help="numbers to measure again")
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--sequence", action="store_true", help="those on two processes, which divide tokens")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "random.json")
    options = parser.parse_args()
    torch.set_num_threads(1)  # in all processes, whose log names their number
    log = MeasurementLog(options.lines or options.out.with_suffix(".lines.jsonl"), torch.device("cpu"))
    if options.work:
        work(options.work, log, options.until)
        return
    numbers = options.only or count(options.first)
    drawn = (draw(number, options.seed, tuple(options.engines)) for number in numbers)
    runs = list(islice(filter(None, map(divided, drawn)) if options.sequence else drawn, options.runs))
    console().print(f"{len(runs)} runs, drawn from seed {options.seed}")
    take_over(options.out, log)
    forget([run for run in runs if run.number in options.forget], log)
    with tempfile.TemporaryDirectory() as name:
        measure_missing(runs, Path(name), log, options.minutes)
        predict_again(runs, Path(name), log)
    lines = log_of(log)
    rows = [row_of(run, lines[run.key]) for run in takewhile(lambda run: run.key in lines, runs)]
    for row in rows:
        console().print(f"  {describe(row)}", highlight=False, soft_wrap=True, markup=False)
    made = {"machine": platform.processor() or platform.machine(), "versions": versions()}
    write_result(options.out, {"seed": options.seed, **made, **summary(rows)}, {"rows": rows})
    console().print(table(summary(rows)))


if __name__ == "__main__":
    main()

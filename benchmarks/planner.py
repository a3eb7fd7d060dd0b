"""The planner's choice against every other plan: an exhaustive sweep, measured on the CPU.

    make bench-planner                                  # all workloads, three rounds; most of an hour
    make bench-planner ARGS="--only 2M-lora --rounds 1" # some of them; writes nothing

Every way to split the step and both settings of checkpointing are trained for a few optimizer steps with the
run's own trainer. All plans of a workload learn from the same rows in the same steps, so the fastest one has
the most useful tokens per second. Every other round goes through the plans in reverse. Regret is how much
longer the chosen plan takes than the best one. The choice is the prediction's alone: nothing that the sweep
measures, and no probe, corrects it, and seconds of an earlier run are refused. An interrupted sweep continues
where it stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.table import Table

from benchmarks.measurement_log import RESULTS, MeasurementLog, write_result
from benchmarks.random_models import random_model
from benchmarks.small_models import small_config
from benchmarks.throughput import StepClock
from sft_play.builtin.models import byte_level_tokenizer
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import (
    DataConfig,
    ModelConfig,
    OutputConfig,
    RunConfig,
    TrainConfig,
    TuningConfig,
)
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.job import Job
from sft_play.launch.environment import WAITING
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.plan import PROFILED, Plan
from sft_play.planning.candidates.batch import batch_choices
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.devices import saved_profile
from sft_play.runlog import open_run
from sft_play.sizing.facts.architecture import Architecture
from sft_play.train.memory_meter import MemoryMeter
from sft_play.train.session import Session, close_session, open_session, ordered_rows
from sft_play.ui.console import console, quiet_libraries

CPU = torch.device("cpu")
STEPS = 4  # of each plan and round; the first one is not counted
ROUNDS = 3
BUDGET = 8 << 30  # bytes of each process; everything in the sweep fits
AIMS = {"regret_median": 0.03, "regret_worst": 0.10, "error_median": 0.15}
GEOMETRIES = {
    "2M": dict(hidden=128, inner=352, heads=4, groups=2, head_dim=32, vocabulary=4000, layers=4),
    "8M": dict(hidden=256, inner=704, heads=8, groups=4, head_dim=32, vocabulary=4000, layers=8),
    "20M": dict(hidden=384, inner=1024, heads=6, groups=6, head_dim=64, vocabulary=4096, layers=10),
    "60M": dict(hidden=640, inner=1792, heads=10, groups=10, head_dim=64, vocabulary=8192, layers=10),
}
LENGTHS = {
    "even": (96, 0.0, 96),
    "tailed": (156, 0.66, 606),
    "long": (700, 0.3, 1024),
}  # median, spread, longest


@dataclass(frozen=True)
class Workload:
    """A model and rows to fine-tune it on."""

    model: str
    mode: str
    lengths: str
    rows: int = 16  # of an optimizer step
    processes: int = 1
    packing: bool = False  # then a step has about as many tokens as those rows

    @property
    def name(self) -> str:
        """As in the table."""
        packed = "-packed" if self.packing else ""
        return f"{self.model}-{self.mode}-{self.lengths}{packed}-{self.processes}p"


WORKLOADS = (
    Workload("2M", "lora", "even"),
    Workload("2M", "full", "tailed"),
    Workload("8M", "lora", "tailed"),
    Workload("8M", "qlora", "tailed"),
    Workload("20M", "lora", "tailed"),
    Workload("20M", "lora", "tailed", packing=True),
    Workload("20M", "full", "even"),
    Workload("60M", "lora", "even", rows=8),
    Workload("60M", "full", "long", rows=4),
    Workload("2M", "full", "tailed", processes=2),
    Workload("8M", "lora", "tailed", processes=2),
    Workload("20M", "lora", "even", processes=2),
)


def make_rows(load: Workload, vocabulary: int) -> Dataset:
    """Random tokens, as many rows as the steps need; the first tenth of each carries no loss."""
    median, spread, longest = LENGTHS[load.lengths]
    draw = np.random.default_rng(0)
    lengths = np.clip(median * np.exp(spread * draw.standard_normal(load.rows * STEPS)), 12, longest).astype(
        int
    )
    ids = [draw.integers(3, vocabulary, length).tolist() for length in lengths]
    labels = [[-100] * (len(row) // 10 + 1) + row[len(row) // 10 + 1 :] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": lengths.tolist()})


def run_config(load: Workload, rows: Dataset, folder: Path) -> RunConfig:
    """What a user would write."""
    longest = LENGTHS[load.lengths][2]
    tokens = max(1, round(sum(rows["length"]) / STEPS / longest)) * longest
    return RunConfig(
        model=ModelConfig(name=load.model, max_seq_len=longest),
        data=DataConfig(train_path="none"),
        tuning=TuningConfig(mode=load.mode),  # type: ignore[arg-type]
        train=TrainConfig(
            effective_batch_size=tokens if load.packing else load.rows,
            packing=load.packing,
            max_steps=STEPS,
            save_steps=1_000_000,
            report_to=[],
        ),
        output=OutputConfig(dir=str(folder), dtype="float32"),  # auto asks the base, which is no folder
    )


def require_predicted(plan: Plan) -> Plan:
    """The plan, if its seconds are predicted; what an earlier run measured shows no accuracy.

    Raises:
        SystemExit: they are an earlier run's.
    """
    if plan.step_seconds_origin != PROFILED:
        raise SystemExit(f"the seconds of a plan come from {plan.step_seconds_origin!r}; use an empty cache")
    return plan


def cut(plan: Plan) -> tuple[int, bool]:
    """What tells a plan from the others of its workload."""
    return plan.batch.accumulation, plan.activations.recomputes


def all_plans(work: "Work") -> Iterator[Plan]:
    """The planner's choice, then every other plan that the config allows, each with its predicted seconds."""
    load, chosen = work.load, work.plan(lambda plan: True)
    yield chosen
    row = LENGTHS[load.lengths][2] if load.packing else None
    splits = batch_choices(work.config.train, load.processes, row)
    for wanted in product([split.accumulation for split in splits], (False, True)):
        if wanted != cut(chosen):
            yield work.plan(lambda plan, wanted=wanted: cut(plan) == wanted)


class Work:
    """A workload on this machine: what its plans share."""

    def __init__(self, load: Workload, folder: Path) -> None:
        self.load, self.folder = load, folder
        self.architecture = small_config("llama", GEOMETRIES[load.model])
        rows = make_rows(load, GEOMETRIES[load.model]["vocabulary"])
        self.config = run_config(load, rows, folder)
        self.data = PreparedData(
            train=rows,
            val=None,
            test=None,
            max_seq_len=LENGTHS[load.lengths][2],
            stats=dict.fromkeys(SPLITS),
            cache_path=folder,
        )
        self.machine = detect()
        self.tokenizer = byte_level_tokenizer([], 300, self.data.max_seq_len)
        self.ranks = RankEnvironment.read()

    def plan(self, accept: Any) -> Plan:
        """The fastest by prediction, among those that `accept` takes."""
        architecture, facts = Architecture.of(self.architecture), DataFacts.of(self.data, self.config)
        request = Request(
            self.config, architecture, facts, self.machine, self.load.processes, budget_bytes=BUDGET
        )
        return require_predicted(fastest_plan(request, accept))

    def job(self, plan: Plan) -> Job:
        """A run with a plan."""
        resolved = ResolvedConfig(self.config, {}, self.folder)
        run = open_run(str(self.folder), "run", self.ranks.rank)
        return Job(
            resolved, run, self.architecture, self.tokenizer, self.data, self.machine, plan, self.ranks
        )

    def session(self, plan: Plan) -> Session:
        """The run's own trainer with a plan, ready for its first step."""
        job = self.job(plan)
        torch.manual_seed(0)
        model = random_model(self.architecture, plan, self.config.tuning, CPU)
        return open_session(job, model, ordered_rows(job), MemoryMeter.start("cpu"))

    def seconds(self, plan: Plan) -> float:
        """Of an optimizer step of a plan."""
        session, clock = self.session(plan), StepClock(CPU)
        session.trainer.add_callback(clock)
        session.trainer.train()
        close_session(session, plan)
        return statistics.mean(clock.seconds[1:])


def worker(load: Workload, rounds: list[int]) -> None:
    """Sweeps a workload; the first process prints a line for each plan and round."""
    warnings.simplefilter("ignore")
    lines = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as folder, quiet_libraries(Path(folder) / "log.txt"):
        work = Work(load, Path(folder))
        plans = list(all_plans(work))
        work.seconds(plans[0])  # the first one finds memory that the operating system has to clear
        for number in rounds:
            for plan in plans if number % 2 == 0 else reversed(plans):
                line = {
                    "workload": load.name,
                    "round": number,
                    "accumulation": plan.batch.accumulation,
                    "micro_batch": plan.batch.micro,
                    "checkpointing": plan.activations.recomputes,
                    "chosen": plan is plans[0],
                    "predicted": plan.step_seconds,
                    "measured": work.seconds(plan),
                }
                if work.ranks.is_main:
                    print(json.dumps(line), file=lines, flush=True)


def sweep(load: Workload, rounds: list[int], cache: Path) -> Iterator[dict[str, Any]]:
    """The lines of a workload, from processes of its own."""
    os.environ.update(SFT_PLAY_CACHE=str(cache), ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")
    saved_profile(detect(), load.processes)
    environment = os.environ | WAITING
    argv = [sys.executable]
    if load.processes > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // load.processes))
        argv += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={load.processes}"]
    argv += ["-m", "benchmarks.planner", "--worker", load.name, "--of-rounds", *map(str, rounds)]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise SystemExit(f"{load.name}: exit code {process.returncode}")


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each workload: the chosen plan beside the best one, by medians of the rounds."""
    found = []
    for name in dict.fromkeys(line["workload"] for line in lines):
        plans: dict[tuple[int, bool], list[dict[str, Any]]] = {}
        for line in lines:
            if line["workload"] == name:
                plans.setdefault((line["accumulation"], line["checkpointing"]), []).append(line)
        seconds = {key: statistics.median(line["measured"] for line in runs) for key, runs in plans.items()}
        best = min(seconds, key=seconds.__getitem__)
        chosen = next(key for key, runs in plans.items() if runs[0]["chosen"])
        errors = [runs[0]["predicted"] / seconds[key] - 1 for key, runs in plans.items()]
        found.append(
            {
                "workload": name,
                "plans": len(plans),
                "rounds": min(map(len, plans.values())),
                "chosen": described(plans[chosen][0]),
                "chosen_seconds": seconds[chosen],
                "best": described(plans[best][0]),
                "best_seconds": seconds[best],
                "slowest_seconds": max(seconds.values()),
                "regret": seconds[chosen] / seconds[best] - 1,
                "error_of_chosen": plans[chosen][0]["predicted"] / seconds[chosen] - 1,
                "error_median": statistics.median(map(abs, errors)),
                "errors": [round(error, 3) for error in errors],
            }
        )
    return found


def described(line: dict[str, Any]) -> str:
    """The micro-batch, the accumulation and what becomes of activations."""
    return (
        f"{line['micro_batch']:,} x {line['accumulation']}{', recomputed' if line['checkpointing'] else ''}"
    )


def totals(found: list[dict[str, Any]]) -> dict[str, float]:
    """What the aims speak of."""
    regrets = [entry["regret"] for entry in found]
    errors = [abs(error) for entry in found for error in entry["errors"]]
    return {
        "regret_median": statistics.median(regrets),
        "regret_worst": max(regrets),
        "error_median": statistics.median(errors),
    }


def result_table(found: list[dict[str, Any]]) -> Table:
    """For the console."""
    table = Table(title="Chosen plan against the best of all (micro-batch x accumulation)")
    for name in ("workload", "chosen", "best", "s/step", "best", "slowest", "regret", "predicted"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for entry in found:
        times = [f"{entry[key]:.3f}" for key in ("chosen_seconds", "best_seconds", "slowest_seconds")]
        shares = [f"{entry['regret']:.1%}", f"{entry['error_of_chosen']:+.0%}"]
        table.add_row(entry["workload"], entry["chosen"], entry["best"], *times, *shares)
    return table


def main(argv: list[str] | None = None) -> int:
    """Runs the sweep and writes the result; 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="workloads whose name begins so")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--of-rounds", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker(next(load for load in WORKLOADS if load.name == args.worker), args.of_rounds)
        return 0
    loads = [load for load in WORKLOADS if load.name.startswith(args.only or "")]
    log = MeasurementLog(RESULTS / f"planner_cpu{'_some' if args.only else ''}.lines.jsonl", CPU)
    with tempfile.TemporaryDirectory() as cache:
        for load in loads:
            done = {line["round"] for line in log.read() if line["workload"] == load.name}
            rounds = [number for number in range(args.rounds) if number not in done]
            for line in sweep(load, rounds, Path(cache)) if rounds else ():
                log.add(line)
                said = f"predicted {line['predicted']:.3f} s, measured {line['measured']:.3f} s"
                console().print(f"{load.name:28} {described(line):24} {said}", highlight=False)
    lines = log.read()
    found = summary(lines)
    console().print(result_table(found))
    reached = totals(found)
    for name, value in reached.items():
        console().print(f"{name.replace('_', ' ')}: {value:.1%} (aim: {AIMS[name]:.0%})", highlight=False)
    if not args.only:
        record = {"what": (__doc__ or "").splitlines()[0], **log.made, "aims": AIMS, **reached}
        write_result(RESULTS / "planner_cpu.json", record | {"summary": found}, {"runs": lines})
    log.path.unlink()
    return int(any(value > AIMS[name] for name, value in reached.items()))


if __name__ == "__main__":
    sys.exit(main())

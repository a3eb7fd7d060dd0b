"""Seconds of steps on several processes of this CPU, predicted and measured, and the choice of an engine.

    make bench-sharding                           # after the memory, which takes longer
    python -m benchmarks.sharding_time            # alone; twenty minutes at most
    python -m benchmarks.sharding_time --cases 1  # the first workload alone; writes nothing

Small models are trained for a few optimizer steps with the run's own trainer, by one process and by two and
four with each engine, whose plan is the fastest by prediction. Rounds go through the engines in turn, every
other one in reverse, each in processes of its own. What operations cost here is measured first, and what
communication costs by the first processes, as in a run. Regret is how much longer the engine takes that
`auto` chooses than the best. An interrupted benchmark continues where it stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.measurement_log import RESULTS, MeasurementLog, write_result
from benchmarks.planner import Work, Workload, described
from sft_play.engines.registry import engine_of
from sft_play.launch.accelerate import launch_command
from sft_play.launch.environment import WAITING
from sft_play.launch.ranks import RankEnvironment
from sft_play.machine.gpus import detect
from sft_play.plan import Plan
from sft_play.planning.speed.devices import saved_profile
from sft_play.train.ranks import from_main, with_known_exchange
from sft_play.ui.console import console, quiet_libraries

CPU = torch.device("cpu")
ROUNDS, MINUTES = 2, 18.0
WORLDS, ENGINES, ALONE = (2, 4), ("ddp", "deepspeed_z2", "fsdp2"), "none"
AIMS = {"regret_worst": 0.10}
CASES = (
    Workload("2M", "full", "tailed"),
    Workload("8M", "lora", "tailed"),
    Workload("20M", "lora", "even"),
    Workload("20M", "full", "even"),
)
PLACES = ((1, ALONE), *product(WORLDS, ENGINES))  # numbers of processes, and their engine


def case_name(load: Workload) -> str:
    """As in the table, without the number of processes."""
    return f"{load.model}-{load.mode}-{load.lengths}"


def worker(path: Path, cases: int, engine: str, number: int) -> None:
    """Measures an engine on each workload; the first process adds a line for each to a file."""
    warnings.simplefilter("ignore")
    ranks = RankEnvironment.read()
    if ranks.world_size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    for load in CASES[:cases]:
        with tempfile.TemporaryDirectory() as folder, quiet_libraries(Path(folder) / "log.txt"):
            line = measured(replace(load, processes=ranks.world_size), Path(folder), engine)
        if ranks.is_main:
            with path.open("a") as file:
                file.write(json.dumps({"case": case_name(load), "round": number, **line}) + "\n")
    if ranks.world_size > 1:
        torch.distributed.destroy_process_group()


def measured(load: Workload, folder: Path, engine: str) -> dict[str, Any]:
    """The seconds of the plan that is the fastest with an engine by prediction."""
    work = Work(load, folder)
    if load.processes > 1:  # unless it is known
        draft = from_main(lambda: work.plan(lambda plan: plan.sharing.engine == "ddp"))
        with_known_exchange(work.job(replace(draft, step_seconds=None)))
    chosen, plan = from_main(lambda: _plans(work, engine))
    work.seconds(plan)  # finds memory that the operating system has to clear
    return {
        "processes": load.processes,
        "engine": engine,
        "plan": {
            "micro_batch": plan.batch.micro,
            "accumulation": plan.batch.accumulation,
            "checkpointing": plan.activations.recomputes,
        },
        "chosen": chosen == engine,
        "predicted": plan.step_seconds,
        "measured": work.seconds(plan),
    }


def _plans(work: Work, engine: str) -> tuple[str, Plan]:
    """The engine that `auto` takes, and the plan of this one."""
    return work.plan(lambda plan: True).sharing.engine, work.plan(lambda plan: plan.sharing.engine == engine)


def measure(cases: int, world: int, engine: str, number: int, cache: Path) -> Iterator[dict[str, Any]]:
    """The lines of a round of an engine, from processes of its own.

    Raises:
        SystemExit: they failed.
    """
    path = cache / "lines.jsonl"
    path.unlink(missing_ok=True)
    own = ["-m", "benchmarks.sharding_time", "--worker", str(path), "--cases", str(cases)]
    own += ["--engine", engine, "--number", str(number)]
    environment, argv = os.environ | WAITING | {"SFT_PLAY_CACHE": str(cache)}, (sys.executable, *own)
    if world > 1:
        cores = None if "OMP_NUM_THREADS" in os.environ else os.cpu_count()
        engine_of(engine).prepare_launch()
        launch = launch_command(own, engine=engine, device="cpu", processes=world, cores=cores)
        environment, argv = environment | launch.environment, launch.argv
    done = subprocess.run(argv, env=environment, check=False)
    yield from map(json.loads, path.read_text().splitlines() if path.exists() else ())
    if done.returncode:
        raise SystemExit(f"{engine} on {world} processes: exit code {done.returncode}")


def places_of(number: int) -> tuple[tuple[int, str], ...]:
    """What is measured in a round, in turn."""
    return PLACES if number % 2 == 0 else PLACES[::-1]


def measure_missing(log: MeasurementLog, cases: int, rounds: int, minutes: float, cache: Path) -> None:
    """Adds to the log what is not in it; begins no engine after so many minutes."""
    began = time.monotonic()
    os.environ["SFT_PLAY_CACHE"] = str(cache)
    for world in (1, *WORLDS):
        saved_profile(detect(), world, sixteen_bit=False)
    for number in range(rounds):
        for world, engine in places_of(number):
            known = [_place(line) for line in log.read()]
            if known.count((number, world, engine)) >= cases or time.monotonic() - began > 60 * minutes:
                continue
            for line in measure(cases, world, engine, number, cache):
                log.add(line)
                said = f"predicted {line['predicted']:.3f} s, measured {line['measured']:.3f} s"
                console().print(
                    f"{line['case']:16} {world} {engine:13} {described(line['plan']):22} {said}",
                    highlight=False,
                )


def _place(line: dict[str, Any]) -> tuple[int, int, str]:
    return line["round"], line["processes"], line["engine"]


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each workload and number of processes with all engines: medians of the rounds, and the regret."""
    found = []
    for case, world in dict.fromkeys((line["case"], line["processes"]) for line in lines):
        runs: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if (line["case"], line["processes"]) == (case, world):
                runs.setdefault(line["engine"], []).append(line)
        if runs.keys() != {engine for count, engine in PLACES if count == world}:
            continue
        seconds = {name: statistics.median(one["measured"] for one in own) for name, own in runs.items()}
        predicted = {name: statistics.median(one["predicted"] for one in own) for name, own in runs.items()}
        chosen = next(name for name, own in runs.items() if own[0]["chosen"])
        best = min(seconds, key=seconds.__getitem__)
        entry = {"case": case, "processes": world, "rounds": min(map(len, runs.values()))}
        entry |= {"chosen": chosen, "best": best, "regret": seconds[chosen] / seconds[best] - 1}
        errors = {name: predicted[name] / seconds[name] - 1 for name in seconds}
        found.append(entry | {"predicted": predicted, "measured": seconds, "errors": errors})
    return found


def totals(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the aims speak of, and errors of predicted seconds: in all, and by engine."""
    several = [entry for entry in found if entry["processes"] > 1]
    errors = [(name, abs(error)) for entry in found for name, error in entry["errors"].items()]
    by_engine = {
        name: statistics.median(error for one, error in errors if one == name)
        for name in dict.fromkeys(one for one, _ in errors)
    }
    return {
        "regret_worst": max((entry["regret"] for entry in several), default=None),
        "error_median": statistics.median(error for _, error in errors),
        "error_by_engine": by_engine,
    }


def result_table(found: list[dict[str, Any]]) -> Table:
    """For the console: predicted / measured seconds of each engine."""
    table = Table("workload", "processes", "chosen", "best", "regret", *(ALONE, *ENGINES))
    for entry in found:
        cells = (
            f"{entry['predicted'][name]:.3f} / {entry['measured'][name]:.3f}"
            if name in entry["measured"]
            else ""
            for name in (ALONE, *ENGINES)
        )
        names = (entry["case"], str(entry["processes"]), entry["chosen"], entry["best"])
        table.add_row(*names, f"{entry['regret']:.1%}", *cells)
    return table


def main(argv: list[str] | None = None) -> int:
    """Measures what is missing and writes the result; 1 if the aim is missed or something still is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=len(CASES), help="so many of the workloads, from the first"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no engine begins")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker(args.worker, args.cases, args.engine, args.number)
        return 0
    part = args.cases < len(CASES)
    log = MeasurementLog(RESULTS / f"sharding_time{'_some' if part else ''}.lines.jsonl", CPU)
    with tempfile.TemporaryDirectory() as cache:
        measure_missing(log, args.cases, args.rounds, args.minutes, Path(cache))
    lines = log.read()
    found = summary(lines)
    if not found:
        return 1
    console().print(result_table(found))
    reached = totals(found)
    console().print(json.dumps(reached), highlight=False)
    complete = len(lines) >= args.rounds * len(PLACES) * args.cases
    if not part:
        record = {"what": (__doc__ or "").splitlines()[0], **log.made, "aims": AIMS, **reached}
        write_result(RESULTS / "sharding_time.json", record, {"summary": found, "runs": lines})
    if complete or part:
        log.path.unlink()
    missed = reached["regret_worst"] is None or reached["regret_worst"] > AIMS["regret_worst"]
    return int(missed or not complete)


if __name__ == "__main__":
    sys.exit(main())

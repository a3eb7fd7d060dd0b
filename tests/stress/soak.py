"""Trains under faults at random moments, and compares the weights with those of undisturbed runs.

    make soak MINUTES=60                       # writes benchmarks/results/soak.json
    make soak MINUTES=10 ARGS="--seed 3"       # other faults; writes nothing

A run begins again until it is done. One process and each engine on two processes take turns. Half of the
runs stay on their engine: their weights must be those of an undisturbed run, bit for bit. The others go
on with a random one whenever they begin again, and the loss of each step must be that of an undisturbed
run to 1e-6: Adam magnifies roundings of single weights, so that undisturbed runs, too, differ in them
from engine to engine. All that is random is drawn from the seed; in which step a fault finds a run is up
to the machine.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from benchmarks.markdown import RESULTS
from benchmarks.measurement_log import made_on, versions
from sft_play.engines.registry import ALONE, distributed_engines
from sft_play.runlog import RunDir, read_metrics
from sft_play.ui.console import console
from tests.stress.runs import small_run

ENGINES = (ALONE.name, *(engine.name for engine in distributed_engines()))
STEPS, SAVED_EVERY = 60, 5
CLOSE = 1e-6  # of the loss, after moves between engines
LIMIT_S, STOPPED_S, FULL_S = 600, 5, 5
MOST_STARTS = 20  # that are disturbed; one more is left alone
SOON = 0.8  # of the time of an undisturbed run, so that each is disturbed at least once
FULL_BYTES = 50_000  # less than a checkpoint's weights
BUG = 1  # exit code of an error that nobody expected


@dataclass(frozen=True)
class Start:
    """One process of `train`, from its start or a checkpoint until it ended."""

    engine: str
    faults: tuple[str, ...]  # "kill one after 21.3 s, in step 17"
    exit_code: int


@dataclass
class Soaked:
    """A run, and what was done to it."""

    number: int
    moves: bool  # from engine to engine
    starts: list[Start] = field(default_factory=list)
    difference: float | None = None  # of a weight, relative to the largest; None: it has no weights
    loss_difference: float | None = None  # of a step's loss, relative; infinite if steps are missing
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        """Whether it ended with the weights that it should have, and no start with a bug."""
        ended = self.starts[-1].exit_code == 0 and all(start.exit_code != BUG for start in self.starts)
        if not ended or self.difference is None or self.loss_difference is None:
            return False
        return self.loss_difference <= CLOSE if self.moves else self.difference == 0


# --- faults: each gets the processes that train, and what started them ---


def _ranks(process: subprocess.Popen) -> list[psutil.Process]:
    started = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in started if "train_distributed.py" in " ".join(child.cmdline())]
    return [child for child in ranks if "launch" not in child.cmdline()] or [psutil.Process(process.pid)]


def kill_one(process: subprocess.Popen, rng: random.Random) -> None:
    """SIGKILL to one rank."""
    rng.choice(_ranks(process)).kill()


def kill_all(process: subprocess.Popen, rng: random.Random) -> None:
    """SIGKILL to all processes, as when a machine is switched off."""
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def ask_to_end(process: subprocess.Popen, rng: random.Random) -> None:
    """SIGTERM, SIGINT or SIGHUP: a scheduler, Ctrl-C or a closed session."""
    process.send_signal(rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


def slow_rank(process: subprocess.Popen, rng: random.Random) -> None:
    """One rank stands still for a while."""
    rank = rng.choice(_ranks(process))
    rank.suspend()
    time.sleep(STOPPED_S)
    rank.resume()


def full_disk(process: subprocess.Popen, rng: random.Random) -> None:
    """No rank can write a larger file than this for a while."""
    ranks = _ranks(process)
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
    time.sleep(FULL_S)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(
                rank.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )


FAULTS = (kill_one, kill_all, ask_to_end, slow_rank, full_disk)


# --- runs ---


def start(folder: Path, name: str, engine: str) -> subprocess.Popen:
    """Starts the run, or goes on with it."""
    two = engine != ALONE.name
    command = [sys.executable, "-m", "sft_play", "train", *small_run(folder, name)]
    command += ["--processes", "2", "--engine", engine] if two else []
    # of two runs, a plan may find another way to be the faster one
    command += ["parallel.defer_exchange=true"] if engine == "fsdp2" else []
    command += [
        "train.resume=auto",
        f"train.max_steps={STEPS}",
        f"train.save_steps={SAVED_EVERY}",
        f"train.eval_steps={SAVED_EVERY}",
        "train.logging_steps=1",
        "train.batch_size=2",
        "train.grad_accum=auto",
        "train.effective_batch_size=8",
    ]
    environment = {**os.environ, "SFT_PLAY_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)


def left_alone(folder: Path, name: str, engine: str) -> Start:
    """Starts a run once, and nothing happens to it."""
    return Start(engine, (), start(folder, name, engine).wait(LIMIT_S))


def disturbed(folder: Path, name: str, engine: str, rng: random.Random, usual_s: float) -> Start:
    """Starts a run once, and does something to it, maybe several times, until it has ended."""
    process, began, faults = start(folder, name, engine), time.monotonic(), []
    while process.poll() is None:
        fault, delay_s = rng.choice(FAULTS), rng.uniform(0, SOON * usual_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        if process.poll() is not None:
            break
        metrics = read_metrics(RunDir(folder / name)) if (folder / name / "metrics.jsonl").exists() else []
        step = metrics[-1]["step"] if metrics else 0
        faults.append(f"{fault.__name__} after {time.monotonic() - began:.1f} s, after step {step}")
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ended meanwhile
            fault(process, rng)
        if fault in (kill_one, kill_all, ask_to_end):
            process.wait(LIMIT_S)
    return Start(engine, tuple(faults), process.returncode)


@dataclass(frozen=True)
class Whole:
    """A run that nothing happened to."""

    weights: dict[str, torch.Tensor]
    losses: dict[int, float]  # by step
    seconds: float


def undisturbed(folder: Path, engine: str) -> Whole:
    """A run that nothing happens to.

    Raises:
        RuntimeError: it fails.
    """
    began, run = time.monotonic(), folder / f"whole-{engine}"
    if left_alone(folder, run.name, engine).exit_code != 0:
        raise RuntimeError(f"the undisturbed run fails: {(run / 'log.txt').read_text()}")
    return Whole(_weights(run), _losses(run), time.monotonic() - began)


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def _losses(run: Path) -> dict[int, float]:
    lines = read_metrics(RunDir(run))
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def largest_loss_difference(found: dict[int, float], expected: dict[int, float]) -> float:
    """Between the losses of the same step, relative; infinite if one has steps that the other lacks."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(abs(found[step] / loss - 1) for step, loss in expected.items())


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Between two weights, relative to the largest of the tensor; infinite if they are not of one kind."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(
        ((found[name] - whole).abs().max() / whole.abs().max().clamp_min(1e-12)).item()
        for name, whole in expected.items()
    )


def soak(folder: Path, number: int, seed: int, whole: dict[str, Whole]) -> Soaked:
    """One run under faults, from its first start to its end."""
    rng, began, name = random.Random(f"{seed} {number}"), time.monotonic(), f"run-{number}"
    engine = ENGINES[number // 2 % len(ENGINES)]
    one = Soaked(number, moves=number % 2 == 1)
    while len(one.starts) <= MOST_STARTS and not (one.starts and one.starts[-1].exit_code == 0):
        using = rng.choice(ENGINES) if one.moves else engine
        if using not in whole:
            whole[using] = undisturbed(folder, using)
        if len(one.starts) == MOST_STARTS:
            one.starts.append(left_alone(folder, name, using))
        else:
            one.starts.append(disturbed(folder, name, using, rng, usual_s=whole[using].seconds))
    expected = whole[one.starts[0].engine]
    with contextlib.suppress(OSError):
        one.difference = largest_difference(_weights(folder / name), expected.weights)
        one.loss_difference = largest_loss_difference(_losses(folder / name), expected.losses)
    one.seconds = round(time.monotonic() - began, 1)
    return one


def main(argv: list[str] | None = None) -> int:
    """Soaks one run after the other until the time is over; 1 if one did not end as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="begin no other run after so many")
    parser.add_argument("--seed", type=int)
    args = parser.parse_args(argv)
    seed, until = args.seed or 0, time.monotonic() + 60 * args.minutes
    runs: list[Soaked] = []
    whole: dict[str, Whole] = {}
    console().print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as name:
        while time.monotonic() < until:
            one = soak(Path(name), len(runs), seed, whole)
            runs.append(one)
            for begun in one.starts:
                did = "; ".join(begun.faults) or "left alone"
                console().print(f"  {begun.engine}: {did}; exit {begun.exit_code}", highlight=False)
            said = "as undisturbed" if one.fine else "WRONG"
            differences = f"weights differ by {one.difference}, losses by {one.loss_difference}"
            console().print(f"run {one.number}: {said}, {differences}", highlight=False)
            if one.fine:
                shutil.rmtree(Path(name) / f"run-{one.number}")
            else:
                shutil.copytree(Path(name) / f"run-{one.number}", RESULTS / f"soak-{one.number}")
    if args.seed is None:
        tree = {"made_on": made_on(torch.device("cpu")), "versions": versions(), "seed": seed}
        tree |= {"runs": [asdict(one) | {"fine": one.fine} for one in runs]}
        (RESULTS / "soak.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return int(not all(one.fine for one in runs))


if __name__ == "__main__":
    raise SystemExit(main())

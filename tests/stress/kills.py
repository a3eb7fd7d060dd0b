"""Kills runs (SIGKILL) while they prepare data, save, publish the result or merge; counts how many go on.

    make bench-faults ARGS="saves"                  # all kinds, on one process and on two; hours
    make bench-faults ARGS="saves fsdp2 --fsdp2 9"  # a kind; goes on where it was cut; --fresh begins again

Every second trial of one process kills it just before a random one of the operations on the file system that
its phase has, the others at a random moment from the first of them on. FSDP2 and ZeRO-3 on two processes,
from the first save to the published result: the first process before an operation, one at any moment, or
both, in turns; a process that is left must end by itself. Then the same command, of a training with
`train.resume=auto`, must end with exit code 0 and the weights of a run that was not killed, bit for bit.

These processes are forked off a parent that has imported everything and has started no thread. With DDP and
ZeRO-2, the command and all that it started are killed at a random time after a random save has begun.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

# before anything reads them: a library with several threads could not be forked
os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch

from benchmarks.markdown import RESULTS, ROOT
from benchmarks.measurement_log import MeasurementLog
from sft_play.manifest import find_damage
from sft_play.ui.console import console
from tests.stress.forked import Operation, exit_codes, killed, ranks_of, recorded, run_command, within
from tests.stress.runs import descendants, small_run

STEPS = 5
LOOK_AGAIN_S = 0.0005
LIMIT_S = 1200
SURVIVOR_S = 60  # parallel.timeout_s: a process that is left ends by then
RUN = "killed"  # name of the run, and of its folder
ADAPTER, MERGED = f"{RUN}/adapter/adapter_model.safetensors", f"{RUN}/merged/model.safetensors"
FULL = f"{RUN}/model/model.safetensors"
BUILT = ("cache/builtin", "cache/data")


@dataclass(frozen=True)
class Phase:
    """A part of a command of one process, by the paths of its operations within the folder of a trial."""

    trials: int
    begins: tuple[str, ...]  # the phase begins with the first operation on one of these
    ends: tuple[str, ...]  # and ends with the last one on one of these
    result: str = ADAPTER
    merges: bool = False
    ranks: int = 1
    engine: str = "fsdp2"  # of several processes
    mode: str = "lora"


SAVED, END = (f"{RUN}/checkpoints/incomplete",), (RUN,)
PUBLISHED = tuple(f"{RUN}/{place}" for place in ("checkpoints", "adapter", "model"))
PHASES = {
    "data": Phase(34, BUILT, BUILT),
    "save": Phase(100, SAVED, (f"{RUN}/checkpoints",)),
    "result": Phase(33, (f"{RUN}/adapter",), END),
    "merge": Phase(33, (f"{RUN}/merged",), END, MERGED, merges=True),
    "fsdp2": Phase(100, SAVED, PUBLISHED, ranks=2),
    "fsdp2_full": Phase(100, SAVED, PUBLISHED, FULL, ranks=2, mode="full"),
    "zero3": Phase(100, SAVED, PUBLISHED, ranks=2, engine="deepspeed_z3"),
    "zero3_full": Phase(100, SAVED, PUBLISHED, FULL, ranks=2, engine="deepspeed_z3", mode="full"),
}
ENGINES = {"ddp": "ddp", "zero2": "deepspeed_z2"}
TRIALS = {**{name: phase.trials for name, phase in PHASES.items()}, "ddp": 5, "zero2": 5}


@dataclass(frozen=True)
class Trial:
    """What happened to a run that was killed."""

    kind: str  # one of TRIALS
    number: int
    seed: int
    where: str  # "before operation 17, os.rename" or "31 ms after ..."
    saving: bool  # whether a checkpoint was incomplete at that moment
    half_written: str  # what had the name of something complete and was not; "" as it should be
    steps_lost: int  # between the last save that had begun and the checkpoint that was resumed
    exit_code: int  # of the command that went on
    same_weights: bool

    @property
    def fine(self) -> bool:
        """Whether it went on as if nothing had been."""
        return self.exit_code == 0 and self.same_weights and not self.half_written and self.steps_lost <= 1


@dataclass(frozen=True)
class Reference:
    """A run that was not killed: what it did in a phase and what came of it."""

    folder: Path  # with the finished run and its cache
    operations: list[Operation]  # from the first to the last one of the phase
    digest: str  # of the weights


def settings(folder: Path, processes: int, *, resume: bool = False) -> list[str]:
    """Config and overrides of a small run that saves after each step."""
    return [
        *small_run(folder, RUN),
        f"train.max_steps={STEPS}",
        "train.save_steps=1",
        "train.eval_steps=1",
        "train.batch_size=4",
        f"train.effective_batch_size={4 * processes}",
        "train.report_to=[]",
        "train.probe=false",
        "data.limit=40",
        "data.val_path=null",
        "data.val_fraction=0.1",
        "data.test_path=null",
        *(["train.resume=auto"] if resume else []),
    ]


def launched(folder: Path, engine: str, *, resume: bool = False) -> list[str]:
    """The command of a run on two processes, which starts them."""
    return ["train", "--processes", "2", "--engine", engine, *settings(folder, 2, resume=resume)]


def processes_of(phase: Phase, folder: Path, *, resume: bool = False) -> list[Callable[[], int]]:
    """What the processes of a phase's command are to call; a merge is not resumed."""
    words = settings(folder, phase.ranks, resume=resume and not phase.merges)
    if phase.ranks > 1:
        engine = [f"parallel.engine={phase.engine}", f"parallel.timeout_s={SURVIVOR_S}"]
        return ranks_of([*words, *engine, f"tuning.mode={phase.mode}"], folder, phase.ranks)
    return [lambda: run_command(["merge" if phase.merges else "train", *words], folder)]


# --- forked processes ---


def part(operations: list[Operation], phase: Phase, folder: Path) -> list[Operation]:
    """The operations of a phase."""
    begins, ends = within(folder, phase.begins), within(folder, phase.ends)
    first = next(place for place, one in enumerate(operations) if one.path.startswith(begins))
    last = max(place for place, one in enumerate(operations) if one.path.startswith(ends))
    return operations[first : last + 1]


def make_reference(phase: Phase, folder: Path) -> Reference:
    """Trains, or trains and merges, without a disturbance; leaves the finished run in the folder."""
    before = replace(phase, merges=False)
    for each in [before, phase] if phase.merges else [phase]:
        found = recorded(processes_of(each, folder), folder)
    return Reference(folder, part(found, phase, folder), digest_of(folder / phase.result))


def set_out(kind: str, number: int, folder: Path, reference: Reference) -> None:
    """Puts into a folder what a trial starts from."""
    left_out = ["data", "builtin"] if kind == "data" else []
    shutil.copytree(reference.folder / "cache", folder / "cache", ignore=shutil.ignore_patterns(*left_out))
    if PHASES[kind].merges:
        # every second time, an earlier merged model has to be replaced
        left_out = ["checkpoints", "merged"] if number // 2 % 2 else ["checkpoints"]
        finished = reference.folder / RUN
        shutil.copytree(finished, folder / RUN, ignore=shutil.ignore_patterns(*left_out))


@dataclass(frozen=True)
class Moment:
    """When a trial kills which processes."""

    where: str
    at: int = 0  # before this operation of the phase, from 1
    after_s: float = 0  # of its first operation, if `at` is 0
    victims: tuple[int, ...] = (0,)


def moment_of(phase: Phase, number: int, rng: random.Random, operations: list[Operation]) -> Moment:
    """A random moment: before an operation in each second trial of one process, in each third of several."""
    ways = 2 if phase.ranks == 1 else 3
    if number % ways == 1:
        at = rng.randint(1, len(operations))
        return Moment(f"before operation {at} of {len(operations)}, {operations[at - 1].event}", at)
    after_s = rng.uniform(0, operations[-1].seconds - operations[0].seconds)
    where = f"{1000 * after_s:.0f} ms after the first of {len(operations)} operations"
    everyone = tuple(range(phase.ranks))
    victims = everyone if number % ways == 0 else (rng.choice(everyone),)
    who = (
        f", {'all processes' if victims == everyone else f'process {victims[0]}'}" if phase.ranks > 1 else ""
    )
    return Moment(where + who, 0, after_s, victims)


def trial_of(
    kind: str, number: int, seed: int, rng: random.Random, folder: Path, reference: Reference
) -> Trial:
    """One trial of a phase, in a folder of its own."""
    phase = PHASES[kind]
    while True:  # until it was killed: a run may be faster than the one that was measured
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        set_out(kind, number, folder, reference)
        moment = moment_of(phase, number, rng, reference.operations)
        runs, how = processes_of(phase, folder), asdict(moment)
        where = how.pop("where")
        if killed(runs, within(folder, phase.begins), **how):
            break
    saving, lost = lost_by(folder)
    broken = half_written(folder)
    code = max(exit_codes(processes_of(phase, folder, resume=True)), key=abs)
    same = digest_of(folder / phase.result) == reference.digest
    return Trial(kind, number, seed, where, saving, broken, lost, code, same)


# --- what a killed run has left ---


def digest_of(file: Path) -> str:
    """A hash of the weights."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "none"


def lost_by(folder: Path) -> tuple[bool, int]:
    """Whether a checkpoint is incomplete, and the steps since the newest complete one."""
    checkpoints = folder / RUN / "checkpoints"
    incomplete, complete = (
        [int(path.name.partition("-")[2]) for path in place.glob("checkpoint-*")]
        for place in (checkpoints / "incomplete", checkpoints)
    )
    newest = max(complete, default=0)
    return bool(incomplete), max([newest, *incomplete]) - newest


def half_written(folder: Path) -> str:
    """What has the name of a checkpoint, a result or cached data, but is not complete."""
    patterns = [
        f"{RUN}/checkpoints/checkpoint-*",
        *(f"{RUN}/{result}" for result in ("adapter", "model", "merged")),
        *(f"{p}/*" for p in BUILT),
    ]
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_dir()]
    return "; ".join(
        f"{path.name}: {damage}"
        for path in found
        if ".tmp-" not in path.name and (damage := find_damage(path))
    )


# --- two processes of a launcher ---


def start(argv: list[str], folder: Path) -> subprocess.Popen:
    """Starts a command of two processes."""
    env, quiet = {**os.environ, "SFT_PLAY_CACHE": str(folder.parent / "cache")}, subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "sft_play", *argv], env=env, stdout=quiet, stderr=quiet)


def killed_in_a_save(argv: list[str], folder: Path, save: int, delay_s: float) -> bool:
    """Kills a command and all processes that it started so long after a save has begun."""
    process = start(argv, folder)
    begun = folder / RUN / "checkpoints" / "incomplete" / f"checkpoint-{save}"
    published = begun.parent.parent / begun.name
    while not begun.exists() and not published.exists() and process.poll() is None:
        time.sleep(LOOK_AGAIN_S)
    time.sleep(delay_s)
    if process.poll() is not None:
        return False
    for member in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def trial_of_two(kind: str, number: int, seed: int, rng: random.Random, folder: Path, expected: str) -> Trial:
    """One trial of two processes, in a folder of its own."""
    while True:
        shutil.rmtree(folder / RUN, ignore_errors=True)
        save, delay_s = rng.randint(1, STEPS), rng.uniform(0, 0.4)
        if killed_in_a_save(launched(folder, ENGINES[kind]), folder, save, delay_s):
            break
    saving, lost = lost_by(folder)
    broken = half_written(folder)
    code = start(launched(folder, ENGINES[kind], resume=True), folder).wait(LIMIT_S)
    same = digest_of(folder / ADAPTER) == expected
    where = f"{1000 * delay_s:.0f} ms into save {save}"
    return Trial(kind, number, seed, where, saving, broken, lost, code, same)


def weights_of_two(kind: str, folder: Path) -> str:
    """The weights of an undisturbed run of two processes.

    Raises:
        RuntimeError: it fails.
    """
    if start(launched(folder, ENGINES[kind]), folder).wait(LIMIT_S) != 0:
        raise RuntimeError(f"the undisturbed {kind} run fails: {(folder / RUN / 'log.txt').read_text()}")
    return digest_of(folder / ADAPTER)


# --- all ---


def trials_of(kind: str, count: int, seed: int, log: MeasurementLog, done: set[int]) -> None:
    """Runs the trials of a kind that are not done yet, and logs each."""
    missing = [number for number in range(count) if number not in done]
    if not missing:
        return
    commit = current_commit()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "undisturbed"
        place.mkdir()
        reference = make_reference(PHASES[kind], place) if kind in PHASES else None
        expected = "" if reference else weights_of_two(kind, place)
        for number in missing:
            rng = random.Random(f"{kind} {number} {seed}")
            folder = Path(name) / "trial"
            folder.mkdir()
            began = time.monotonic()
            if reference:
                one = trial_of(kind, number, seed, rng, folder, reference)
            else:
                one = trial_of_two(kind, number, seed, rng, folder, expected)
            shutil.rmtree(folder)
            log.add(asdict(one) | {"seconds": round(time.monotonic() - began, 1), "commit": commit})
            text = f"{kind} {number + 1}/{count}  {one.where}: {'went on' if one.fine else one}"
            console().print(text, highlight=False, markup=False, soft_wrap=True)


def summary_of(lines: list[dict]) -> dict:
    """Counts, and the trials that went wrong."""
    besides = ("seconds", "commit")
    trials = [Trial(**{key: value for key, value in line.items() if key not in besides}) for line in lines]
    return {
        "trials": len(trials),
        "went_on_to_the_same_weights": sum(one.fine for one in trials),
        "killed_while_a_checkpoint_was_incomplete": sum(one.saving for one in trials),
        "most_intervals_lost": max((one.steps_lost for one in trials), default=0),
        "minutes": round(sum(line["seconds"] for line in lines) / 60, 1),
        "wrong": [asdict(one) for one in trials if not one.fine],
    }


def main(argv: list[str] | None = None) -> None:
    """Runs the trials that are missing, and writes the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="kind", help=f"any of: {', '.join(TRIALS)} (default: all)"
    )
    for kind, count in TRIALS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, metavar="N", help=f"default: {count}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="forget the trials of an earlier call")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for kills.json")
    args = parser.parse_args(argv)
    if unknown := set(args.kinds) - set(TRIALS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(TRIALS)}")
    log = MeasurementLog(args.results / "kills.lines.jsonl", torch.device("cpu"))
    if args.fresh:
        log.path.unlink(missing_ok=True)
    file = args.results / "kills.json"
    for kind in args.kinds or TRIALS:
        count = getattr(args, kind)
        done = {line["number"] for line in log.read() if line["kind"] == kind and line["seed"] == args.seed}
        trials_of(kind, count, args.seed, log, done)
        lines = [line for line in log.read() if line["kind"] == kind and line["seed"] == args.seed]
        if lines:
            commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
            made = {"date": f"{date.today()}", "commit": commits, "seed": args.seed, **log.made}
            write_kind(file, kind, summary_of(lines) | made)


def current_commit() -> str:
    """The commit of the code that was tried, with a + if files have been changed since."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def write_kind(file: Path, kind: str, row: dict) -> None:
    """Puts a kind's counts into the results; those of other kinds stay, each with what it was made with."""
    rows = json.loads(file.read_text(encoding="utf-8"))["kinds"] if file.exists() else {}
    kinds = {name: row if name == kind else rows[name] for name in TRIALS if name == kind or name in rows}
    tree = {"steps_saved_each_run": STEPS, "kinds": kinds}
    file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Kills runs (SIGKILL) in all phases of saving, resumes them, and counts how many end as if nothing had been.

    make bench-faults ARGS="saves"                 # writes benchmarks/results/kills.json
    python -m benchmarks.kills --one 0 --ddp 5     # keeps the results of one process

A run saves after each of its steps. It is killed at a random operation on the file system between its first
save and its end (half of the trials of one process), or at a random time after a random save has begun (the
others; of two processes, the command and everything that it started). Then `train --resume` must end with
exit code 0 and the weights of the run that was not killed, bit for bit.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.faults import RESULTS, ROOT, descendants
from sft_play.fingerprints import installed_versions
from sft_play.runlog import console, read_json

STEPS = 5
CHANGING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # audit events of Python
LOOK_AGAIN_S = 0.0005
ENGINES = {"one": "none", "ddp": "ddp", "zero2": "deepspeed_z2"}
TRIALS = {"one": 200, "ddp": 10, "zero2": 10}


@dataclass(frozen=True)
class Trial:
    """What happened to a run that was killed."""

    kind: str  # one of ENGINES
    where: str  # "operation 17: os.rename" or "31 ms into save 2"
    saving: bool  # whether a checkpoint was incomplete at that moment
    steps_lost: int  # between the last save that had begun and the checkpoint that was resumed
    exit_code: int  # of the resumed run
    same_weights: bool


def arguments(folder: Path, engine: str, *, resume: bool = False) -> list[str]:
    """Config and overrides of a small run that saves after each step."""
    parallel = ["--processes", "2", "--engine", engine] if engine != "none" else []
    return [
        "train",
        *parallel,
        "--config",
        str(ROOT / "configs" / "demo.yaml"),
        "model.name=builtin:tiny",
        "eval.generate=false",
        f"output.dir={folder}",
        "output.name=killed",
        f"train.max_steps={STEPS}",
        "train.save_steps=1",
        "train.eval_steps=1",
        "train.batch_size=4",
        f"train.effective_batch_size={8 if parallel else 4}",
        "train.report_to=[]",
        "train.probe=false",
        "data.limit=40",
        *(["train.resume=auto"] if resume else []),
    ]


def in_child(function: Callable[[], int]) -> int:
    """Calls the function in a forked process, which need not import anything again; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    try:
        code = function()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the child must not return into the code of its parent
        code = 1
    os._exit(code)


def exit_code_of(pid: int) -> int:
    """Waits for a child; the exit code, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_command(argv: list[str], folder: Path) -> int:
    """Runs a command of the CLI in this process; what it prints goes to a file."""
    from sft_play.cli import main

    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return main(argv)


def count_operations(staging: Path, act: Callable[[int, str], None]) -> None:
    """Calls `act` with number and name of each operation that changes files, from the first save on."""
    count = 0

    def look(event: str, details: tuple) -> None:
        nonlocal count
        writes = event != "open" or (len(details) > 2 and details[2] & (os.O_WRONLY | os.O_RDWR))
        if event not in CHANGING or not writes:
            return
        if count or str(details[0]).startswith(str(staging)):
            count += 1
            act(count, event)

    sys.addaudithook(look)


def killed_at_operation(folder: Path, number: int) -> str:
    """Runs until that operation and kills the run just before it; returns its name."""
    note = folder / "operation"

    def act(count: int, event: str) -> None:
        if count == number:
            descriptor = os.open(note, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, event.encode())
            ctypes.CDLL(None).kill(os.getpid(), signal.SIGKILL)

    def run() -> int:
        count_operations(folder / "killed" / "checkpoints" / "incomplete", act)
        return run_command(arguments(folder, "none"), folder)

    exit_code_of(in_child(run))
    return f"operation {number}: {note.read_text() if note.exists() else 'not reached'}"


def operations_of_a_run(folder: Path) -> int:
    """The number of operations of an undisturbed run from its first save on."""
    note = folder / "count"
    note.touch()
    descriptor = os.open(note, os.O_WRONLY)

    def act(count: int, event: str) -> None:
        os.pwrite(descriptor, str(count).encode(), 0)

    def run() -> int:
        count_operations(folder / "killed" / "checkpoints" / "incomplete", act)
        return run_command(arguments(folder, "none"), folder)

    if exit_code_of(in_child(run)) != 0:
        raise RuntimeError(f"the run that is not killed fails: {(folder / 'output.txt').read_text()}")
    return int(note.read_text())


def killed_in_a_save(folder: Path, engine: str, save: int, delay_s: float) -> str:
    """Kills the run and all processes that it started so long after a save has begun."""
    argv = arguments(folder, engine)
    if engine == "none":
        pid = in_child(lambda: run_command(argv, folder))
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "sft_play", *argv]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
        pid = process.pid
    begun = folder / "killed" / "checkpoints" / "incomplete" / f"checkpoint-{save}"
    published = begun.parent.parent / begun.name
    while not begun.exists() and not published.exists() and psutil.pid_exists(pid):
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(LOOK_AGAIN_S)
    time.sleep(delay_s)
    for member in [*descendants(pid), pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    exit_code_of(pid)
    return f"{1000 * delay_s:.0f} ms into save {save}"


def digest_of(folder: Path) -> str:
    """A hash of the published weights."""
    file = folder / "killed" / "adapter" / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "none"


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def resume(kind: str, where: str, folder: Path, expected: str) -> Trial:
    """Resumes a killed run and looks at how it ends."""
    checkpoints = folder / "killed" / "checkpoints"
    incomplete, published = steps_in(checkpoints / "incomplete"), steps_in(checkpoints)
    newest = max(published, default=0)
    lost = max([newest, *incomplete]) - newest
    argv = arguments(folder, ENGINES[kind], resume=True)
    if kind == "one":
        code = exit_code_of(in_child(lambda: run_command(argv, folder)))
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "sft_play", *argv]
        code = subprocess.run(command, env=environment, capture_output=True).returncode
    return Trial(kind, where, bool(incomplete), lost, code, digest_of(folder) == expected)


def trial(kind: str, number: int, rng: random.Random, operations: int, expected: str) -> Trial:
    """One trial, in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "one" and number % 2:
            where = killed_at_operation(folder, rng.randint(1, operations))
        else:
            longest = 0.15 if kind == "one" else 0.4
            where = killed_in_a_save(folder, ENGINES[kind], rng.randint(1, STEPS), rng.uniform(0, longest))
        return resume(kind, where, folder, expected)


def expected_weights(kind: str) -> tuple[str, int]:
    """The weights of a run that is not killed, and the number of its operations if it has one process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        operations = 0
        if kind == "one":
            operations = operations_of_a_run(folder)
        else:
            killed_in_a_save(folder, ENGINES[kind], STEPS + 1, 0)  # there is no such save: runs to its end
        return digest_of(folder), operations


def summary_of(trials: list[Trial]) -> dict:
    """Counts, and those that went wrong."""
    wrong = [one for one in trials if one.exit_code or not one.same_weights]
    return {
        "trials": len(trials),
        "killed_while_a_checkpoint_was_incomplete": sum(one.saving for one in trials),
        "went_on_to_the_same_weights": len(trials) - len(wrong),
        "most_intervals_lost": max((one.steps_lost for one in trials), default=0),
        "wrong": [asdict(one) for one in wrong],
    }


def measure(kind: str, count: int, rng: random.Random) -> Iterator[list[Trial]]:
    """Runs the trials of a kind and prints how they end; yields all so far after each."""
    expected, operations = expected_weights(kind)
    trials: list[Trial] = []
    for number in range(count):
        last = trial(kind, number, rng, operations, expected)
        trials.append(last)
        fine = last.exit_code == 0 and last.same_weights
        console().print(f"{kind} {number + 1}/{count}  {'ok' if fine else last}", highlight=False)
        yield trials


def main(argv: list[str] | None = None) -> None:
    """Runs the trials and writes the counts after each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind, count in TRIALS.items():
        text = f"trials of {kind} (default: {count}; 0 keeps the results that there are)"
        parser.add_argument(f"--{kind}", type=int, default=count, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # so that no child has to import them again; no thread may exist before the fork
    import sft_play.commands.train
    import sft_play.train.trainer  # noqa: F401

    file = RESULTS / "kills.json"
    tree = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": installed_versions(),
        "steps_saved_each_run": STEPS,
        "kinds": read_json(file).get("kinds", {}),
    }
    for kind in TRIALS:
        count, began = getattr(args, kind), time.time()
        for trials in measure(kind, count, random.Random(args.seed)) if count else ():
            minutes = round((time.time() - began) / 60, 1)
            tree["kinds"][kind] = {**summary_of(trials), "seed": args.seed, "minutes": minutes}
            file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

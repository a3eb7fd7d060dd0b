"""Measures how long a run of two processes takes to end after a fault, and what it reports, on the CPU.

    make bench-faults                           # all faults; writes benchmarks/results/faults.json
    make bench-faults ARGS="kill sleep"         # some faults; writes nothing
    make bench-faults ARGS="saves"              # kill -9 in all phases of a run (kills.py)

The fault is injected into rank 1 at the beginning of step 4 (faulty_rank.py); time is measured from there to
the exit of the last process.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.markdown import RESULTS, ROOT
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.runlog import RunDir, read_metrics
from sft_play.ui.console import console
from tests.stress.faulty_rank import FAULTS
from tests.stress.runs import descendants, small_run

MESSAGE_LINES = 6  # lines of a run's message in the results
SCRIPT = Path(__file__).with_name("faulty_rank.py")
LIMIT_S = 10  # parallel.timeout_s of these runs
STEP = 4
ENDLESS = "train.max_steps=100000"
HANGS = ("sleep", "spin", "stop")
KILLED_FROM_OUTSIDE = ("launcher", "command")
TORCHRUN = ("torchrun raise", "torchrun sleep")


@dataclass(frozen=True)
class Outcome:
    """How a run ended after a fault."""

    fault: str
    seconds: float
    exit_code: int
    message: str
    left_over: int  # processes of the run that are still running


def settings(folder: Path, limit_s: int = LIMIT_S) -> list[str]:
    """Config and overrides of a small run that never ends by itself."""
    return [
        *small_run(folder, "faulty"),
        f"parallel.timeout_s={limit_s}",
        "train.batch_size=4",
        "train.effective_batch_size=8",
        "train.logging_steps=1",
        "train.eval_steps=100000",
        "train.report_to=[]",
        "train.probe=false",
        ENDLESS,
    ]


def under_launcher(fault: str, folder: Path, limit_s: int = LIMIT_S) -> Outcome:
    """Injects a fault into rank 1 under our launcher."""
    note = folder / "injected"
    environment = {"FAULT": f"{fault}@{STEP}", "FAULT_NOTE": str(note), "OMP_NUM_THREADS": "1"}
    script = [str(SCRIPT), *settings(folder, limit_s)]
    command = launch_command(script, engine="ddp", device="cpu", processes=2)
    (folder / "faulty").mkdir(exist_ok=True)
    before = descendants()
    result = run_launcher(command, RunDir(folder / "faulty"), environment=environment, timeout_s=120)
    ended = time.time()
    if not note.exists():
        raise RuntimeError(f"the run ended before the fault: {result.message}")
    seconds = ended - float(note.read_text())
    return Outcome(fault, seconds, result.code, result.message, len(descendants() - before))


def under_torchrun(fault: str, folder: Path, limit_s: int = LIMIT_S) -> Outcome:
    """Injects the same fault under torchrun, without our launcher."""
    note = folder / "injected"
    environment = {
        "FAULT": f"{fault}@{STEP}",
        "FAULT_NOTE": str(note),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--nproc_per_node=2", "--rdzv-backend=loopback"]
    before = descendants()
    done = subprocess.run(
        [*torchrun, *options, str(SCRIPT), *settings(folder, limit_s)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    ended = time.time()
    if not note.exists():
        raise RuntimeError(f"the run ended before the fault: {done.stderr}")
    seconds = ended - float(note.read_text())
    return Outcome(f"torchrun {fault}", seconds, done.returncode, done.stderr, len(descendants() - before))


def started(folder: Path, *overrides: str) -> subprocess.Popen:
    """The command that a user typed, once its ranks train."""
    argv = ["train", "--processes", "2", "--engine", "ddp", *settings(folder), *overrides]
    command = subprocess.Popen(
        [sys.executable, "-m", "sft_play", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while max((record["step"] for record in read_metrics(RunDir(folder / "faulty"))), default=0) < STEP:
        if command.poll() is not None:
            raise RuntimeError(command.communicate()[1])
        time.sleep(0.05)
    return command


def pause_whole(folder: Path, limit_s: int, seconds: float) -> Outcome:
    """Stops a whole run of some steps for a while (SIGSTOP), as schedulers do, and lets it go on."""
    command = started(folder, f"parallel.timeout_s={limit_s}", "train.max_steps=30")
    members = [psutil.Process(pid) for pid in (command.pid, *descendants(command.pid))]
    for member in members:
        member.suspend()
    time.sleep(seconds)
    for member in members:
        member.resume()
    went_on = time.time()
    _, message = command.communicate(timeout=120)
    left = sum(_alive(member.pid) for member in members)
    return Outcome("pause", time.time() - went_on, command.returncode, message, left)


def kill_from_outside(target: str, folder: Path) -> Outcome:
    """Kills (SIGKILL) the launcher or the command that the user typed while the ranks train."""
    command = started(folder)
    members = descendants(command.pid) | {command.pid}
    (launcher,) = psutil.Process(command.pid).children()
    killed_at = time.time()
    (command if target == "command" else launcher).kill()
    _, message = command.communicate(timeout=60)
    while (left := sum(_alive(pid) for pid in members)) and time.time() - killed_at < 20:
        time.sleep(0.02)
    seconds = time.time() - killed_at
    return Outcome(f"kill -9 of the {target}", seconds, command.returncode, message, left)


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def condense(text: str) -> str:
    """The message without the frames of tracebacks, launcher logs and the folders of this machine."""
    for folder in (str(ROOT), tempfile.gettempdir()):
        text = text.replace(folder, "...")
    lines = [line for line in text.splitlines() if line[:1] not in ("", " ")]
    return "\n".join([line for line in lines if not re.match(r"[WE]\d{4} ", line)][:MESSAGE_LINES])


def measure(name: str) -> Outcome:
    """Measures one fault, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if name in KILLED_FROM_OUTSIDE:
            return kill_from_outside(name, Path(folder))
        if name in TORCHRUN:
            return under_torchrun(name.split()[1], Path(folder))
        return under_launcher(name, Path(folder))


def main() -> None:
    """Measures the faults that the command line names."""
    if sys.argv[1:2] == ["saves"]:
        from tests.stress import kills  # which sets the environment of what it forks

        kills.main(sys.argv[2:])
        return
    every = [*FAULTS, *KILLED_FROM_OUTSIDE, *TORCHRUN]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "faults", nargs="*", metavar="fault", help=f"any of: {', '.join(every)} (default: all); or saves"
    )
    asked = parser.parse_args().faults
    found = []
    for name in asked or every:
        outcome = measure(name)
        found.append(outcome)
        console().print(
            f"{name}  {outcome.seconds:.1f} s  exit code {outcome.exit_code}  "
            f"processes left over: {outcome.left_over}"
        )
        message = outcome.message.splitlines()[-12:]
        console().print("\n".join(f"    {line}" for line in message))
    if asked:
        return
    facts = {
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "processes": 2,
        "limit_s": LIMIT_S,
    }
    versions = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    faults = [asdict(replace(outcome, message=condense(outcome.message))) for outcome in found]
    tree = {**facts, "versions": versions, "faults": faults}
    (RESULTS / "faults.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

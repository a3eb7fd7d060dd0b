"""How long a run of two processes takes to end after a fault, and what it says: real training runs on the CPU.

    make bench-faults                           # all, into benchmarks/results/faults.json
    make bench-faults ARGS="kill sleep"         # some, nothing written

Rank 1 meets the fault at the beginning of step 4 (faulty_rank.py); time runs from there to the end of the last process.
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

from benchmarks.faulty_rank import FAULTS
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.runlog import RunDir, console, read_metrics

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
SAID_LINES = 6  # of what a run said, in the results
SCRIPT = Path(__file__).with_name("faulty_rank.py")
LIMIT_S = 10  # parallel.timeout_s of these runs
STEP = 4
ENDLESS = "train.max_steps=100000"
HANGS = ("sleep", "spin", "stop")
KILLED_FROM_OUTSIDE = ("launcher", "command")
TORCHRUN = ("torchrun raise", "torchrun sleep")


@dataclass(frozen=True)
class Ended:
    """What came of a fault."""

    fault: str
    seconds: float
    exit_code: int
    message: str
    left_over: int  # processes of the run that are still there


def settings(folder: Path, limit_s: int = LIMIT_S) -> list[str]:
    """Config and overrides of a small run that goes on until something happens."""
    return [
        "--config", str(Path(__file__).parents[1] / "configs" / "demo.yaml"), "model.name=builtin:tiny", "eval.generate=false",
        f"output.dir={folder}", "output.name=faulty", f"parallel.timeout_s={limit_s}", "train.batch_size=4",
        "train.effective_batch_size=8", "train.logging_steps=1", "train.eval_steps=100000", "train.report_to=[]",
        "train.probe=false", ENDLESS,
    ]  # fmt: skip


def within(fault: str, folder: Path, limit_s: int = LIMIT_S) -> Ended:
    """A fault within rank 1, under our launcher."""
    note = folder / "struck"
    environment = {"FAULT": f"{fault}@{STEP}", "FAULT_NOTE": str(note), "OMP_NUM_THREADS": "1"}
    command = launch_command([str(SCRIPT), *settings(folder, limit_s)], engine="ddp", device="cpu", processes=2)
    (folder / "faulty").mkdir(exist_ok=True)
    before = family()
    result = run_launcher(command, RunDir(folder / "faulty"), processes=2, environment=environment, timeout_s=120)
    ended = time.time()
    if not note.exists():
        raise RuntimeError(f"the run ended before the fault: {result.message}")
    return Ended(fault, ended - float(note.read_text()), result.code, result.message, len(family() - before))


def under_torchrun(fault: str, folder: Path, limit_s: int = LIMIT_S) -> Ended:
    """The same without our launcher."""
    note = folder / "struck"
    environment = {"FAULT": f"{fault}@{STEP}", "FAULT_NOTE": str(note), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=loopback"]
    before = family()
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *settings(folder, limit_s)], env={**os.environ, **environment}, capture_output=True, text=True
    )
    ended = time.time()
    if not note.exists():
        raise RuntimeError(f"the run ended before the fault: {done.stderr}")
    return Ended(f"torchrun {fault}", ended - float(note.read_text()), done.returncode, done.stderr, len(family() - before))


def from_outside(whom: str, folder: Path) -> Ended:
    """Kills (-9) the launcher or the command that a person typed, while the ranks train."""
    words = ["train", "--processes", "2", "--engine", "ddp", *settings(folder)]
    command = subprocess.Popen(
        [sys.executable, "-m", "sft_play", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while max((record["step"] for record in read_metrics(RunDir(folder / "faulty"))), default=0) < STEP:
        if command.poll() is not None:
            raise RuntimeError(command.communicate()[1])
        time.sleep(0.05)
    members = family(command.pid) | {command.pid}
    (launcher,) = psutil.Process(command.pid).children()
    struck = time.time()
    (command if whom == "command" else launcher).kill()
    _, said = command.communicate(timeout=60)
    while (left := sum(_alive(pid) for pid in members)) and time.time() - struck < 20:
        time.sleep(0.02)
    return Ended(f"kill -9 of the {whom}", time.time() - struck, command.returncode, said, left)


def family(of: int | None = None) -> set[int]:
    """The processes below one (default: this one)."""
    return {child.pid for child in psutil.Process(of).children(recursive=True)}


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def in_short(text: str) -> str:
    """What was said, without the frames of tracebacks, launchers' logs and the folders of this machine."""
    for folder in (str(ROOT), tempfile.gettempdir()):
        text = text.replace(folder, "...")
    lines = [line for line in text.splitlines() if line[:1] not in ("", " ") and not re.match(r"[WE]\d{4} ", line)]
    return "\n".join(lines[:SAID_LINES])


def measure(name: str) -> Ended:
    """One fault, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if name in KILLED_FROM_OUTSIDE:
            return from_outside(name, Path(folder))
        if name in TORCHRUN:
            return under_torchrun(name.split()[1], Path(folder))
        return within(name, Path(folder))


def main() -> None:
    """Measures what the command line names."""
    every = [*FAULTS, *KILLED_FROM_OUTSIDE, *TORCHRUN]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="fault", help=f"of: {', '.join(every)}; default all")
    asked = parser.parse_args().faults
    found = []
    for name in asked or every:
        ended = measure(name)
        found.append(ended)
        console().print(f"[bold]{name}[/]  {ended.seconds:.1f} s  exit code {ended.exit_code}  left over {ended.left_over}")
        console().print("\n".join(f"    {line}" for line in ended.message.splitlines()[-12:]), markup=False)
    if asked:
        return
    facts = {"device": f"{platform.machine()} CPU, {os.cpu_count()} cores", "processes": 2, "limit_s": LIMIT_S}
    versions = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    faults = [asdict(replace(ended, message=in_short(ended.message))) for ended in found]
    tree = {**facts, "versions": versions, "faults": faults}
    (RESULTS / "faults.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

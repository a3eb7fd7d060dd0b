"""The run directory, and the metrics written into it.

runs/<name>/  config.resolved.yaml  plan.json  data.json  environment.json  metrics.jsonl  summary.json
report.html  log.txt  checkpoints/  adapter/ (or model/)  tensorboard/
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.errors import RunInUseError
from sft_play.files import read_whole, storing, write_atomic
from sft_play.secrets import redact
from sft_play.spelling import RUNS, make, var
from sft_play.units import KIB, MIB

# Bytes of a file in a run directory; a longer one is none of ours.
LONGEST_METRICS, LONGEST_JSON = 256 * MIB, 64 * MIB


class _Within:
    """A path within the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path
    shared: bool = True  # whether all machines of the run see this folder; true for a run on one machine
    rank: int = 0  # of this process; ranks above 0 have their own log

    metrics = _Within("metrics.jsonl")  # one JSON object per logging step or evaluation
    config = _Within("config.resolved.yaml")  # with the origin of each value
    plan = _Within("plan.json")  # that the run was started with
    next_plan = _Within(".plan.json")  # for the ranks; until they train, plan.json is of the earlier run
    scaling = _Within("scaling.json")  # the plan for other numbers of processes
    probe = _Within("probe.json")  # what `make probe` found
    data = _Within("data.json")  # statistics of the data that the run was started with
    environment = _Within("environment.json")  # the machine and the versions that it was started with
    base = _Within("base.json")  # what a base model in a folder is known by
    summary = _Within("summary.json")  # status and results
    report = _Within("report.html")
    harness = _Within("eval-lm.json")  # what `make eval-lm` found
    checkpoints = _Within("checkpoints")  # folder of `checkpoint-<step>` folders
    adapter = _Within("adapter")  # LoRA weights of the finished run
    model = _Within("model")  # full weights of the finished run
    merged = _Within("merged")  # where `make merge` writes the merged model, unless it is told otherwise
    trackers = _Within("trackers.json")  # the ids of the run at W&B, MLflow and trackio
    tensorboard = _Within("tensorboard")  # event files

    def evaluation(self, split: str) -> Path:
        """What `make eval` found on a split."""
        return self.path / f"eval.{split}.json"

    @property
    def log(self) -> Path:
        """What libraries printed; ranks above 0 have their own file."""
        return self.path / (f"log.rank{self.rank}.txt" if self.rank else "log.txt")

    @property
    def typed(self) -> str:
        """What RUN is set to for this run: its name, or its folder if that is elsewhere."""
        if self.path.parent == Path(RUNS):
            return self.path.name
        return str(self.path) if len(self.path.parts) > 1 else f"./{self.path}"

    def resume_command(self, processes: int = 1) -> str:
        """What continues from the latest checkpoint, with the settings that the run has."""
        several = {"NGPU": processes} if processes > 1 else {}
        return make("resume", RUN=shlex.quote(self.typed), **several)

    def write_json(self, path: Path, value: object) -> None:
        """Writes `path` atomically."""
        with storing(path, "Free space, or set output.dir=<folder>"):
            write_atomic(path, redact(json.dumps(value, indent=2, default=str)) + "\n")


def open_run(output_dir: str, name: str, rank: int = 0) -> RunDir:
    """Creates `<output_dir>/<name>` if it does not exist; StorageError if it cannot be written."""
    run = RunDir(Path(output_dir) / name, rank=rank)
    with storing(run.path, "Set output.dir=<folder>"):
        run.path.mkdir(parents=True, exist_ok=True)
        probe = run.path / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # on a shared disk, another machine may have a process with this id
    return run


def continued_run(run: Path, resume: str) -> Path | None:
    """The run directory that `train.resume` may go on with; None if the run starts from scratch."""
    if resume == "never":
        return None
    return run if resume == "auto" else Path(resume).absolute().parent.parent


@contextlib.contextmanager
def hold_run(run: RunDir, node: int = 0) -> Iterator[None]:
    """Locks the run directory for this process; the kernel releases the lock when the process dies.

    Each machine, told by its rank `node`, has its own lock, since they may share the directory. Raises
    RunInUseError if another process holds it.
    """
    with (run.path / (f".lock.node{node}" if node else ".lock")).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise RunInUseError(
                f"{run.path} is in use by {holder}. Wait for it, or give this run another name: "
                + var(RUN="<name>")
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def held_since(run: RunDir) -> float | None:
    """When another process of this machine locked the run, in seconds since 1970; None if none has it.

    Nothing is locked to find out: a run that begins at that moment would take this process for another run.
    """
    lock = run.path / ".lock"
    try:
        word, pid, _, host = read_whole(lock, KIB).decode(errors="replace").split()
        if (word, host) != ("process", os.uname().nodename) or int(pid) == os.getpid():
            return None
        since, process = lock.stat().st_mtime, psutil.Process(int(pid))
        try:
            holds = str(lock.resolve()) in (file.path for file in process.open_files())
        except psutil.AccessDenied:  # of another user; a later process with its number began after the lock
            holds = process.create_time() <= since
    except (OSError, ValueError, psutil.Error):
        return None
    return since if holds else None


def set_aside_earlier_run(run: RunDir) -> Path | None:
    """Moves the results of an earlier run of the same name to `<name>.<its start>`; None without results.

    Files that this process and its launcher have open stay: the lock, launcher files, and the logs, whose
    content is copied.
    """
    logs = list(run.path.glob("log*.txt"))
    stay = {*logs, *run.path.glob("launcher*.log"), run.path / "ranks"}
    earlier = [path for path in run.path.iterdir() if path not in stay and not path.name.startswith(".")]
    if not (run.summary.exists() or run.metrics.exists() or any(run.checkpoints.glob("*"))):
        return None
    started = str(read_json(run.environment).get("started"))  # as the list of runs says
    if not re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", started):  # of a version that did not write it: the end
        latest = max(path.stat().st_mtime for path in earlier)
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(latest))
    name, count = f"{run.path.name}.{re.sub('[-:]', '', started).replace(' ', '-')}", 1
    target = run.path.with_name(name)
    while target.exists():
        count += 1
        target = run.path.with_name(f"{name}-{count}")
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    for log in logs:  # open for appending, here and in other ranks
        shutil.copy2(log, target / log.name)
        os.truncate(log, 0)
    return target


def append_metrics(run: RunDir, record: dict[str, Any]) -> None:
    """Adds one line to metrics.jsonl; keys are `group/name_unit`."""
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without a truncated last line; none if it is missing or no such file.

    If a step was repeated after a resume, its later record counts.
    """
    try:
        text = read_whole(run.metrics, LONGEST_METRICS).decode(errors="replace")
    except OSError:
        return []
    records: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line, parse_int=_whole_number)
            if isinstance(record, dict):
                records[(record.get("step", number), "eval/loss" in record)] = record
    return list(records.values())


def _whole_number(text: str) -> int | float:
    """A whole number of a JSON file; one that no float can hold becomes infinite, as 1e999 does."""
    return int(text) if len(text) < 300 else float(text)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the run; {} if it is missing, damaged or a link."""
    try:
        tree = json.loads(read_whole(path, LONGEST_JSON).decode(), parse_int=_whole_number)
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def update_summary(run: RunDir, **values: object) -> dict[str, Any]:
    """Merges `values` into summary.json and returns all of it."""
    summary = {**read_json(run.summary), **values}
    run.write_json(run.summary, summary)
    return summary

"""The run directory, the numbers written into it, and the console that a person reads.

    runs/<name>/  config.resolved.yaml  plan.json  metrics.jsonl  summary.json  log.txt
                  checkpoints/  adapter/ (or model/)  tensorboard/

Libraries print a great deal. During a command their output goes to log.txt, at the level of file descriptors so that C++
code is caught too, and only what `console()` prints reaches the person.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from sft_play.errors import RunInUseError, StorageError

_console: Console | None = None
_quiet = False  # whether a `quiet_libraries` block is running


def console() -> Console:
    """The person's console. On ranks above 0 it prints nothing; with --json it writes to stderr."""
    global _console
    if _console is None:
        _console = Console(highlight=False, soft_wrap=False)
    return _console


def set_console(value: Console | None) -> None:
    """Replaces the console (None: back to standard output)."""
    global _console
    _console = value


def is_main_rank() -> bool:
    """Whether this process is the one that writes and prints (the launcher's RANK, 0 without one)."""
    return os.environ.get("RANK", "0") == "0"


def keeps_files(run: "RunDir") -> bool:
    """Whether this process is the one that keeps the run directory: the main rank, and without a shared one the first here."""
    return is_main_rank() or (not run.shared and os.environ.get("LOCAL_RANK") == "0")


def cache_dir() -> Path:
    """Where tokenised data, built-in models and learned corrections are kept: SFT_PLAY_CACHE, else `.cache/sft-play` here."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path(".cache") / "sft-play").absolute()


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path
    shared: bool = True
    """Whether all machines of the run see this folder; a run on one machine does."""

    @property
    def metrics(self) -> Path:
        """One JSON object a logging step."""
        return self.path / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        """The plan that the run was started with."""
        return self.path / "plan.json"

    @property
    def next_plan(self) -> Path:
        """The plan on its way to the ranks: until they train, plan.json is the earlier run's."""
        return self.path / ".plan.json"

    @property
    def probe(self) -> Path:
        """What `make probe` found."""
        return self.path / "probe.json"

    @property
    def config(self) -> Path:
        """The config as resolved, with origins."""
        return self.path / "config.resolved.yaml"

    @property
    def summary(self) -> Path:
        """Status and results."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """What libraries printed; ranks above 0 have a file of their own."""
        rank = os.environ.get("RANK", "0")
        return self.path / ("log.txt" if rank == "0" else f"log.rank{rank}.txt")

    @property
    def checkpoints(self) -> Path:
        """Folder of `checkpoint-<step>` folders."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """LoRA weights of the finished run."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """Full weights of the finished run, or the merged model."""
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    def write_json(self, path: Path, value: Any) -> None:
        """Replaces `path` whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}. Free space or choose output.dir") from error


def open_run(output_dir: str, name: str) -> RunDir:
    """Creates `<output_dir>/<name>` if it is not there.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    run = RunDir(Path(output_dir) / name)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        probe = run.path / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # on a shared disk another machine may have a process of this number
    except OSError as error:
        raise StorageError(f"run directory {run.path} cannot be written: {error.strerror}. Set output.dir=<folder>") from error
    return run


@contextlib.contextmanager
def hold_run(run: RunDir, node: int = 0) -> Iterator[None]:
    """Holds the run directory for this process; the lock is the kernel's, so a dead process leaves none behind.

    Args:
        run: the run.
        node: number of this machine among several; each holds a lock of its own, as they may share the directory.

    Raises:
        RunInUseError: another process holds it.
    """
    with (run.path / (f".lock.node{node}" if node else ".lock")).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise RunInUseError(
                f'{run.path} is in use by {holder}. Wait for it, or give this run a name of its own: ARGS="output.name=<name>"'
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def set_aside_earlier_run(run: RunDir) -> Path | None:
    """Moves the results of an earlier run of the same name to `<name>.<time it ended>`; returns where, None if there were none.

    What this process and its launcher have open stays: lock, launcher files, and the logs, whose lines go along.
    """
    logs = list(run.path.glob("log*.txt"))
    stay = {*logs, *run.path.glob("launcher*.log"), run.path / "ranks"}
    earlier = [path for path in run.path.iterdir() if path not in stay and not path.name.startswith(".")]
    if not (run.summary.exists() or run.metrics.exists() or any(run.checkpoints.glob("*"))):
        return None
    ended = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(path.stat().st_mtime for path in earlier)))
    target = run.path.with_name(f"{run.path.name}.{ended}")
    count = 1
    while target.exists():
        count += 1
        target = run.path.with_name(f"{run.path.name}.{ended}-{count}")
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
    """The records of metrics.jsonl; after a resume the later record of a step counts, a cut last line is left out."""
    if not run.metrics.exists():
        return []
    records: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(run.metrics.read_text(encoding="utf-8").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            records[(record.get("step", number), "eval/loss" in record)] = record
    return list(records.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the run; {} where it is missing or cut."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def update_summary(run: RunDir, **values: Any) -> dict[str, Any]:
    """Merges `values` into summary.json and returns it whole."""
    summary = {**read_json(run.summary), **values}
    run.write_json(run.summary, summary)
    return summary


@contextlib.contextmanager
def quiet_libraries(log: Path) -> Iterator[None]:
    """Sends everything that is not `console()` to `log` while the block runs; SFT_PLAY_VERBOSE=1 leaves it on the console.

    Ranks above 0 get a console that prints nothing. A console that was set before (for --json) keeps its place. A block
    within another one changes nothing: the outer one's log takes it all.
    """
    global _quiet
    if os.environ.get("SFT_PLAY_VERBOSE") == "1" or _quiet:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    before = _console
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    target = 2 if before is not None and before.file is sys.stderr else 1
    person: TextIO = os.fdopen(os.dup(target), "w", buffering=1) if is_main_rank() else Path(os.devnull).open("w")
    set_console(Console(file=person, highlight=False, force_terminal=os.isatty(saved[target]) or None))
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in saved:
        os.dup2(sink, fd)
    os.close(sink)
    logging.captureWarnings(True)
    _quiet = True
    try:
        yield
    finally:
        _quiet = False
        logging.captureWarnings(False)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, original in saved.items():
            os.dup2(original, fd)
            os.close(original)
        set_console(before)
        person.close()

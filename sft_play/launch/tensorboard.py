"""Runs TensorBoard on 127.0.0.1 and a free port; a pid file names the process, so that only it is stopped."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sft_play.errors import StorageError
from sft_play.files import write_atomic
from sft_play.launch.nodes import LOOPBACK, free_port, from_elsewhere
from sft_play.spelling import make
from sft_play.ui.console import console

PORT = 6006
LOG = ".tensorboard.log"  # in the folder of runs
DEFAULT_RUNS = Path("runs")
STOP_TIMEOUT_S = 5.0
CLOCK_SLACK_S = 2.0  # start times are relative to boot time, which moves when the clock is set


@dataclass(frozen=True)
class Server:
    """A TensorBoard that we started; the start time distinguishes it from a later process with its pid."""

    pid: int
    started: float
    port: int

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""
        return f"http://{LOOPBACK}:{self.port}"


def pid_file(runs: Path) -> Path:
    """The pid file of the server for a folder of runs."""
    return runs / ".tensorboard.pid"


def running(runs: Path) -> Server | None:
    """The server that was started for `runs`, if that same process is still running."""
    try:
        server = Server(**json.loads(pid_file(runs).read_text(encoding="utf-8")))
        process = psutil.Process(server.pid)
        argv = process.cmdline()  # empty for a moment after the start
        same_start = abs(process.create_time() - server.started) < CLOCK_SLACK_S
        same = same_start and (not argv or "tensorboard.main" in argv)
        return server if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, TypeError, psutil.Error):
        return None


def start(runs: Path, port: int = PORT) -> Server:
    """Starts TensorBoard for a folder of runs, unless it is running already; prints how to reach it.

    It answers after a few seconds. StorageError if the folder cannot be written.
    """
    server = running(runs) or _start(runs, free_port(port))
    other = {} if runs == DEFAULT_RUNS else {"RUNS": shlex.quote(str(runs))}
    console().print(f"TensorBoard: {server.url}")
    console().print(f"  stop it: {make('tb-stop', **other)}", highlight=False)
    console().print(from_elsewhere(server.port), highlight=False)
    return server


def _start(runs: Path, port: int) -> Server:
    where = [f"--logdir={runs}", f"--host={LOOPBACK}", f"--port={port}", "--reload_interval=15"]
    argv = [sys.executable, "-m", "tensorboard.main", *where]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with (runs / LOG).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C during training does not stop it
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        server = Server(process.pid, psutil.Process(process.pid).create_time(), port)
        write_atomic(pid_file(runs), json.dumps(asdict(server)))
    except OSError as error:
        raise StorageError(f"{runs} cannot be written: {error.strerror}") from None
    return server


def stop(runs: Path) -> bool:
    """Stops the server of a folder, and no other; returns whether there was one."""
    server = running(runs)
    pid_file(runs).unlink(missing_ok=True)
    if server is None:
        return False
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]  # its data server is a child
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.terminate()
    for member in psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)[1]:
        with contextlib.suppress(psutil.Error):
            member.kill()
    return True


@contextlib.contextmanager
def while_training(runs: Path) -> Iterator[None]:
    """Runs TensorBoard within this context; one that was running before keeps running afterwards."""
    before = running(runs)
    start(runs)
    try:
        yield
    finally:
        if before is None:
            stop(runs)

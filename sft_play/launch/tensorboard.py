"""TensorBoard beside the runs: on 127.0.0.1 and a free port, remembered in a pid file, stopped by that file alone."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sft_play.errors import LaunchError, StorageError
from sft_play.launch.ports import LOOPBACK, free_port
from sft_play.runlog import console

PORT = 6006
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
CLOCK_SLACK_S = 2.0  # start times are counted from the boot, whose time moves when the clock is set


@dataclass(frozen=True)
class Server:
    """A TensorBoard that we started; the start time tells it from a later process with the same id."""

    pid: int
    started: float
    port: int

    @property
    def url(self) -> str:
        """Where to point a browser on this machine."""
        return f"http://{LOOPBACK}:{self.port}"


def pid_file(runs: Path) -> Path:
    """Remembers the server of a folder of runs."""
    return runs / ".tensorboard.pid"


def running(runs: Path) -> Server | None:
    """The server that was started for `runs` and still runs, checked to be that very process."""
    try:
        server = Server(**json.loads(pid_file(runs).read_text(encoding="utf-8")))
        process = psutil.Process(server.pid)
        words = process.cmdline()  # empty for a moment after the start
        same = abs(process.create_time() - server.started) < CLOCK_SLACK_S and (not words or "tensorboard.main" in words)
        return server if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, TypeError, psutil.Error):
        return None


def start(runs: Path, port: int = PORT) -> Server:
    """Starts TensorBoard on the runs of a folder, or finds the one that runs there; says how to reach it.

    Raises:
        LaunchError: it did not come up.
        StorageError: the folder cannot be written.
    """
    server = running(runs)
    if server is None:
        server = _start(runs, free_port(port))
        _wait_until_it_answers(server, runs)
    host = socket.gethostname()
    console().print(f"TensorBoard: {server.url}   stop it with: make tb-stop")
    console().print(f"  from another machine: ssh -L {server.port}:{LOOPBACK}:{server.port} {host}", highlight=False)
    return server


def _log(runs: Path) -> Path:
    return runs / ".tensorboard.log"


def _start(runs: Path, port: int) -> Server:
    command = ["tensorboard.main", "--logdir", str(runs), "--host", LOOPBACK, "--port", str(port), "--reload_interval", "15"]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with _log(runs).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C of a training run is not for it
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        server = Server(process.pid, psutil.Process(process.pid).create_time(), port)
        pid_file(runs).write_text(json.dumps(asdict(server)), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{runs} cannot be written: {error.strerror}") from None
    return server


def _wait_until_it_answers(server: Server, runs: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if running(runs) is None:
            break
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, server.port), timeout=1):
            return
        time.sleep(0.2)
    stop(runs)
    raise LaunchError(f"TensorBoard did not start; the reason is at the end of {_log(runs)}")


def stop(runs: Path) -> bool:
    """Ends the server of a folder, and no other; whether there was one."""
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
    """TensorBoard for as long as the block runs, also if it fails; one that ran before goes on afterwards."""
    before = running(runs)
    start(runs)
    try:
        yield
    finally:
        if before is None:
            stop(runs)

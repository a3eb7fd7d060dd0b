"""Commands of SFT-Play in forked processes, watched from within, and killed at any operation on files.

The parent has imported everything and has started no thread, so that a child begins at once.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# before anything reads them: a library with several threads could not be forked
os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

CHANGING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # audit events of Python


@dataclass(frozen=True)
class Operation:
    """One that changes files."""

    seconds: float
    event: str
    path: str


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
    """Runs a command of the CLI in this process, with the cache in the folder; its output goes to a file."""
    from sft_play.cli import main

    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["SFT_PLAY_CACHE"] = str(folder / "cache")
    return main(argv)


def watch_operations(act: Callable[[str, str], None]) -> None:
    """Calls `act` with event and path before each operation of this process that changes files."""

    def look(event: str, details: tuple) -> None:
        writes = event != "open" or (len(details) > 2 and details[2] & (os.O_WRONLY | os.O_RDWR))
        if event in CHANGING and writes:
            act(event, os.fsdecode(details[0]) if isinstance(details[0], bytes) else str(details[0]))

    sys.addaudithook(look)


def within(folder: Path, places: tuple[str, ...]) -> tuple[str, ...]:
    """The places in this folder, as beginnings of paths."""
    return tuple(str(folder / place) for place in places)


def recorded(argv: list[str], folder: Path) -> list[Operation]:
    """Runs a command undisturbed and returns its operations.

    This process then imports what that one has imported, which saves each further child the time.

    Raises:
        RuntimeError: the command fails.
    """
    notes = folder / "operations"

    def run() -> int:
        file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        watch_operations(
            lambda *what: os.write(file, f"{json.dumps([time.monotonic(), *what])}\n".encode()) and None
        )
        code = run_command(argv, folder)
        (folder / "modules").write_text(json.dumps(sorted(sys.modules)))
        return code

    if exit_code_of(in_child(run)) != 0:
        raise RuntimeError(f"the run that is not killed fails: {(folder / 'output.txt').read_text()}")
    for name in json.loads((folder / "modules").read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # children need not look through what the parent has
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        raise RuntimeError(f"an import has started a thread, so children cannot be forked: {threads}")
    return [Operation(*json.loads(line)) for line in notes.read_text().splitlines()]


def killed(
    argv: list[str], folder: Path, begins: tuple[str, ...], *, at: int = 0, after_s: float = 0
) -> bool:
    """Kills a command before an operation of a phase, or some time after the first; whether it came to that.

    Args:
        argv: the command.
        folder: of the trial.
        begins: of the phase.
        at: number of the operation, from 1; 0: use the time.
        after_s: after the first operation.
    """
    reading, writing = os.pipe()

    def run() -> int:
        count = 0

        def act(event: str, path: str) -> None:
            nonlocal count
            if not count and not path.startswith(begins):
                return
            count += 1
            if count == 1:
                os.write(writing, b"begun")
            if count == at:
                ctypes.CDLL(None).kill(os.getpid(), signal.SIGKILL)

        os.close(reading)
        watch_operations(act)
        return run_command(argv, folder)

    pid = in_child(run)
    os.close(writing)
    if os.read(reading, 5) and not at:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)  # not waited for yet, so the id is still that of the child
    os.close(reading)
    return exit_code_of(pid) == -signal.SIGKILL

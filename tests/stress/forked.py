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
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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

    _set_apart(folder, "output.txt")
    return main(argv)


def ranks_of(argv: list[str], folder: Path, count: int) -> list[Callable[[], int]]:
    """What each process of a run on several is to call, as `run_command`; for one start of them together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def run(rank: int) -> int:
        from sft_play.cli import run_rank

        _set_apart(folder, f"output.{rank}.txt")
        os.environ |= {
            name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()
        }
        return run_rank(argv)

    return [partial(run, rank) for rank in range(count)]


def _set_apart(folder: Path, output: str) -> None:
    file = os.open(folder / output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["SFT_PLAY_CACHE"] = str(folder / "cache")


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


def exit_codes(runs: Sequence[Callable[[], int]]) -> list[int]:
    """Calls the functions in forked processes at the same time; the exit codes."""
    return [exit_code_of(pid) for pid in [in_child(run) for run in runs]]


def recorded(runs: Sequence[Callable[[], int]], folder: Path) -> list[Operation]:
    """Runs a command undisturbed, in one process or several, and returns the operations of the first.

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
        code = runs[0]()
        (folder / "modules").write_text(json.dumps(sorted(sys.modules)))
        return code

    if any(exit_codes([run, *runs[1:]])):
        said = [path.read_text() for path in sorted(folder.glob("output*.txt"))]
        raise RuntimeError("\n".join(["the run that is not killed fails:", *said]))
    for name in json.loads((folder / "modules").read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # children need not look through what the parent has
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        raise RuntimeError(f"an import has started a thread, so children cannot be forked: {threads}")
    return [Operation(*json.loads(line)) for line in notes.read_text().splitlines()]


def killed(
    runs: Sequence[Callable[[], int]],
    begins: tuple[str, ...],
    *,
    at: int = 0,
    after_s: float = 0,
    victims: Sequence[int] = (0,),
) -> bool:
    """Kills processes of a command before an operation of a phase, or some time after the first.

    Those that are not killed are waited for.

    Args:
        runs: what its processes call; the operations are those of the first.
        begins: of the phase.
        at: number of the operation, from 1; 0: use the time. Only the first process is killed.
        after_s: after the first operation.
        victims: the processes that are killed after that time.

    Returns:
        Whether it came to that.
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
        return runs[0]()

    pids = [in_child(each) for each in [run, *runs[1:]]]
    os.close(writing)
    if os.read(reading, 5) and not at:
        time.sleep(after_s)
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)  # not waited for yet, so the id is still that of the child
    os.close(reading)
    codes = [exit_code_of(pid) for pid in pids]
    return all(codes[victim] == -signal.SIGKILL for victim in victims)

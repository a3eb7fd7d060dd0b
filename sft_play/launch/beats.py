"""Signs of life. Each rank of a run keeps one line up to date that says where it is, and can be asked for its stacks.

ranks/<rank>.beat    process id, limit in seconds, where it is; the file's time is that of the sign
ranks/<rank>.stack   stacks of all its threads, written on SIGUSR2, or by the rank itself shortly after the limit

Both work while the main thread is stuck in C code or holds the interpreter: the stacks are written by faulthandler.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sft_play.launch.ranks import reports_folder
from sft_play.runlog import RunDir

STACKS_SIGNAL = signal.SIGUSR2
OWN_MARGIN_S = 5  # after the limit the process group speaks first, in the ranks that wait; then the one that hangs ends itself
LINE = 160
STACK_LINES = 12
# Frames of a rank that waits for others; one that hangs by itself shows none of them.
WAITING = ("torch/distributed/", "run_backward", "deepspeed/comm/")


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank."""

    rank: int
    pid: int
    limit_s: float
    where: str
    age_s: float


class Pulse:
    """The signs of life of this process."""

    def __init__(self, run: RunDir, rank: int, limit_s: float) -> None:
        folder = reports_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._limit_s, self._armed_at = limit_s, 0.0
        self._beat = os.open(folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT)
        self._stack = (folder / f"{rank}.stack").open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stack, all_threads=True)

    def beat(self, where: str) -> None:
        """Says where this rank is; a microsecond."""
        with contextlib.suppress(OSError):  # a full disk is for those to report who need it
            os.pwrite(self._beat, f"{os.getpid()} {self._limit_s} {where}"[:LINE].ljust(LINE).encode(), 0)

    def end_unless_it_goes_on(self) -> None:
        """From here on this process writes its stacks and ends if it is not called again within the limit and a margin."""
        now = time.monotonic()
        if now - self._armed_at > min(1.0, self._limit_s / 10):  # starting anew takes a tenth of a millisecond
            self._armed_at = now
            faulthandler.dump_traceback_later(self._limit_s + OWN_MARGIN_S, file=self._stack, exit=True)

    def stop(self) -> None:
        """No more signs are to be expected."""
        faulthandler.cancel_dump_traceback_later()
        self.beat("done")


def read_beats(run: RunDir, ranks: Iterable[int]) -> list[Beat]:
    """The last signs of these ranks, as far as they gave one."""
    beats = []
    for rank in ranks:
        path = reports_folder(run) / f"{rank}.beat"
        with contextlib.suppress(OSError, ValueError):
            pid, limit, where = path.read_text(encoding="utf-8").strip().split(" ", 2)
            beats.append(Beat(rank, int(pid), float(limit), where, time.time() - path.stat().st_mtime))
    return beats


def stands_still(beats: Iterable[Beat]) -> bool:
    """Whether no rank has moved for about the limit: then a wait has ended, not a crash been noticed."""
    return min((beat.age_s / beat.limit_s for beat in beats), default=0.0) > 0.9


def read_stack(run: RunDir, rank: int) -> str:
    """The main thread's stack as the rank last wrote it, the innermost call first; "" if it did not."""
    try:
        text = (reports_folder(run) / f"{rank}.stack").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    return next((thread for thread in threads if thread.startswith("Current")), threads[-1]).strip()


def hanging(run: RunDir, beats: Iterable[Beat]) -> dict[int, str]:
    """Of ranks that did not end: those that hang, and not only wait for others; rank -> what to tell about it."""
    stacks = {beat: read_stack(run, beat.rank) for beat in beats}
    by_themselves = {beat: stack for beat, stack in stacks.items() if not any(word in stack for word in WAITING)}
    return {beat.rank: _describe(run, beat, stack) for beat, stack in (by_themselves or stacks).items()}


def _describe(run: RunDir, beat: Beat, stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")][:STACK_LINES]
    return "\n".join(
        [
            f"rank {beat.rank} hangs: nothing from it for {beat.age_s:.0f} s (parallel.timeout_s is {beat.limit_s:.0f}), "
            f"last seen in {beat.where}",
            *(f"  {line}" for line in lines or ["it gave no stack: the process is stopped, or waits for the disk or a driver"]),
            f"Stacks of all ranks: {reports_folder(run)}{os.sep}*.stack",
        ]
    )


def forget(run: RunDir, ranks: Iterable[int]) -> None:
    """Removes the signs of an earlier run."""
    for rank in ranks:
        for suffix in ("beat", "stack"):
            Path(reports_folder(run) / f"{rank}.{suffix}").unlink(missing_ok=True)

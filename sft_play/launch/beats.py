"""Heartbeats: each rank keeps one line up to date that says where it is, and dumps its stacks on a signal.

ranks/<rank>.beat    process id, time limit, current position; the file's mtime is the time of the heartbeat
ranks/<rank>.stack   stacks of all threads, on SIGUSR2 or, shortly after the limit, by the rank itself

Stacks are dumped by faulthandler, which works even if the main thread is stuck in C code or holds the GIL.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sft_play.launch.ranks import reports_folder
from sft_play.runlog import RunDir

STACKS_SIGNAL = signal.SIGUSR2
# When the limit is reached, the process group raises first, in the ranks that wait; then the hung one exits.
EXIT_MARGIN_S = 5
LINE = 160
STACK_LINES = 12
NOTICED_S = 1.0  # a wait that ends later than this was a pause
LOADING, SETUP, DONE = "loading", "model setup", "done"  # positions in which no limit counts
# Frames of a rank that waits for others in a collective; a rank that hangs by itself has none of them. With a
# GPU, it waits where a step first asks for a number: the gradients' norm, or whether a signal has come.
WAITING = re.compile("torch/distributed/|run_backward|deepspeed/comm/|torch/cuda/|_grad_norm|any_rank")


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    rank: int
    pid: int
    limit_s: float
    where: str
    age_s: float


class OwnTime:
    """Time without the pauses in which this process did not run: it was stopped, or its machine slept.

    Processes beside it paused as well, so that nobody hangs who was silent only then. The wall clock is used,
    since others stand still while a machine sleeps.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._last = clock, clock()
        self._pauses: list[tuple[float, float]] = []  # when each ended, and its seconds

    def waited(self, seconds: float) -> None:
        """Notes a pause if a wait of so many seconds, begun at the last call, took longer; call it often."""
        now = self._clock()
        late = now - self._last - seconds
        if late > NOTICED_S:
            self._pauses.append((now, late))
        self._last = now

    def paused(self, since: float) -> float:
        """Seconds of the pauses that ended after a moment of the wall clock."""
        return sum(seconds for ended, seconds in self._pauses if ended > since)

    def since(self, moment: float) -> float:
        """Seconds since a moment of the wall clock, without pauses."""
        return self._clock() - moment - self.paused(moment)


class Pulse:
    """The heartbeats of this process.

    `exits`: whether it ends itself if the limit passes; under our launcher, that is up to its `Watch`, which
    knows of pauses.
    """

    def __init__(self, run: RunDir, rank: int, limit_s: float, *, exits: bool = True) -> None:
        folder = reports_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._limit_s, self._armed_at, self._exits = limit_s, 0.0, exits
        self._beat = os.open(folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT)
        self._stack = (folder / f"{rank}.stack").open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stack, all_threads=True)
        faulthandler.cancel_dump_traceback_later()  # of an earlier one, that was loading

    def load(self) -> None:
        """Says that this rank is loading, and dumps its stacks once others may have waited in vain for it."""
        self.beat(LOADING)
        faulthandler.dump_traceback_later(self._limit_s, file=self._stack)

    def beat(self, where: str) -> None:
        """Writes where this rank is; takes a microsecond."""
        with contextlib.suppress(OSError):  # a full disk is reported when something important is written
            os.pwrite(self._beat, f"{os.getpid()} {self._limit_s} {where}"[:LINE].ljust(LINE).encode(), 0)

    @property
    def limit_s(self) -> float:
        """Seconds without a heartbeat that are too many; another one counts from the next beat on."""
        return self._limit_s

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._limit_s, self._armed_at = seconds, 0.0

    def restart_watchdog(self) -> None:
        """Restarts the watchdog: this process dumps its stacks if the limit and a margin pass."""
        now = time.monotonic()
        # Restarting takes a tenth of a millisecond, so it is done only once in a while.
        if now - self._armed_at > min(1.0, self._limit_s / 10):
            self._armed_at = now
            limit_s = self._limit_s + EXIT_MARGIN_S
            faulthandler.dump_traceback_later(limit_s, file=self._stack, exit=self._exits)

    def stop(self) -> None:
        """Stops the watchdog."""
        faulthandler.cancel_dump_traceback_later()
        self.beat(DONE)


def read_beats(run: RunDir, ranks: Iterable[int], own_time: OwnTime | None = None) -> list[Beat]:
    """The last heartbeats of those `ranks` that have one; pauses in `own_time`, the reader's, age none."""
    beats, own_time = [], own_time or OwnTime()
    for rank in ranks:
        path = reports_folder(run) / f"{rank}.beat"
        with contextlib.suppress(OSError, ValueError):
            pid, limit, where = path.read_text(encoding="utf-8").strip().split(" ", 2)
            beats.append(Beat(rank, int(pid), float(limit), where, own_time.since(path.stat().st_mtime)))
    return beats


def is_stalled(beats: Iterable[Beat], *, timed_out: bool = False) -> bool:
    """Whether no rank made progress for about the limit, so that a failure is a timeout and not a crash.

    To load may take longer, so that ranks that do count only if one that waited for them has `timed_out`.
    """
    counted = (beat for beat in beats if timed_out or beat.where != LOADING)
    return min((beat.age_s / beat.limit_s for beat in counted), default=0.0) > 0.9


def is_overdue(beats: Iterable[Beat]) -> bool:
    """Whether a rank made no progress for the limit and the margin in which it should have failed itself."""
    return any(
        beat.age_s > beat.limit_s + 2 * EXIT_MARGIN_S
        for beat in beats
        if beat.where not in (LOADING, SETUP, DONE)
    )


def read_stack(run: RunDir, rank: int) -> str:
    """The main thread's stack as last dumped by the rank, innermost call first; "" if it did not dump one."""
    try:
        text = (reports_folder(run) / f"{rank}.stack").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    return next((thread for thread in threads if thread.startswith("Current")), threads[-1]).strip()


def hanging(run: RunDir, beats: Iterable[Beat]) -> dict[int, str]:
    """The ranks that hang, rather than wait for others, among those still running: rank -> message."""
    stacks = {beat: read_stack(run, beat.rank) for beat in beats}
    not_waiting = {beat: stack for beat, stack in stacks.items() if not WAITING.search(stack)}
    return {beat.rank: _describe(run, beat, stack) for beat, stack in (not_waiting or stacks).items()}


def _describe(run: RunDir, beat: Beat, stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines()]
    frames = [f"  {line}" for line in lines if line.startswith("File")][:STACK_LINES]
    no_stack = ["  no stack: the process is stopped (SIGSTOP), or blocked on the disk or a driver"]
    headline = (
        f"rank {beat.rank} hangs: no progress for {beat.age_s:.0f} s "
        f"(parallel.timeout_s is {beat.limit_s:.0f}), last seen in {beat.where}"
    )
    footer = f"Stacks of all ranks: {reports_folder(run)}{os.sep}*.stack"
    return "\n".join([headline, *(frames or no_stack), footer])

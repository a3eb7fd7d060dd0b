"""Supervises a running launcher: forwards signals to its ranks, and ends the others when a rank fails."""

import contextlib
import os
import signal
import subprocess
import time

import psutil

from sft_play.launch.beats import (
    STACKS_SIGNAL,
    OwnTime,
    hanging,
    is_overdue,
    is_stalled,
    read_beats,
    read_stack,
)
from sft_play.launch.link import Link
from sft_play.launch.ranks import SAVED, cause_here, read_rank_exits, says_timeout
from sft_play.machine.process import handling
from sft_play.runlog import RunDir

POLL_S = 0.25
LAUNCHER_MODULE = "accelerate.commands.launch"
FAILURE_GRACE_S = 3.0  # how long the other ranks have to notice and report after one has failed
STACKS_WITHIN_S = 1.0
KILL_TIMEOUT_S = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Watch:
    """The processes of one launched run on this machine.

    Signals are sent to the ranks directly: torchrun kills its ranks after a deadline of its own, and SIGUSR1
    kills torchrun.
    """

    def __init__(
        self, process: subprocess.Popen, script: str, ranks: range, run: RunDir, link: Link | None = None
    ) -> None:
        self.stopped_by: str | None = None
        self.hung: dict[int, str] = {}  # rank -> message about it
        self.paused_s = 0.0  # in which nothing ran, if that is why the ranks made no progress
        self.cause_reported = False  # whether the other machines know that the root cause is on this one
        self._link = link
        self._process, self._script, self._numbers, self._run = process, script, ranks, run
        self._ranks: dict[int, psutil.Process] = {}
        self._killed = False  # whether we killed the launcher
        self._own_time = OwnTime()

    @property
    def started(self) -> bool:
        """Whether a rank was ever seen."""
        return bool(self._ranks)

    def until_end(self, timeout_s: float | None = None) -> int:
        """Waits for the launcher, kills processes that are left over, and returns its exit status."""
        began = time.time()
        failed_at: float | None = None
        stalled = False  # whether no rank made progress when the first one failed, so that it timed out
        while self._process.poll() is None:
            if failed_at is None and self._has_failed():
                failed_at, stalled = time.time(), self._is_stalled()
            late = failed_at is not None and self._own_time.since(failed_at) > FAILURE_GRACE_S
            if late or (timeout_s is not None and self._own_time.since(began) > timeout_s):
                self._end(stalled)
            time.sleep(POLL_S)
            self._own_time.waited(POLL_S)
        self._end(stalled if failed_at is not None else self._is_stalled())
        psutil.wait_procs([rank for rank in self._ranks.values() if _alive(rank)], timeout=KILL_TIMEOUT_S)
        return 1 if self._killed else self._process.returncode

    def forwarded_signals(self) -> contextlib.AbstractContextManager[None]:
        """Forwards signals to the ranks within this context; a second Ctrl-C ends everything at once."""
        return handling(SIGNALS, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.stopped_by == "SIGINT":
            self._kill_all()
            return
        self.stopped_by = signal.Signals(number).name
        self._look_for_ranks()
        alive = [rank for rank in self._ranks.values() if _alive(rank)]
        for rank in alive:
            # A closed terminal (SIGHUP) is a request to stop.
            _send(rank.pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if not alive:
            _send(self._process.pid, signal.SIGTERM)  # still starting, so there is nothing to save

    def _look_for_ranks(self) -> None:
        if len(self._ranks) >= len(self._numbers):
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error):
                    argv = child.cmdline()
                    # Between fork and exec, any helper of the launcher has the launcher's own argv, which
                    # contains the script too.
                    if self._script in argv and LAUNCHER_MODULE not in argv:
                        self._ranks[child.pid] = child

    def _has_failed(self) -> bool:
        """Whether the run has: here, on another machine, or because a rank makes no progress."""
        if self._a_rank_failed() or (self._link and self._link.failure()):
            return True
        return is_overdue(read_beats(self._run, self._numbers, self._own_time))

    def _is_stalled(self) -> bool:
        """Whether the ranks made no progress though they ran; notes how long they did not, if that is why."""
        self._own_time.waited(POLL_S)
        late = any(says_timeout(report.message) for report in read_rank_exits(self._run, self._numbers))
        stalled = is_stalled(read_beats(self._run, self._numbers, self._own_time), timed_out=late)
        silent = read_beats(self._run, self._numbers)
        if is_stalled(silent, timed_out=late) and not stalled:
            self.paused_s = max(self._own_time.paused(time.time() - beat.age_s) for beat in silent)
        return stalled

    def _a_rank_failed(self) -> bool:
        """Whether a rank reported a failure (it may still be exiting), or ended without a report."""
        self._look_for_ranks()
        ended = sum(not _alive(rank) for rank in self._ranks.values())
        reports = read_rank_exits(self._run, self._numbers)
        failed = len(reports) < ended or any(report.code not in (0, SAVED) for report in reports)
        cause = cause_here(reports, ended) if failed and self._link else None
        if cause and self._link and not self._link.failure():
            self._link.report_failure(cause)
            self.cause_reported = True
        return failed

    def _hanging_ranks(self) -> dict[int, str]:
        """Asks the ranks without a report for their stacks; returns a message for each that hangs."""
        beats = read_beats(self._run, self._numbers, self._own_time)
        reported = {report.rank for report in read_rank_exits(self._run, self._numbers)}
        silent = [beat for beat in beats if beat.rank not in reported]
        alive = [beat for beat in silent if beat.pid in self._ranks and _alive(self._ranks[beat.pid])]
        silent = alive or silent  # NCCL ends a process that has waited in vain
        for beat in alive:
            _send(beat.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_WITHIN_S
        while time.monotonic() < deadline and not all(read_stack(self._run, beat.rank) for beat in silent):
            time.sleep(POLL_S / 5)
        return hanging(self._run, silent)

    def _end(self, stalled: bool) -> None:
        """Kills everything; if the ranks are `stalled`, they first say which of them hang."""
        if stalled and not self.hung:
            self.hung = self._hanging_ranks()
        self._kill_all()

    def _kill_all(self) -> None:
        alive = [pid for pid, rank in self._ranks.items() if _alive(rank)]
        self._killed = self._killed or self._process.poll() is None
        for pid in alive if self._process.poll() is not None else [self._process.pid, *alive]:
            # torchrun gives each rank a process group of its own, so this kills its helpers as well.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            _send(pid, signal.SIGKILL)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)

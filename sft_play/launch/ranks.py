"""What a launcher tells its ranks, and how they tell it that they ended.

They are told through environment variables, which are read only here. They report in files of the run
directory, because accelerate and torchrun turn all exit codes into 1.
"""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sft_play.errors import ConfigError, Interrupted, LaunchError, OutOfMemory, SftPlayError, StorageError
from sft_play.files import write_atomic
from sft_play.runlog import RunDir
from sft_play.secrets import redact
from sft_play.spelling import make, var
from sft_play.units import KIB

COMPANIONS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set together with WORLD_SIZE
PLAN_VARIABLE = "SFT_PLAY_PLAN"  # file of the plan that our launcher made for its ranks
REPORTS_VARIABLE = "SFT_PLAY_RANKS"  # folder where the ranks report to our launcher how they ended
PROCESSES_VARIABLE = "SFT_PLAY_PROCESSES"  # world size that our launcher requested

MOST_PROCESSES = 2**20

SAVED = Interrupted.exit_code
STOPPED_BY_USER = 130
DIED_SILENTLY = "died without reporting an error"
CAUSE_UNKNOWN = "crashed or killed, possibly by the out-of-memory killer"
# Parts of a rank's error message when the cause is that another rank is gone.
TIMED_OUT = "timed out"
LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    TIMED_OUT,
    "distbackenderror",
    "recvvalue failed",
)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place among those of a run; the default is a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    plan_file: Path | None = None
    reports_folder: Path | None = None
    asked_world_size: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def launched_by_us(self) -> bool:
        """Whether our launcher started this process.

        If so, the launcher holds the run directory, made the plan and prints the summary.
        """
        return self.plan_file is not None

    @property
    def spans_machines(self) -> bool:
        """Whether processes of the run are on other machines."""
        return self.world_size != self.local_world_size

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RankEnvironment":
        """Reads the variables that torchrun and accelerate set, and ours.

        Raises:
            ConfigError: one of them is not a number, or the companions of WORLD_SIZE are missing.
        """

        def number(name: str, default: int, low: int, high: int) -> int:
            text = environment.get(name, str(default))
            if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
                raise ConfigError(
                    f"the variable {name}={text}: expected a whole number from {low} to {high}, as torchrun "
                    "and accelerate set it"
                )
            return int(text)

        world_size = number("WORLD_SIZE", 1, 1, MOST_PROCESSES)
        local_world_size = number("LOCAL_WORLD_SIZE", world_size, 1, world_size)
        missing = [name for name in COMPANIONS if not environment.get(name)] if world_size > 1 else []
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={world_size}, but {', '.join(missing)} not set: start all processes with "
                f"torchrun or `{make('train-distributed')}`, or unset WORLD_SIZE to train with one"
            )
        plan, reports = environment.get(PLAN_VARIABLE), environment.get(REPORTS_VARIABLE)
        asked = environment.get(PROCESSES_VARIABLE)
        return cls(
            rank=number("RANK", 0, 0, world_size - 1),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", 0, 0, local_world_size - 1),
            local_world_size=local_world_size,
            plan_file=Path(plan) if plan else None,
            reports_folder=Path(reports) if reports else None,
            asked_world_size=number(PROCESSES_VARIABLE, 1, 1, MOST_PROCESSES) if asked else None,
        )

    def require_whole_world(self) -> None:
        """Raises ConfigError if accelerate started fewer or more processes than our launcher requested."""
        if self.asked_world_size not in (None, self.world_size):
            raise ConfigError(
                f"{self.asked_world_size} processes were requested, but the launcher started "
                f"{self.world_size}; the effective batch would be wrong. Check the accelerate config file "
                "(on a CPU it needs distributed_type: MULTI_GPU with use_cpu: true)"
            )


SINGLE_PROCESS = RankEnvironment()


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: its exit code (errors.py), its message, the time, and the class of its error."""

    rank: int
    code: int
    message: str = ""
    time: float = 0.0
    error: str = ""


def reports_folder(run: RunDir) -> Path:
    """The folder of the reports that the ranks of a run write."""
    return run.path / "ranks"


def finish_rank(ranks: RankEnvironment, code: int, message: str = "", error: str = "") -> int:
    """Reports this rank's exit to our launcher, if it started the rank; returns the process's exit status.

    Under our launcher, a rank that was interrupted after saving exits with 0, so that torchrun does not kill
    ranks that are still saving. `error` is the class of the error with this message.
    """
    folder = ranks.reports_folder
    if folder is None:
        return code
    report = RankExit(ranks.rank, code, redact(message), time.time(), error)
    with contextlib.suppress(OSError):  # the disk may be what failed; the exit status is still returned
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{report.rank}.json", json.dumps(asdict(report)), flush=False)
    return 0 if code == SAVED else code


def read_rank_exits(run: RunDir, ranks: Iterable[int]) -> list[RankExit]:
    """The reports of these ranks, the earliest first."""
    exits = []
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it is not there, or not whole yet
            text = (reports_folder(run) / f"{rank}.json").read_text(encoding="utf-8")
            exits.append(RankExit(**json.loads(text)))
    return sorted(exits, key=lambda report: report.time)


def write_problem(run: RunDir, processes: int) -> str | None:
    """Why none of so many ranks can report, and what to do; None if they can."""
    test = reports_folder(run) / "test.json"
    try:
        test.parent.mkdir(parents=True, exist_ok=True)  # a rank makes it when it has something to report
        write_atomic(test, " " * KIB)
        test.unlink()
    except OSError as error:
        return (
            f"cannot say why, as {run.path} cannot be written: {error.strerror}. Free space there, or make "
            f"it writable, and go on with: {run.resume_command(processes)}"
        )
    return None


def clear_reports(run: RunDir, ranks: Iterable[int]) -> None:
    """Removes what these ranks wrote in an earlier run: how they ended, their heartbeats and stacks."""
    for rank in ranks:
        for path in reports_folder(run).glob(f"{rank}.*"):
            path.unlink(missing_ok=True)


def outcome(
    exits: Sequence[RankExit],
    ranks: Sequence[int],
    status: int,
    *,
    started: bool,
    stopped_by: str | None,
    log_tail: str,
    hung: Mapping[int, str] | None = None,
    paused_s: float = 0.0,
    kernel_killed: bool = False,
    unwritable: str | None = None,
) -> RankExit:
    """The outcome of a launched run, from the reports of its ranks and the launcher's exit status.

    The first rank that failed counts, unless it only lost its peer and another rank died without reporting.

    `exits` has the earliest first, `ranks` are those of this machine, and `status` is the launcher's.
    `stopped_by` names the signal that stopped the run. `hung` has a message for each rank that made no
    progress when the others timed out; `paused_s` says that nothing ran for so long, which is why.
    `unwritable` says why no rank can report.
    """
    failed = [report for report in exits if report.code not in (0, SAVED)]
    silent = sorted(set(ranks) - {report.rank for report in exits})
    if paused_s and failed and all(says_lost_peer(report.message) for report in failed):
        return RankExit(failed[0].rank, LaunchError.exit_code, _paused(paused_s))
    with_cause = [report for report in failed if not (silent and says_lost_peer(report.message))]
    if with_cause:
        return next((report for report in with_cause if report.code != 1), with_cause[0])
    if hung:
        return RankExit(min(hung), LaunchError.exit_code, "\n".join(hung.values()))
    saved = [report for report in exits if report.code == SAVED]
    # With a silent rank this is no preemption: torchrun terminates the others when one dies, and they save.
    if saved and not failed and not silent:
        return saved[0]
    # All ranks reported success: a process that crashes while it exits loses nothing.
    if not failed and (status == 0 or not (silent or saved or stopped_by)):
        return RankExit(rank=0, code=0)
    if stopped_by:
        return RankExit(silent[0] if silent else 0, STOPPED_BY_USER, f"stopped by {stopped_by}")
    if silent and unwritable:
        return RankExit(silent[0], StorageError.exit_code, f"{_names(silent)} ended, and {unwritable}")
    if status < 0:
        text = f"accelerate launch was killed by {signal_name(-status)}, and its ranks with it"
    elif started and silent:
        text = _describe_silent(silent, log_tail) + (f"; {_kernel_killed()}" if kernel_killed else "")
    elif started:
        text = f"accelerate launch exited with status {status}"
    else:
        text = f"accelerate launch exited with status {status} before it started a rank"
    return RankExit(silent[0] if silent else 0, LaunchError.exit_code, f"{text}\n{log_tail}".strip())


def _kernel_killed() -> str:
    return (
        "meanwhile the kernel killed a process because the machine, or its container, had no memory left: "
        f"make the run need less (train.batch_size, {var(NGPU=None)}, data.num_workers), or free some"
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _paused(seconds: float) -> str:
    return (
        f"the processes did not run for {seconds:.0f} s: a scheduler suspended them, or the machine slept. "
        "Their collectives timed out meanwhile (parallel.timeout_s); none of them hangs. "
        f"`{make('resume')}` continues, and a larger parallel.timeout_s outlasts such a pause"
    )


def _describe_silent(silent: Sequence[int], log_tail: str) -> str:
    """Names the rank that torchrun saw fail first, and its signal; all silent ranks if torchrun saw none."""
    found = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", log_tail, re.DOTALL)
    if found is None or int(found[1]) not in silent:
        return f"{_names(silent)} {DIED_SILENTLY}: {CAUSE_UNKNOWN}"
    rank, code, how = int(found[1]), int(found[2]), CAUSE_UNKNOWN
    if code < 0:
        how = f"killed by {signal_name(-code)}"
        how += ", possibly by the out-of-memory killer" if -code == signal.SIGKILL else ""
    return f"rank {rank} {DIED_SILENTLY}: {how}"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_here(exits: Sequence[RankExit], ended: int) -> RankExit | None:
    """The failure on this machine that ended the run; None if its ranks only lost a peer on another machine.

    It follows from the reports so far, and from how many ranks have ended.
    """
    failed = [report for report in exits if report.code not in (0, SAVED)]
    if len(exits) < ended and not failed:
        return RankExit(0, LaunchError.exit_code, f"a rank {DIED_SILENTLY}: {CAUSE_UNKNOWN}")
    return next((report for report in failed if not says_lost_peer(report.message)), None)


def says_lost_peer(message: str) -> bool:
    """Whether an error message says that another rank is gone."""
    return any(part in message.lower() for part in LOST_PEER)


def says_timeout(message: str) -> bool:
    """Whether an error message says that a rank has waited for others in vain."""
    return TIMED_OUT in message.lower()


def raise_unless_done(result: RankExit) -> None:
    """Raises the error with the exit code of a failed outcome, so that the CLI exits as the rank did.

    Raises:
        SftPlayError: the subclass with that code, or the class itself for a bug, with the rank's traceback as
            the message.
        OutOfMemory: memory ran out in the middle of training.
        KeyboardInterrupt: a signal ended the run at once; the message names it.
    """
    if result.code == 0:
        return
    if result.code == STOPPED_BY_USER:
        raise KeyboardInterrupt(result.message)
    kinds = {kind.exit_code: kind for kind in SftPlayError.__subclasses__()}
    kind = OutOfMemory if result.error == OutOfMemory.__name__ else kinds.get(result.code, SftPlayError)
    raise kind(result.message or f"rank {result.rank} exited with code {result.code}")

"""What became of each rank, in small files of the run directory: accelerate and torchrun turn every exit code into 1."""

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sft_play.errors import ConfigError, Interrupted, LaunchError, SftPlayError
from sft_play.runlog import RunDir

RANKS_VARIABLE = "SFT_PLAY_RANKS"  # folder of the reports; our launcher sets it
PROCESSES_VARIABLE = "SFT_PLAY_PROCESSES"  # world size that was asked for

SAVED = Interrupted.exit_code
STOPPED_BY_USER = 130
NOT_KNOWN = "crashed, or killed (by the system, for memory?)"
# How a rank's error reads when the cause is another rank that is gone.
LOST_PEER = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "distbackenderror",
    "recvvalue failed",
)


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: exit code of DESIGN section 4, what it says, and when."""

    rank: int
    code: int
    message: str = ""
    time: float = 0.0


def reports_folder(run: RunDir) -> Path:
    """Where the ranks of a run write."""
    return run.path / "ranks"


def report_rank_exit(run: RunDir, rank: int, code: int, message: str) -> None:
    """Writes down how a rank ended; called by the rank itself."""
    _write(reports_folder(run), RankExit(rank, code, message, time.time()))


def finish_rank(code: int, message: str = "") -> int:
    """Reports to our launcher, if it started this rank, and returns the status that the process should exit with.

    A rank that stopped after saving ends with 0 there, so that torchrun does not kill the ones that are still writing.
    """
    folder = os.environ.get(RANKS_VARIABLE)
    if folder is None:
        return code
    _write(Path(folder), RankExit(int(os.environ.get("RANK", "0")), code, message, time.time()))
    return 0 if code == SAVED else code


def check_world_size() -> None:
    """Every rank makes sure that as many processes were started as were asked for.

    Raises:
        ConfigError: accelerate started fewer or more.
    """
    asked, found = os.environ.get(PROCESSES_VARIABLE), os.environ.get("WORLD_SIZE", "1")
    if asked is not None and found != asked:
        raise ConfigError(
            f"{asked} processes were asked for, but the launcher started {found}; the effective batch would be wrong. "
            "Look at the accelerate config file (on a CPU it needs distributed_type: MULTI_GPU with use_cpu: true)"
        )


def _write(folder: Path, report: RankExit) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{report.rank}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
        temporary.replace(folder / f"{report.rank}.json")
    except OSError:  # the disk may be what failed; the exit status remains
        return


def read_rank_exits(run: RunDir) -> list[RankExit]:
    """All reports, the earliest first."""
    exits = []
    for path in reports_folder(run).glob("*.json"):
        try:
            exits.append(RankExit(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(exits, key=lambda report: report.time)


def clear_rank_exits(run: RunDir, ranks: Sequence[int]) -> None:
    """Forgets what these ranks reported in an earlier run."""
    for rank in ranks:
        (reports_folder(run) / f"{rank}.json").unlink(missing_ok=True)


def outcome(
    exits: Sequence[RankExit],
    ranks: Sequence[int],
    status: int,
    *,
    started: bool,
    stopped_by: str | None,
    log_tail: str,
    hung: Mapping[int, str] | None = None,
) -> RankExit:
    """What a launched run came to, from the ranks' own words and the launcher's exit status.

    The first rank that failed counts; one that only lost its peer does not if another one ended without a word.

    Args:
        exits: what the ranks reported, the earliest first.
        ranks: the ranks of this machine.
        status: exit status of the launcher.
        started: whether a rank was ever seen.
        stopped_by: name of the signal that the run was stopped with, if it was.
        log_tail: the last lines that the launcher wrote.
        hung: ranks that stood still when the wait of the others timed out, and what is known of each.
    """
    failed = [report for report in exits if report.code not in (0, SAVED)]
    silent = sorted(set(ranks) - {report.rank for report in exits})
    with_cause = [report for report in failed if not (silent and lost_peer(report))]
    if with_cause:
        return next((report for report in with_cause if report.code != 1), with_cause[0])
    if hung:
        return RankExit(min(hung), LaunchError.exit_code, "\n".join(hung.values()))
    saved = [report for report in exits if report.code == SAVED]
    if saved and not failed and not silent:  # torchrun stops the others politely when one is gone: that is no preemption
        return saved[0]
    if not failed and (status == 0 or not (silent or saved or stopped_by)):
        return RankExit(rank=0, code=0)  # a process that breaks on its way out, after it said that all is written, lost nothing
    if stopped_by:
        text = f"stopped by {stopped_by} before a checkpoint could be saved"
    elif status < 0:
        text = f"accelerate launch was killed by {signal_name(-status)}, and its ranks with it"
    elif started and silent:
        text = _how_they_ended(silent, log_tail)
    else:
        text = f"accelerate launch ended with status {status}{'' if started else ' before it started a rank'}"
    return RankExit(silent[0] if silent else 0, LaunchError.exit_code, f"{text}\n{log_tail}".strip())


def _how_they_ended(silent: Sequence[int], log_tail: str) -> str:
    """The one that torchrun saw fail first, and by which signal; all of them where it did not see."""
    found = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", log_tail, re.DOTALL)
    first = [int(found[1])] if found and int(found[1]) in silent else silent
    names = f"rank {first[0]}" if len(first) == 1 else f"ranks {', '.join(map(str, first))}"
    how = NOT_KNOWN
    if found and first is not silent and int(found[2]) < 0:
        name = signal_name(-int(found[2]))
        how = f"killed by {name}{' (by the system, for memory?)' if name == 'SIGKILL' else ''}"
    return f"{names} ended without a word: {how}"


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_here(exits: Sequence[RankExit], ended: int) -> RankExit | None:
    """What ended the run on this machine, seen from the ranks that ended so far; None if they only lost a peer elsewhere."""
    failed = [report for report in exits if report.code not in (0, SAVED)]
    if len(exits) < ended and not failed:
        return RankExit(0, LaunchError.exit_code, f"a rank ended without a word: {NOT_KNOWN}")
    return next((report for report in failed if not lost_peer(report)), None)


def lost_peer(report: RankExit) -> bool:
    """Whether a rank's error is that another one is gone."""
    return any(words in report.message.lower() for words in LOST_PEER)


def raise_unless_done(result: RankExit) -> None:
    """Turns a failed outcome into the error that has its exit code, so that the CLI ends as the rank did.

    Raises:
        SftPlayError: the subclass of that code; the class itself for a bug, with the rank's traceback as text.
        KeyboardInterrupt: a second Ctrl-C ended it at once.
    """
    if result.code == 0:
        return
    if result.code == STOPPED_BY_USER:
        raise KeyboardInterrupt
    kinds = {kind.exit_code: kind for kind in SftPlayError.__subclasses__()}
    raise kinds.get(result.code, SftPlayError)(result.message or f"rank {result.rank} ended with code {result.code}")

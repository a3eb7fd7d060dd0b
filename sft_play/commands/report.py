"""`make report`, and the report that every run leaves, however it ends."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.schema import RunConfig
from sft_play.errors import Interrupted
from sft_play.libraries import library_failure
from sft_play.report.record import activity_of
from sft_play.runlog import RunDir, read_json, update_summary
from sft_play.spelling import make
from sft_play.ui.console import console, warn

if TYPE_CHECKING:
    from sft_play.report.record import RunRecord


def write_report(path: Path) -> Path:
    """Writes report.html into a run directory and returns its path.

    Raises:
        CheckpointError: there is no such run.
        StorageError: the report cannot be written.
    """
    from sft_play.report.html import write_page  # with plots, which the ranks need not load
    from sft_play.report.run_page import run_page

    target = RunDir(path).report
    write_page(run_page(read_and_say(path)), target)
    return target


def read_and_say(path: Path) -> "RunRecord":
    """A run; says which of its files cannot be read. CheckpointError if there is no such run."""
    from sft_play.report.sound import read_sound

    run = read_sound(path)
    if run.damaged:
        warn(f"{run.name}: damaged and omitted: {', '.join(run.damaged)}")
    return run


def lacks_scaling(run: RunDir) -> bool:
    """Whether a run is done, and its latest plan not yet made for other numbers of processes."""
    plan, scaling = _version(run.plan), _version(run.scaling)
    older = plan and (scaling is None or scaling[1] < plan[1])
    return bool(older) and read_json(run.summary).get("status") == "done" and not activity_of(run)


def try_report(run: RunDir) -> dict[str, Path]:
    """Writes the report of a run that has ended, and returns its path by name; {} if that failed.

    Whatever fails here, the run has ended, so it is said in one line.
    """
    try:
        return {"report": write_report(run.path)}
    except Exception as error:  # noqa: BLE001 - see above
        warn(f"the report could not be written: {error}; try `{make('report', RUN=run.path)}`")
        return {}


@contextlib.contextmanager
def end_reported(run: RunDir, config: RunConfig, *, here: bool) -> Iterator[None]:
    """Ends summary and report of a run that is interrupted or fails within it; the error then goes on.

    Training may be over by then, and its weights saved: that is another thing than a command that is done.

    What fails before the run has begun changes nothing in its directory, which is still that of an earlier
    run. `here`: whether this process writes the run directory.
    """
    if not here:
        yield
        return
    plan, summary = _version(run.plan), _version(run.summary)
    try:
        yield
    except Interrupted:
        _report(run)  # it may be a while until the run goes on
        raise
    except KeyboardInterrupt as error:
        trained = _is_trained(run, summary)
        if trained:
            _end(run, status="interrupted")
        said = _what_is_saved(run, begun=_version(run.plan) != plan, trained=trained)
        raise KeyboardInterrupt(f"{str(error) or 'stopped by SIGINT'}{said}") from None
    except Exception as error:
        if _version(run.plan) != plan:
            shown = library_failure(error, config) or error
            reason = str(shown) or type(shown).__name__
            _end(run, status="failed", error=reason, trained=_is_trained(run, summary))
        raise


def _is_trained(run: RunDir, earlier: tuple[int, int] | None) -> bool:
    """Whether this run has saved its weights; `earlier` is the version of the summary that it has found."""
    return _version(run.summary) != earlier and bool(read_json(run.summary).get("trained"))


def _end(run: RunDir, **values: object) -> None:
    with contextlib.suppress(Exception):  # it may be the disk that failed
        update_summary(run, **values)
    _report(run)


def _version(path: Path) -> tuple[int, int] | None:
    """What tells one version of a file from the next; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _what_is_saved(run: RunDir, *, begun: bool, trained: bool) -> str:
    from sft_play.train.checkpoints import by_step

    if not begun:
        return " before the first step, so there is nothing to save"
    if trained:
        use = [make(target, RUN=shlex.quote(run.typed)) for target in ("eval", "infer")]
        return f" after training; the weights are saved, and `{use[0]}` and `{use[1]}` use them"
    saved = by_step(run)
    again = run.resume_command(read_json(run.plan).get("plan", {}).get("world_size", 1))
    if not saved:
        return f" before the first checkpoint. Start again with: {again}"
    return f" at once; {saved[-1].name} is the last one saved. Continue with: {again}"


def _report(run: RunDir) -> None:
    for path in try_report(run).values():
        console().print(f"  partial report: {path}", style="dim")

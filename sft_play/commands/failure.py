"""What a run leaves that does not get to its end: the error in its summary, and a report of what there is."""

import contextlib
from collections.abc import Iterator

from sft_play.config.schema import RunConfig
from sft_play.errors import Interrupted
from sft_play.libraries import library_failure
from sft_play.runlog import RunDir, console, read_json, update_summary


@contextlib.contextmanager
def end_reported(run: RunDir, config: RunConfig, *, here: bool) -> Iterator[None]:
    """Writes the report of a run that is interrupted or fails within it; the error then goes on as it is.

    What fails before the run has begun changes nothing in its directory, which is still that of an earlier
    run.

    Args:
        run: the run.
        config: its config.
        here: whether this process writes the run directory.
    """
    before = _versions(run)
    try:
        yield
    except Interrupted:
        if here:
            _report(run)  # it may be a while until the run goes on
        raise
    except Exception as error:
        begun, summarised = (was != now for was, now in zip(before, _versions(run), strict=True))
        if here and begun:
            _keep_error(run, library_failure(error, config) or error, trained=summarised)
            _report(run)
        raise


def _versions(run: RunDir) -> list[tuple[int, int] | None]:
    """What tells one version from the next of the files that begin and end a run."""
    found: list[tuple[int, int] | None] = []
    for path in (run.plan, run.summary):
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _keep_error(run: RunDir, error: BaseException, *, trained: bool) -> None:
    """Writes the error into the summary, if that is possible: it may be the disk that failed."""
    done = trained and read_json(run.summary).get("status") == "done"
    with contextlib.suppress(Exception):
        update_summary(run, status="done" if done else "failed", error=str(error) or type(error).__name__)


def _report(run: RunDir) -> None:
    from sft_play.commands.report import try_report  # with plots, which the ranks need not load

    for path in try_report(run).values():
        console().print(f"  partial report: {path}", style="dim", markup=False)

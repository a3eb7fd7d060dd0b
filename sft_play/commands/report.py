"""`make report`: a run as a web page, from whatever its directory holds."""

from pathlib import Path

from rich.markup import escape

from sft_play.report.html import write_page
from sft_play.report.record import find_run, read_run
from sft_play.report.run_page import run_page
from sft_play.runlog import RunDir, console


def report_command(name: str | None, folder: Path) -> Path:
    """Writes report.html into a run directory and returns its path.

    Args:
        name: of a run within `folder`, or a path; without a name, the latest run.
        folder: of all runs.

    Raises:
        CheckpointError: there is no such run.
        StorageError: the report cannot be written.
    """
    return write_report(find_run(name, folder))


def write_report(path: Path) -> Path:
    """Writes the report of a run directory; result and errors as in `report_command`."""
    target = RunDir(path).report
    write_page(run_page(read_run(path)), target)
    return target


def try_report(run: RunDir) -> dict[str, Path]:
    """Writes the report of a run that has ended, and returns its path by name; {} if that failed.

    Whatever fails here, the run has ended, so it is said in one line.
    """
    try:
        return {"report": write_report(run.path)}
    except Exception as error:  # noqa: BLE001 - see above
        reason = escape(f"the report could not be written: {error}; try `make report RUN={run.path}`")
        console().print(f"  [yellow]{reason}[/]", soft_wrap=True)
        return {}

"""The command about all runs of a folder."""

import shlex
import sys
from pathlib import Path

import click

from sft_play.commands.command_line import Arguments, command, end, flag, switch
from sft_play.commands.handlers import folder_of_runs
from sft_play.errors import ConfigError
from sft_play.spelling import either, make
from sft_play.ui.console import console


@command("runs", config=False, as_json=True, examples=["", "remove old-run older-run --yes"])
@flag("words", "`remove` and names of runs", nargs=-1, metavar="[remove name...]")
@folder_of_runs
@switch("--yes", "remove without asking")
def list_or_remove(args: Arguments, words: tuple[str, ...], runs: Path, yes: bool) -> int:
    """List runs with status, steps, score and note; or remove some, with all of their files."""
    from sft_play.commands.runs import as_json, removable, remove, rows_of, runs_table, size_of
    from sft_play.report.table import Fitting
    from sft_play.units import format_bytes

    if not words:
        rows = rows_of(runs)
        none = f"There are no runs in {runs}; `{make('train')}` makes one"
        return end(args, as_json(rows), Fitting(runs_table(rows)) if rows else none)
    if words[0] != "remove" or len(words) < 2:
        raise ConfigError(f"runs {shlex.join(words)}: expected nothing, or `remove` and names of runs")
    found = removable(words[1:], runs)
    sizes = {run: size_of(run) for run in found}
    if not yes and not sys.stdin.isatty():
        added = either("CONFIRM=1", "--yes")
        raise ConfigError(f"this removes {', '.join(words[1:])} with all checkpoints; add {added} to proceed")
    size = format_bytes(sum(sizes.values()))
    question = f"Remove {', '.join(words[1:])} in {runs} with all files ({size})?"
    removed = found if yes or click.confirm(question, err=True) else []
    for run in removed:
        remove(run)
        console().print(f"removed     {format_bytes(sizes[run])} in {run.path}")
    return end(args, [{"name": run.path.name, "removed_bytes": sizes[run]} for run in removed])

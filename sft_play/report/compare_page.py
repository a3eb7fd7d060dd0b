"""Several runs side by side: key numbers, what was set differently, and curves on the same axes."""

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table as ConsoleTable
from rich.text import Text as ConsoleText

from sft_play.report.curves import curve_figures
from sft_play.report.html import Block, Figures, Page, Section, Table, Text
from sft_play.report.record import RunRecord
from sft_play.report.run_page import shown
from sft_play.report.tables import METRICS, MISSING, said_of
from sft_play.units import format_bytes, format_count, format_duration

ALIKE = {"output.name", "output.dir", "train.resume"}  # differ between any two runs


def compare_page(runs: Sequence[RunRecord]) -> Page:
    """The page of two or more runs."""
    names = [run.name for run in runs]
    figures = curve_figures(runs)
    no_curves = Text(["No run has recorded a step."])
    sections = [
        Section("numbers", "Key numbers", [_numbers(runs)]),
        Section("settings", "Different settings", [_differences(runs)]),
        Section("curves", "Curves", [Figures(figures) if figures else no_curves]),
    ]
    if scaling := _scaling(runs):
        sections.append(Section("scaling", "Scaling", scaling))
    return Page(", ".join(names), f"{len(runs)} runs of SFT-Play compared", sections)


def key_numbers(run: RunRecord) -> list[tuple[str, str]]:
    """The key numbers of a run, as texts by name."""
    summary, plan = run.summary, run.chosen
    batch = [plan.get(key) for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size")]
    found: list[tuple[str, str]] = [
        ("status", str(summary.get("status", "unfinished"))),
        ("steps", f"{run.last_step:,}"),
        ("effective batch", _form(plan.get("effective_batch_size"), "{:,}".format)),
        ("micro-batch x accumulation x processes", MISSING if None in batch else " x ".join(map(str, batch))),
        ("training loss", _form(summary.get("train_loss"), "{:.4f}".format)),
    ]
    for when in ("before", "after"):
        scores = run.scores(when)
        found += [
            (f"{label}, {when}", _form(scores.get(key), form))
            for key, (label, form) in METRICS.items()
            if key in scores
        ]
    return [
        *found,
        (f"peak memory, {run.memory_origin}", _form(run.predicted_peak_bytes, format_bytes)),
        ("peak memory, measured", _form(summary.get("measured_peak_bytes"), format_bytes)),
        ("tokens/s", _form(summary.get("tokens_per_second"), "{:,.0f}".format)),
        (
            f"step, {said_of(summary.get('predicted_step_origin'))}",
            _form(summary.get("predicted_step_seconds"), format_duration),
        ),
        ("step, measured", _form(summary.get("measured_step_seconds"), format_duration)),
        ("training time", _form(summary.get("training_seconds"), format_duration)),
        ("supervised tokens", _form(summary.get("supervised_tokens"), format_count)),
    ]


def _form(value: Any, form: Callable[[Any], str]) -> str:
    return form(value) if isinstance(value, int | float) else MISSING


def _numbers(runs: Sequence[RunRecord]) -> Table:
    columns = [dict(key_numbers(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        rows.append((name, *(column.get(name, MISSING) for column in columns)))
    return Table("Key numbers of each run", ("", *(run.name for run in runs)), rows)


def _differences(runs: Sequence[RunRecord]) -> Block:
    """The settings whose values are not the same in all runs, and whether their data was the same."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ALIKE)
    rows = [(name, *(shown(run, name) for run in runs)) for name in names]
    rows.append(("fingerprint of the data", *(str(run.data.get("fingerprint", MISSING)) for run in runs)))
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return Text(["All settings are the same."])
    head = ("setting", *(run.name for run in runs))
    return Table("Settings that are not the same in all runs", head, rows, numbers=False)


def _scaling(runs: Sequence[RunRecord]) -> list[Block]:
    """Measured speed over the number of processes; [] if all runs have the same number of them."""
    known = [(run.summary.get("world_size"), run.summary.get("tokens_per_second"), run) for run in runs]
    measured = [
        (world, speed, run.name)
        for world, speed, run in known
        if isinstance(world, int) and isinstance(speed, float) and world and speed
    ]
    if len({world for world, _, _ in measured}) < 2:
        return []
    measured.sort()
    fewest, base, name = measured[0]
    rows = []
    for world, speed, run in measured:
        gain = speed / base
        share = gain * fewest / world
        rows.append((run, str(world), f"{speed:,.0f}", f"{gain:.2f}x", f"{share:.0%}"))
    head = ("run", "processes", "tokens/s", "speed-up", "efficiency")
    note = f"Speed-up over {name}. It is that of the processes only if the settings above are the same."
    return [Table("Measured speed by number of processes", head, rows), Text([note])]


def compare_table(runs: Sequence[RunRecord]) -> ConsoleTable:
    """The most important numbers for the console, a row for each run."""
    table = ConsoleTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    columns = {
        "steps": "steps",
        "loss, before": "loss\nbefore",
        "loss, after": "\nafter",
        "peak memory, measured": "peak\nmemory",
        "tokens/s": "tokens/s",
        "step, measured": "step",
    }
    table.add_column("run", overflow="fold")
    table.add_column("status", overflow="fold")
    for label in columns.values():
        table.add_column(label, justify="right")
    for run in runs:
        found = dict(key_numbers(run))
        cells = (found.get(name, MISSING) for name in columns)
        table.add_row(ConsoleText(run.name), found["status"], *cells)
    return table

"""Several runs side by side: curves on the same axes, key numbers, and what was set differently."""

from collections.abc import Sequence

from rich import box
from rich.table import Table as ConsoleTable
from rich.text import Text as ConsoleText

from sft_play.report.choices import shown
from sft_play.report.curves import curve_figures
from sft_play.report.html import Block, Figures, Page, Section, Text
from sft_play.report.record import RunRecord
from sft_play.report.run_page import KeyNumber, key_numbers
from sft_play.report.table import Table
from sft_play.report.tables import METRICS, MISSING, SPEED_UP
from sft_play.units import counted

# Beginnings of the names of key numbers of which less, or more, is better.
LESS = ("training loss", "loss, after", "perplexity, after", "peak memory", "step, ", "training time")
MORE = (
    "tokens/s",
    *(f"{label}, after" for key, (label, _) in METRICS.items() if key not in ("loss", "perplexity")),
)
ALIKE = {"output.name", "output.dir", "train.resume"}  # differ between any two runs


def compare_page(runs: Sequence[RunRecord]) -> Page:
    """The page of two or more runs."""
    names = [run.name for run in runs]
    figures = curve_figures(runs)
    no_curves = Text(["No run has recorded a step."])
    sections = [
        Section("curves", "Curves", [Figures(figures) if figures else no_curves]),
        Section("numbers", "Key numbers", _numbers(runs)),
        Section("settings", "Different settings", [_differences(runs)]),
    ]
    if scaling := _scaling(runs):
        sections.append(Section("scaling", "Scaling", scaling))
    return Page(", ".join(names), f"{len(runs)} runs of SFT-Play compared", sections)


def _numbers(runs: Sequence[RunRecord]) -> list[Block]:
    """The key numbers, and of each run after the first how they differ from its; the same ones are folded."""
    columns = [{entry.name: entry for entry in key_numbers(run)} for run in runs]
    head = ["", runs[0].name]
    for run in runs[1:]:
        head += [run.name, "difference" if len(runs) == 2 else f"difference from {runs[0].name}"]
    places: dict[str, int] = {}  # what only some runs have stands where it stands in them
    for column in columns:
        for place, name in enumerate(column):
            places[name] = max(place, places.get(name, 0))
    rows: list[tuple[str, ...]] = []
    same: list[tuple[str, ...]] = []
    for name in sorted(places, key=places.__getitem__):
        found = [column.get(name, KeyNumber(name, MISSING)) for column in columns]
        cells = [found[0].text]
        for entry in found[1:]:
            cells += [entry.text, _judged(found[0], entry)]
        texts = {entry.text for entry in found}
        (rows if len(texts) > 1 else same).append((name, *cells) if len(texts) > 1 else (name, *texts))
    blocks: list[Block] = [Table(head, rows, "Key numbers that differ", cards=True)] if rows else []
    said = f"{counted(len(same), 'key number')} that are the same in all runs"
    return blocks + ([Table(("", "all runs"), same, said, folded=True)] if same else [])


def _judged(first: KeyNumber, other: KeyNumber) -> str:
    """How a key number differs, and whether that is better, where one can say so."""
    said = _difference(first, other)
    if said in ("", "same") or not first.name.startswith(LESS + MORE):
        return said
    less = (other.value or 0) < (first.value or 0)
    return f"{said}, {'better' if less == first.name.startswith(LESS) else 'worse'}"


def _difference(first: KeyNumber, other: KeyNumber) -> str:
    """Points of percentages, else percent of the first or times it; "" where a number is missing or 0."""
    base, value = first.value, other.value
    if base is None or value is None:
        return ""
    if base == value:
        return "same"
    if first.text.endswith("%"):
        return f"{100 * (value - base):+z.1f} points"
    if not base:
        return ""
    ratio = value / base
    if ratio >= 10:
        return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.1e} times"
    return f"{100 * (value - base) / base:+z.1f}%"


def _differences(runs: Sequence[RunRecord]) -> Block:
    """The settings whose values are not the same in all runs, and whether their data was the same."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ALIKE)
    rows = [(name, *(shown(run, name) for run in runs)) for name in names]
    fingerprints = (str(run.data.get("fingerprint", MISSING)) for run in runs)
    rows.append(("fingerprint of the data", *(text[:12] for text in fingerprints)))
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return Text(["All settings are the same."])
    head = ("setting", *(run.name for run in runs))
    return Table(head, rows, "Settings that differ", left=range(len(head)))


def _scaling(runs: Sequence[RunRecord]) -> list[Block]:
    """Measured speed over the number of processes, of runs that do the same work for a token."""
    alike: dict[tuple[str, ...], list[tuple[int, float, str]]] = {}
    for run in runs:
        world, speed = run.summary.get("world_size"), run.summary.get("tokens_per_second")
        if isinstance(world, int) and isinstance(speed, float) and world and speed:
            alike.setdefault(_work(run), []).append((world, speed, run.name))
    blocks: list[Block] = []
    for group in alike.values():
        if len({world for world, _, _ in group}) > 1:
            blocks += _speed_ups(sorted(group))
    return blocks


def _work(run: RunRecord) -> tuple[str, ...]:
    """The model, the method and the data: where they differ, speed says nothing about processes."""
    names = sorted(name for name in run.settings if name.startswith(("model.", "tuning.")))
    settings = (f"{name}={run.value(name)}" for name in names)
    return (*settings, str(run.data.get("fingerprint", MISSING)))


def _speed_ups(measured: Sequence[tuple[int, float, str]]) -> list[Block]:
    """Rows of (processes, tokens per second, name), the fewest processes first, against the first of them."""
    fewest, base, name = measured[0]
    rows = []
    for world, speed, label in measured:
        gain = speed / base
        rows.append((label, str(world), f"{speed:,.0f}", f"{gain:.2f}x", f"{gain * fewest / world:.0%}"))
    head = ("run", "processes", "tokens/s", SPEED_UP, "efficiency")
    note = f"Speed-up over {name}, of runs with the same model, method and data; other settings may differ."
    return [Table(head, rows, "Measured speed by number of processes"), Text([note])]


def compare_table(runs: Sequence[RunRecord]) -> ConsoleTable:
    """The most important numbers for the console, a row for each run."""
    table = ConsoleTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    columns = {
        "steps": "steps",
        "loss, before": "loss\nbefore",
        "loss, after": "\nafter",
        "peak memory, measured": "peak\nmemory",
        "tokens/s": "tokens/s",
        "step, measured": "step",
    }
    for label in ("run", "status"):
        table.add_column(label, overflow="fold", no_wrap=label != "run")
    for label in columns.values():
        table.add_column(label, justify="right", no_wrap=True)
    for run in runs:
        found = {entry.name: entry.text for entry in key_numbers(run)}
        table.add_row(ConsoleText(run.name), found["status"], *(found.get(name, MISSING) for name in columns))
    return table

"""The same run on other numbers of GPUs or processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.engines.registry import label_of
from sft_play.reasons.evidence import link_text
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import MISSING, SPEED_UP, formatted
from sft_play.ui.screen import Words
from sft_play.units import GIB, counted, format_bytes, plural

Row = Mapping[str, Any]
THIS_RUN = "\u00a0(this\u00a0run)"
SHORT: dict[str, str | None] = {
    "micro-batch": "micro",
    "accumulation": "accum",
    "effective batch": "batch",
    "steps per epoch": "steps",
    "lr sqrt": "sqrt",
    "lr linear": "linear",
    "engine": None,
    "communication": "comm",
    SPEED_UP: "speed",
}


def process_unit(device: str) -> str:
    """What a process of a run is called where they are counted: the GPU that it has, or a process."""
    return "GPU" if device == "cuda" else "process"


def scaling_table(rows: Sequence[Row], unit: str, here: int | None = None) -> Table:
    """A row for each number of GPUs or processes (`process_unit`) that can be, as `scaling` has found them.

    That of `here`, the number of this run, says so.
    """
    rates = [f"lr {rule}" for rule in ("none", "sqrt", "linear")]
    head = [plural(unit), "micro-batch", "accumulation", "effective batch", "steps per epoch", *rates]
    return Table(
        [*head, "engine", "GiB", "communication", SPEED_UP],
        [
            (
                f"{row['world_size']}{THIS_RUN if row['world_size'] == here else ''}",
                f"{row['micro_batch_size']:,}",
                str(row["gradient_accumulation_steps"]),
                f"{row['effective_batch_size']:,}",
                f"{row['steps_per_epoch']:,}",
                *(f"{rate:.1e}" for rate in row["learning_rates"].values()),
                label_of(row["engine"]),
                formatted(row["process_bytes"] or row["peak_bytes"], lambda size: f"{size / GIB:.2f}"),
                _communication(row),
                _speed_up(row),
            )
            for row in planned_rows(rows)
        ],
        f"The same run on other numbers of {plural(unit)}, predicted",
        short=SHORT,
    )


def scaling_notes(rows: Sequence[Row], unit: str) -> list[str]:
    """What the columns assume."""
    return [
        *(
            f"lr: relative to batch {row['reference_batch_size']:,}, for each train.lr_scaling "
            f"(in use: {row['lr_scaling']})"
            for row in planned_rows(rows)[-1:]
        ),
        *_speed_up_notes(planned_rows(rows), unit),
    ]


def planned_rows(rows: Sequence[Row]) -> list[Row]:
    """Those of numbers that can be."""
    return [row for row in rows if "problem" not in row]


def scaling_problems(rows: Sequence[Row], unit: str) -> list[str]:
    """Why other numbers cannot be."""
    return [f"{counted(row['world_size'], unit)}: {row['problem']}" for row in rows if "problem" in row]


def scaling_report(rows: Sequence[Row], unit: str = "GPU") -> RenderableType:
    """On the screen; fits in 80 columns."""
    notes = (Words(Text(note, style="dim"), hang=2) for note in scaling_notes(rows, unit))
    problems = map(Words, scaling_problems(rows, unit))
    return Group(on_screen(scaling_table(rows, unit), gap=1), *problems, *notes)


def _communication(row: Row) -> str:
    """The share of a step in which devices exchange gradients or weights."""
    whole, alone = row["speed_up"], row["speed_up_at_most"]
    return MISSING if whole is None or not alone else f"{max(0.0, 1 - whole / alone):.0%}"


def _speed_up(row: Row) -> str:
    """How much faster than the fewest; "<2.00x" if it is no more than that."""
    if row["speed_up"] is not None:
        return f"{row['speed_up']:.2f}x"
    bound = row["speed_up_at_most"]
    # predictions for several CPU processes are rough: no bound is above the number of processes
    return MISSING if bound is None else f"<{min(bound, row['world_size']):.2f}x"


def _speed_up_notes(rows: Sequence[Row], unit: str) -> list[str]:
    """What the speed-ups of planned rows assume; [] if they are unknown."""
    notes, several = [], [row for row in rows if row["exchanged_bytes"]]
    measured = [row for row in several if row.get("exchange_measured")]
    derived = [row for row in several if row not in measured and row.get("links")]
    unknown = [row for row in rows if row["speed_up"] is None and row["speed_up_at_most"]]
    for row in measured[-1:]:
        counts = ", ".join(str(one["world_size"]) for one in measured)
        notes.append(
            f"speed on {counts} {plural(unit)}: communication as measured here ({_sent(row, unit)}), "
            "added in full, as if none overlapped with computation"
        )
    for row in derived[-1:]:
        sent = f"{_sent(row, unit)} at {link_text(row['links'])}"
        notes.append(f"speed: {sent}, added in full, as if none overlapped with computation")
    if unknown:
        notes.append("speed: upper bound (<), without communication, because the link is unknown")
    return notes


def _sent(row: Row, unit: str) -> str:
    each = counted(row["world_size"], unit)
    return f"each of {each} sends {format_bytes(row['exchanged_bytes'])} per step (ring)"

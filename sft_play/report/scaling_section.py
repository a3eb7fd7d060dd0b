"""The scaling section of a report: the same run on other numbers of GPUs or processes, as planned."""

from sft_play.engines.registry import label_of
from sft_play.report.html import Block, Table, Text
from sft_play.report.plan import process_unit, scaling_problems, speed_up, speed_up_notes
from sft_play.report.record import RunRecord, Tree
from sft_play.report.tables import MISSING
from sft_play.units import format_bytes, plural


def scaling_blocks(run: RunRecord) -> list[Block]:
    """A row for each number of processes, and what the columns assume; [] if nothing was recorded."""
    rows = run.scaling
    planned = [row for row in rows if "problem" not in row]
    if not planned:
        return []
    unit = process_unit(run.chosen["device"])
    here = run.chosen["world_size"]
    cells = [_cells(row, here) for row in planned]
    head = (
        plural(unit),
        "micro-batch x accumulation",
        "effective batch",
        "steps per epoch",
        "learning rate",
        "engine",
        "memory",
        "speed-up",
    )
    caption = f"The same run on other numbers of {plural(unit)}, predicted"
    notes = [*scaling_problems(rows, unit), *speed_up_notes(planned, unit)]
    return [Table(caption, head, cells), *([Text(notes)] if notes else [])]


def _cells(row: Tree, here: int) -> tuple[str, ...]:
    world = row["world_size"]
    memory = row["process_bytes"] or row["peak_bytes"]
    return (
        f"{world} (this run)" if world == here else str(world),
        f"{row['micro_batch_size']:,} x {row['gradient_accumulation_steps']}",
        f"{row['effective_batch_size']:,}",
        f"{row['steps_per_epoch']:,}",
        f"{row['learning_rate']:g}",
        label_of(row["engine"]),
        format_bytes(memory) if memory else MISSING,
        speed_up(row),
    )

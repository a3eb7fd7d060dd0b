"""A plan for people: what was chosen, why, what it needs, and what else was possible."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sft_play.units import GIB, format_bytes

ENGINES = {"none": "one process", "ddp": "DDP", "deepspeed_z2": "ZeRO-2"}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def reasons(why: Sequence[str]) -> RenderableType:
    """One below the other; what does not fit into a line goes on below its own beginning."""
    grid = Table.grid(padding=(0, 1))
    for reason in why:
        grid.add_row("  -", Text(reason))
    return grid


def memory_tables(memory: Mapping[str, Any]) -> RenderableType:
    """Predicted bytes by phase, and what the highest phase consists of."""
    phases = _table("phase", "peak", "of the budget")
    for name, size in memory["phases"].items():
        style = "bold" if name == memory["peak_phase"] else ""
        phases.add_row(name, format_bytes(size), f"{size / memory['budget_bytes']:.0%}", style=style)
    terms = _table(f"in the {memory['peak_phase']} peak", "bytes")
    for name, size in sorted(memory["terms"].items(), key=lambda item: -item[1]):
        if size and name != "context":
            terms.add_row(name, format_bytes(size))
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(phases, terms)
    title = f"memory of one process, predicted; budget {format_bytes(memory['budget_bytes'])}, guard beside it"
    return Group(Text(f"{title} {format_bytes(memory.get('guard_bytes', 0))}"), side_by_side)


def alternatives_table(alternatives: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The best plan of each other kind."""
    table = _table("instead", "micro-batch", "peak", "fits", "speed")
    for row in alternatives:
        name = f"{ENGINES[row['engine']]}, {'checkpointing' if row['gradient_checkpointing'] else 'no checkpointing'}"
        speed = "n/a" if row["relative_speed"] is None else f"{row['relative_speed']:.0%}"
        table.add_row(
            name, f"{row['micro_batch_size']:,}", format_bytes(row["peak_bytes"]), "yes" if row["fits"] else "no", speed
        )
    return table


def scaling_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The same run on other numbers of GPUs; within 80 columns."""
    rules = [f"lr {rule}" if rule == "none" else rule for rule in ("none", "sqrt", "linear")]
    table = _table("GPUs", "micro", "accum", "batch", "steps/\nepoch", *rules, "peak\nGiB", "speed")
    table.pad_edge, table.padding = False, (0, 0)
    planned = [row for row in rows if "problem" not in row]
    for row in planned:
        table.add_row(
            str(row["world_size"]),
            f"{row['micro_batch_size']:,}",
            str(row["gradient_accumulation_steps"]),
            f"{row['effective_batch_size']:,}",
            f"{row['steps_per_epoch']:,}",
            *(f"{rate:.2e}" for rate in row["learning_rates"].values()),
            "n/a" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.2f}",
            _speed_up(row),
        )
    problems = [Text(f"{row['world_size']} GPUs: {row['problem']}") for row in rows if "problem" in row]
    return Group(table, *problems, *(Text(line, style="dim") for line in _scaling_notes(planned)))


def _speed_up(row: Mapping[str, Any]) -> str:
    if row["speed_up"] is not None:
        return f"{row['speed_up']:.2f}x"
    return "n/a" if row["speed_up_at_most"] is None else f"<{row['speed_up_at_most']:.2f}x"


def _scaling_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns assume, in short lines."""
    if not rows:
        return []
    last = rows[-1]
    in_use = f"by each rule of train.lr_scaling (in use: {last['lr_scaling']})"
    notes = [f"lr: at batch {last['reference_batch_size']:,} as given, {in_use}"]
    if last["exchanged_bytes"] and last["link_bytes_per_second"]:
        sent, link = format_bytes(last["exchanged_bytes"]), f"{last['link_bytes_per_second'] / 1e9:g} GB/s"
        notes += [
            f"speed: with {sent} that each of {last['world_size']} GPUs sends in a step (ring) at {link},",
            "       none of it hidden behind computing: a lower bound",
        ]
    elif last["speed_up_at_most"]:
        notes.append("speed: at most (<), without what is exchanged in a step: the link is not known")
    return notes


def plan_report(tree: Mapping[str, Any], scaling: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """The whole plan, from `Plan.to_json()`."""
    plan = tree["plan"]
    words = "tokens" if plan["packing"] else "sequences"
    chosen = Text.assemble(
        ("plan  ", "bold"),
        f"{plan['micro_batch_size']:,} x {plan['gradient_accumulation_steps']} x {plan['world_size']} = "
        f"{plan['effective_batch_size']:,} {words} a step, {plan['steps_per_epoch']:,} steps an epoch, "
        f"{plan['total_steps']:,} in all",
    )
    parts: list[RenderableType] = [chosen, reasons(tree["why"])]
    memory = memory_tables(tree["memory"]) if tree["memory"] else Text("memory: not predicted; the reasons above say why")
    parts.append(Padding(memory, (1, 0, 0, 0)))
    if tree["alternatives"]:
        parts.append(Padding(alternatives_table(tree["alternatives"]), (1, 0, 0, 0)))
    if scaling:
        parts.append(Padding(scaling_table(scaling), (1, 0, 0, 0)))
    return Group(*parts)

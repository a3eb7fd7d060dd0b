"""A plan for people: what was chosen, why, what it needs, and what else was possible."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sft_play.units import format_bytes

ENGINES = {"none": "one process", "ddp": "DDP", "deepspeed_z2": "ZeRO-2"}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


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
    """The same run on other numbers of GPUs."""
    table = _table("GPUs", "micro", "accum", "effective", "steps/epoch", "lr", "peak", "speed")
    table.caption = "speed: without the exchange of gradients, whose link is not known"
    for row in rows:
        if "problem" in row:
            table.add_row(str(row["world_size"]), row["problem"], *[""] * 6)
            continue
        table.add_row(
            str(row["world_size"]),
            f"{row['micro_batch_size']:,}",
            str(row["gradient_accumulation_steps"]),
            f"{row['effective_batch_size']:,}",
            f"{row['steps_per_epoch']:,}",
            f"{row['learning_rate']:.2e}",
            "n/a" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
            "n/a" if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
        )
    return table


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
    parts: list[RenderableType] = [chosen, *(Text(f"  - {reason}") for reason in tree["why"])]
    if tree["memory"]:
        parts.append(Padding(memory_tables(tree["memory"]), (1, 0, 0, 0)))
    if tree["alternatives"]:
        parts.append(Padding(alternatives_table(tree["alternatives"]), (1, 0, 0, 0)))
    if scaling:
        parts.append(Padding(scaling_table(scaling), (1, 0, 0, 0)))
    return Group(*parts)

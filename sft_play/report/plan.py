"""Console report of a plan: what was chosen and why, its memory, and the alternatives."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sft_play.units import GIB, format_bytes

MODES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
ENGINES = {"none": "one process", "ddp": "DDP", "deepspeed_z2": "ZeRO-2"}


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def reasons(why: Sequence[str]) -> RenderableType:
    """A bulleted list with a hanging indent."""
    grid = Table.grid(padding=(0, 1))
    for reason in why:
        grid.add_row("  -", Text(reason))
    return grid


def _process_table(memory: Mapping[str, Any]) -> RenderableType:
    """What tensors take, what the allocator reserves for them, and what the driver counts."""
    table = _table("one process on the GPU", "bytes", "of the budget", "")
    table.columns[3].justify = "left"
    context = format_bytes(memory["terms"]["context"])
    notes = {
        "allocated": "tensors",
        "reserved": "with fragmentation",
        "process": f"with {context} of context",
    }
    sizes = {"allocated": "peak_bytes", "reserved": "reserved_bytes", "process": "process_bytes"}
    for name, key in sizes.items():
        share = f"{memory[key] / memory['budget_bytes']:.0%}"
        style = "bold" if name == "process" else ""
        table.add_row(name, format_bytes(memory[key]), share, notes[name], style=style)
    return table


def memory_tables(memory: Mapping[str, Any]) -> RenderableType:
    """Predicted memory of the process, by phase, and the breakdown of the peak."""
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
    budget, guard = format_bytes(memory["budget_bytes"]), format_bytes(memory.get("guard_bytes", 0))
    title = Text(f"predicted memory per process (budget {budget}, guard {guard})")
    if memory.get("process_bytes") is None:
        return Group(title, side_by_side)
    return Group(title, _process_table(memory), Padding(side_by_side, (1, 0, 0, 0)))


def alternatives_table(alternatives: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Other plans: the best of the same engine and checkpointing, and the best of each other combination."""
    table = _table("alternative", "micro-batch", "memory", "fits", "speed")
    for row in alternatives:
        checkpointing = "checkpointing" if row["gradient_checkpointing"] else "no checkpointing"
        speed = "n/a" if row["relative_speed"] is None else f"{row['relative_speed']:.0%}"
        table.add_row(
            f"{ENGINES[row['engine']]}, {checkpointing}",
            f"{row['micro_batch_size']:,}",
            format_bytes(row["process_bytes"]),
            "yes" if row["fits"] else "no",
            speed,
        )
    return table


def scaling_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The same run on other numbers of GPUs; fits in 80 columns."""
    rules = [f"lr {rule}" if rule == "none" else rule for rule in ("none", "sqrt", "linear")]
    table = _table("GPUs", "micro", "accum", "batch", "steps/\nepoch", *rules, "memory\nGiB", "speed")
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
            "n/a" if row["process_bytes"] is None else f"{row['process_bytes'] / GIB:.2f}",
            _speed_up(row),
        )
    problems = [Text(f"{row['world_size']} GPUs: {row['problem']}") for row in rows if "problem" in row]
    return Group(table, *problems, *(Text(line, style="dim") for line in _scaling_notes(planned)))


def _speed_up(row: Mapping[str, Any]) -> str:
    if row["speed_up"] is not None:
        return f"{row['speed_up']:.2f}x"
    return "n/a" if row["speed_up_at_most"] is None else f"<{row['speed_up_at_most']:.2f}x"


def _scaling_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The assumptions behind the columns, in short lines."""
    if not rows:
        return []
    last = rows[-1]
    in_use = f"for each train.lr_scaling (in use: {last['lr_scaling']})"
    notes = [f"lr: relative to batch {last['reference_batch_size']:,}, {in_use}"]
    if last["exchanged_bytes"] and last["link_bytes_per_second"]:
        sent, link = format_bytes(last["exchanged_bytes"]), f"{last['link_bytes_per_second'] / 1e9:g} GB/s"
        notes += [
            f"speed: lower bound; each of {last['world_size']} GPUs sends {sent} per step (ring) at {link},",
            "       not overlapped with computation",
        ]
    elif last["speed_up_at_most"]:
        notes.append("speed: upper bound (<), without communication, because the link is unknown")
    return notes


def plan_report(tree: Mapping[str, Any], scaling: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """The whole plan, from `Plan.to_json()`."""
    plan = tree["plan"]
    unit = "tokens" if plan["packing"] else "sequences"
    chosen = Text.assemble(
        ("plan  ", "bold"),
        f"{plan['micro_batch_size']:,} x {plan['gradient_accumulation_steps']} x {plan['world_size']} = "
        f"{plan['effective_batch_size']:,} {unit} per step, {plan['steps_per_epoch']:,} steps per epoch, "
        f"{plan['total_steps']:,} steps in total",
    )
    parts: list[RenderableType] = [chosen, reasons(tree["why"])]
    memory: RenderableType = Text("memory: not predicted, for the reason above")
    if tree["memory"]:
        memory = memory_tables(tree["memory"])
    parts.append(Padding(memory, (1, 0, 0, 0)))
    if tree["alternatives"]:
        parts.append(Padding(alternatives_table(tree["alternatives"]), (1, 0, 0, 0)))
    if scaling:
        parts.append(Padding(scaling_table(scaling), (1, 0, 0, 0)))
    return Group(*parts)


def cards_report(tree: Mapping[str, Any]) -> RenderableType:
    """What a model would be like on common GPUs, from `plans_by_card`; fits in 80 columns."""
    modes = list(tree["cards"][0]["plans"])
    heads = [f"{MODES[mode]}\n{what}" for mode in modes for what in ("tokens/s", "GiB")]
    table = _table("GPU", "GiB", *heads)
    for row in tree["cards"]:
        cells = [cell for plan in row["plans"].values() for cell in _card_cells(plan)]
        table.add_row(row["gpu"], f"{row['total_bytes'] / GIB:.0f}", *cells)
    each = "a GPU" if tree["gpus"] == 1 else f"{tree['gpus']} GPUs"
    title = Text(f"{tree['model']} on {each}, rows of {tree['row_tokens']:,} tokens", style="bold")
    notes = [
        "-: does not fit. Predicted from data sheets; GiB: peak of a process. In detail:",
        f'make plan MODEL={tree["model"]} GPU="RTX 4090"',
        *tree["why"],
    ]
    return Group(title, table, *(Text(note, style="dim") for note in notes))


def _card_cells(plan: Mapping[str, Any]) -> tuple[str, str]:
    if "problem" in plan:
        return "-", "-"
    speed, peak = plan["tokens_per_second"], plan["peak_bytes"]
    return "n/a" if speed is None else f"{speed:,.0f}", "n/a" if peak is None else f"{peak / GIB:.1f}"

"""The memory of a process: predicted, measured by a probe, by phase, and what takes it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from sft_play.report.table import Table, on_screen
from sft_play.report.tables import MISSING, formatted, memory_line, said_of
from sft_play.units import counted, format_bytes, format_duration

Tree = Mapping[str, Any]
OF_NO_PHASE = ("reserved", "process")  # what the allocator reserved, and what the driver counts


def phase_table(memory: Tree, measured: Mapping[str, int] | None = None) -> Table:
    """The peak of each phase, the highest one bold: predicted, and as measured if it was."""
    sizes, budget = memory.get("phases") or {}, memory.get("budget_bytes")
    rows = []
    for name in dict.fromkeys([*sizes, *(measured or ())]):
        size, found = sizes.get(name), (measured or {}).get(name)
        difference = f"{100 * (found - size) / size:+z.2f}%" if found is not None and size else MISSING
        compared = (formatted(found, format_bytes), difference) if measured else ()
        share = formatted(size and budget and size / budget, "{:.1%}".format)
        rows.append((name, formatted(size, format_bytes), *compared, share))
    peaks = {name: size for name, size in (measured or sizes).items() if name not in OF_NO_PHASE}
    top = max(peaks, key=peaks.__getitem__, default="")
    compared = ("measured", "difference") if measured else ()
    return Table(
        ("phase", said_of(memory.get("origin")), *compared, "of the budget"),
        rows,
        "Peak of each phase; the highest one counts",
        bold=[number for number, row in enumerate(rows) if row[0] == top],
    )


def _peak_table(memory: Tree) -> Table:
    """What takes the highest peak."""
    terms = sorted(memory["terms"].items(), key=lambda item: -item[1])
    rows = [(name, format_bytes(size)) for name, size in terms if size and name != "context"]
    return Table((f"in the {memory['peak_phase']} peak", "memory"), rows)


def _process_table(memory: Tree) -> Table:
    """What tensors take, what the allocator reserves for them, and what the driver counts."""
    context = format_bytes(memory["terms"]["context"])
    sizes = [
        ("allocated", memory["peak_bytes"], "tensors"),
        ("reserved", memory["reserved_bytes"], "with fragmentation"),
        ("process", memory["process_bytes"], f"with {context} of context"),
    ]
    if most := memory.get("at_most_bytes"):
        sizes.append(("at most", most, "if not compiled"))
    rows = [
        (name, format_bytes(size), f"{size / memory['budget_bytes']:.0%}", note) for name, size, note in sizes
    ]
    return Table(("one process on the GPU", "memory", "of the budget", ""), rows, left=(0, 3), bold=(2,))


def _host_table(host: Tree) -> Table:
    """The RAM of a machine whose processes offload to it."""
    each, budget = counted(host["processes"], "process"), host["budget_bytes"]
    terms = sorted(host["terms"].items(), key=lambda item: -item[1])
    share = "unknown" if not budget else f"{host['needed_bytes'] / budget:.0%} of {format_bytes(budget)}"
    rows = [
        *((f"{name}, of each", format_bytes(size), "") for name, size in terms),
        ("assumed for the process itself, of each", format_bytes(host["own_bytes"]), ""),
        ("to save the trained weights", format_bytes(host["saved_bytes"]), ""),
        ("needed", format_bytes(host["needed_bytes"]), share),
    ]
    head = (f"RAM of the machine, {each}", "memory", "of what is available")
    return Table(head, rows, bold=(len(rows) - 1,))


def memory_tables(memory: Tree) -> RenderableType:
    """On the screen: predicted memory of the process, by phase, and the breakdown of the peak."""
    side_by_side = Grid.grid(padding=(0, 4))
    side_by_side.add_row(on_screen(phase_table(memory)), on_screen(_peak_table(memory)))
    budget, guard = format_bytes(memory["budget_bytes"]), format_bytes(memory.get("guard_bytes", 0))
    title = Text(f"memory of a process, {said_of(memory.get('origin'))} (budget {budget}, guard {guard})")
    if memory.get("process_bytes") is None:
        return Group(title, side_by_side)
    in_ram = [on_screen(_host_table(memory["host"]))] if memory.get("host") else []
    return Group(title, on_screen(_process_table(memory)), side_by_side, *in_ram)


def probe_line(plan: Tree, result: Tree, done: int = 0) -> str:
    """Memory peak and time of a step in one line, from `Plan.to_json()` and the fields of a `ProbeResult`.

    `done` steps of the run are in the checkpoint that it is resumed from.
    """
    if not result["phases"]:
        return f"probe: {'out of memory' if result['ran_out'] else 'succeeded; memory could not be measured'}"
    memory, measured = plan["memory"] or {}, max(result["phases"].values())
    expected = max(result["expected"].values(), default=None)
    line = memory_line(expected or memory.get("peak_bytes"), measured, memory.get("origin"))
    line = f"probe at the largest batch: {line}"
    step, left = result["step_seconds"], plan["plan"]["total_steps"] - done
    if not step:
        return line
    which = f"the {counted(left, 'step')} that are left" if done else f"all of {counted(left, 'step')}"
    return f"{line}; about {format_duration(step)} per step, {format_duration(step * left)} for {which}"


def probe_report(plan: Tree, result: Tree) -> RenderableType:
    """Measured against predicted memory by phase, for a plan that fits; arguments as in `probe_line`."""
    memory = plan["memory"] or {}
    predicted = (result["expected"] or memory.get("phases", {})) | {
        name: memory[f"{name}_bytes"] for name in OF_NO_PHASE if memory.get(f"{name}_bytes")
    }
    measured = dict(result["phases"])
    if result["reserved_bytes"] is not None:
        measured["reserved"] = result["reserved_bytes"]
        if result["overhead_bytes"] is not None:
            measured["process"] = result["reserved_bytes"] + result["overhead_bytes"]
    table = phase_table({**memory, "phases": predicted}, measured)
    budget = memory.get("budget_bytes")
    verdict = f"fits the budget of {format_bytes(budget)}" if budget else "fits"
    lines: list[RenderableType] = [on_screen(table), ""] if result["phases"] else []
    return Group(*lines, Text(verdict, style="bold green"))

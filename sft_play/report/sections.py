"""Two sections of a report: the memory of a process, and the same run on other numbers of GPUs."""

from sft_play.engines.registry import label_of
from sft_play.report.html import Block, Figure, Figures, Legend, Table, Text
from sft_play.report.plan import process_unit, scaling_problems, speed_up, speed_up_notes
from sft_play.report.plots import BUDGET_SHOWN_FROM, PhaseMemory, memory_bars
from sft_play.report.record import RunRecord, Tree
from sft_play.report.tables import MISSING, memory_line, said_of
from sft_play.units import format_bytes, plural

TERMS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "loss", "temporaries", "engine",
)  # fmt: skip


def memory_blocks(run: RunRecord) -> list[Block]:
    """Bars by phase, the same as a table, and the terms of the peak; [] if nothing was predicted."""
    memory = run.plan.get("memory")
    if not memory:
        return []
    measured = (run.summary.get("probe") or {}).get("phases") or {}
    blocks: list[Block] = [_figure(memory, measured), _phase_table(memory, measured)]
    blocks += [table] if (table := _term_table(memory)) else []
    process = _process_lines(run.summary)
    if not measured:
        process.append("Nothing was measured by phase: the run had no probe, or did not finish.")
    return [*blocks, Text(process)] if process else blocks


def _figure(memory: Tree, measured: dict[str, int]) -> Figures:
    phases = [
        PhaseMemory(name, _stack(memory, name, size), measured.get(name))
        for name, size in memory["phases"].items()
    ]
    colours = {colour for phase in phases for colour, _ in phase.terms}
    names = TERMS if memory.get("phase_terms") else ("predicted",)
    legend = [Legend(name, colour) for colour, name in enumerate(names) if colour in colours]
    legend += [Legend("measured by the probe")] if measured else []
    budget, peak = memory["budget_bytes"], memory["peak_bytes"]
    text = f"The budget of a process is {format_bytes(budget)}"
    if peak < BUDGET_SHOWN_FROM * budget:
        caption = f"{text}: beyond the right edge, {budget / peak:,.0f} times the predicted peak."
    else:
        caption = f"{text}."
        legend.append(Legend("budget", level=True))
    svg = memory_bars("Memory by phase, predicted and measured", phases, budget)
    return Figures([Figure("Peak memory of each phase, by what takes it", svg, caption, legend)])


def _stack(memory: Tree, phase: str, size: int) -> list[tuple[int, int]]:
    """The terms of a phase as (colour, bytes); one piece if only its sum is known.

    A correction by an earlier probe is in the temporaries, which can make them negative: then it is taken off
    the largest term.
    """
    if not memory.get("phase_terms"):
        return [(0, size)]
    terms = dict(memory["phase_terms"][phase])
    below = terms.get("temporaries", 0)
    if below < 0:
        terms["temporaries"] = 0
        largest = max(terms, key=lambda name: terms[name])
        terms[largest] += below
    return [(TERMS.index(name), terms[name]) for name in TERMS if terms.get(name, 0) > 0]


def _phase_table(memory: Tree, measured: dict[str, int]) -> Table:
    rows = []
    for name, size in memory["phases"].items():
        found = measured.get(name)
        difference = f"{100 * (found - size) / size:+z.1f}%" if found is not None and size else MISSING
        actual = MISSING if found is None else format_bytes(found)
        rows.append((name, format_bytes(size), actual, difference, f"{size / memory['budget_bytes']:.1%}"))
    head = ("phase", said_of(memory.get("origin")), "measured", "difference", "of the budget")
    return Table("Peak of each phase; the highest one counts", head, rows)


def _term_table(memory: Tree) -> Table | None:
    """The terms of each phase, folded; None if they were not recorded."""
    by_phase = memory.get("phase_terms") or {}
    if not by_phase:
        return None
    rows = []
    for term in TERMS:
        sizes = [terms.get(term, 0) for terms in by_phase.values()]
        if any(sizes):
            rows.append((term, *map(format_bytes, sizes)))
    return Table("What takes the memory of each phase, predicted", ("term", *by_phase), rows, folded=True)


def _process_lines(summary: Tree) -> list[str]:
    """Peak, reserved bytes and bytes of the process, predicted and measured, as far as they are known."""
    names = {"peak": "tensors", "reserved": "reserved by the allocator", "process": "whole process"}
    lines = []
    for name, label in names.items():
        predicted, measured = (summary.get(f"{kind}_{name}_bytes") for kind in ("predicted", "measured"))
        if predicted or measured:
            line = memory_line(predicted, measured, summary.get("predicted_memory_origin"))
            lines.append(f"{label}: {line}")
    return lines


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

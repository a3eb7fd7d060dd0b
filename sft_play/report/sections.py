"""Two sections of a report: the memory of a process, and the same run on other numbers of GPUs."""

import shlex
from collections.abc import Iterator

from sft_play.report.closing import memory_facts
from sft_play.report.html import Block, Figure, Figures, Legend, Text
from sft_play.report.memory import phase_table
from sft_play.report.plots import BUDGET_SHOWN_FROM, PhaseMemory, memory_bars
from sft_play.report.record import RunRecord, Tree
from sft_play.report.scaling import planned_rows, process_unit, scaling_notes, scaling_problems, scaling_table
from sft_play.report.table import Table
from sft_play.report.tables import said_of
from sft_play.spelling import make
from sft_play.timeline import TERMS
from sft_play.units import format_bytes, plural


def memory_blocks(run: RunRecord) -> Iterator[Block]:
    """Bars by phase, the same as a table, and the terms of the peak; nothing if nothing was predicted."""
    memory = run.plan.get("memory")
    if not memory:
        return
    measured = (run.summary.get("probe") or {}).get("phases") or {}
    yield _figure(memory, measured)
    yield phase_table(memory, measured)
    if memory.get("phase_terms"):
        yield _term_table(memory["phase_terms"], said_of(memory.get("origin")))
    facts = memory_facts(run.summary, "tensors", "reserved by the allocator", "whole process")
    lines = [f"{label}: {line}" for label, line in facts]
    if not measured and run.settings:  # of a run, not of a plan alone
        why = (run.activity and " yet") or ": the run had no probe, or did not finish"
        lines.append(f"Nothing was measured by phase{why}.")
    if lines:
        yield Text(lines)


def _figure(memory: Tree, measured: dict[str, int]) -> Figures:
    phases = [
        PhaseMemory(name, _stack(memory, name, size), measured.get(name))
        for name, size in memory["phases"].items()
    ]
    colours = {colour for phase in phases for _, colour, _ in phase.terms}
    said = said_of(memory.get("origin"))
    names = TERMS if memory.get("phase_terms") else (said,)
    legend = [Legend(name, colour) for colour, name in enumerate(names) if colour in colours]
    legend += [Legend("measured by the probe")] if measured else []
    budget, peak = memory["budget_bytes"], memory["peak_bytes"]
    text = f"The budget of a process is {format_bytes(budget)}"
    if peak < BUDGET_SHOWN_FROM * budget:
        caption = f"{text}: beyond the right edge, {budget / peak:,.0f} times the peak ({said})."
    else:
        caption = f"{text}."
        if memory.get("process_bytes"):
            needed, context = (
                format_bytes(size) for size in (memory["process_bytes"], memory["terms"]["context"])
            )
            besides = f"{context} of context, and allocator overhead"
            caption += f" It needs {needed}: these tensors, {besides}."
        legend.append(Legend("budget", level=True))
    svg = memory_bars(f"Memory by phase, {said}{' and measured' if measured else ''}", phases, budget)
    return Figures([Figure("Peak memory of each phase, by use", svg, caption, legend)])


def _stack(memory: Tree, phase: str, size: int) -> list[tuple[str, int, int]]:
    """The terms of a phase as (name, colour, bytes); one piece if only its sum is known.

    A correction by an earlier probe is in the temporaries, which can make them negative: then it is taken off
    the largest term.
    """
    if not memory.get("phase_terms"):
        return [(phase, 0, size)]
    terms = dict(memory["phase_terms"][phase])
    below = terms.get("temporaries", 0)
    if below < 0:
        terms["temporaries"] = 0
        largest = max(terms, key=lambda name: terms[name])
        terms[largest] += below
    return [(name, TERMS.index(name), terms[name]) for name in TERMS if terms.get(name, 0) > 0]


def _term_table(by_phase: Tree, said: str) -> Table:
    """The terms of each phase, folded."""
    rows = []
    for term in TERMS:
        sizes = [terms.get(term, 0) for terms in by_phase.values()]
        if any(sizes):
            rows.append((term, *map(format_bytes, sizes)))
    return Table(("term", *by_phase), rows, f"Memory of each phase by use, {said}", folded=True)


def scaling_blocks(run: RunRecord) -> Iterator[Block]:
    """A row for each number of processes, and what the columns assume; nothing if nothing was recorded.

    Of a run that is done and not planned for others yet: what does that.
    """
    if not run.scaling and run.summary.get("status") == "done" and not run.activity:
        asked, unit = make("report", RUN=shlex.quote(run.name)), process_unit(run.chosen["device"])
        yield Text([f"`{asked}` plans the same run on other numbers of {plural(unit)}."])
    if not planned_rows(run.scaling):
        return
    unit = process_unit(run.chosen["device"])
    yield scaling_table(run.scaling, unit, here=run.chosen["world_size"])
    yield Text([*scaling_problems(run.scaling, unit), *scaling_notes(run.scaling, unit)])

"""Console report of a probe: measured against predicted memory."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.report.layout import columns
from sft_play.report.tables import MISSING, formatted, memory_line, said_of
from sft_play.units import counted, format_bytes, format_duration


def probe_line(plan: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Memory peak and time of a step in one line, from `Plan.to_json()` and the fields of a `ProbeResult`."""
    if not result["phases"]:
        return f"probe: {'out of memory' if result['ran_out'] else 'succeeded; memory could not be measured'}"
    memory, measured = plan["memory"] or {}, max(result["phases"].values())
    expected = max(result["expected"].values(), default=None)
    line = memory_line(expected or memory.get("peak_bytes"), measured, memory.get("origin"))
    line = f"probe at the largest batch: {line}"
    step, steps = result["step_seconds"], plan["plan"]["total_steps"]
    if not step:
        return line
    total = format_duration(step * steps)
    return f"{line}; about {format_duration(step)} per step, {total} for all of {counted(steps, 'step')}"


def probe_report(plan: Mapping[str, Any], result: Mapping[str, Any]) -> RenderableType:
    """Measured against predicted memory by phase, for a plan that fits; arguments as in `probe_line`."""
    memory = plan["memory"] or {}
    predicted = (result["expected"] or memory.get("phases", {})) | {
        name: memory[f"{name}_bytes"] for name in ("reserved", "process") if memory.get(f"{name}_bytes")
    }
    table = columns("phase", said_of(memory.get("origin")), "measured", "difference")
    top = max(result["phases"], key=lambda phase: result["phases"][phase], default="")
    found = dict(result["phases"])
    if result["reserved_bytes"] is not None:  # what a GPU's allocator reserved, and what the driver counts
        found["reserved"] = result["reserved_bytes"]
        if result["overhead_bytes"] is not None:
            found["process"] = result["reserved_bytes"] + result["overhead_bytes"]
    for phase, measured in found.items():
        expected = predicted.get(phase)
        difference = f"{100 * (measured - expected) / expected:+z.2f}%" if expected else MISSING
        sizes = (formatted(expected, format_bytes), format_bytes(measured))
        table.add_row(phase, *sizes, difference, style="bold" if phase == top else "")
    budget = memory.get("budget_bytes")
    verdict = f"fits the budget of {format_bytes(budget)}" if budget else "fits"
    lines: list[RenderableType] = [table, ""] if result["phases"] else []
    return Group(*lines, Text(verdict, style="bold green"))

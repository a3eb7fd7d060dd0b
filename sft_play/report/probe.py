"""What a probe measured beside what was predicted, for people."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sft_play.report.tables import MISSING, memory_line
from sft_play.units import format_bytes, format_duration


def proof_line(plan: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    """The peak and the time of a step.

    Args:
        plan: from `Plan.to_json()`.
        proof: the fields of a `Proof`.
    """
    if not proof["phases"]:
        return "probe: memory ran out" if proof["ran_out"] else "probe: the steps ran; their memory could not be measured"
    predicted = (plan["memory"] or {}).get("peak_bytes")
    line = f"probe at the largest batch: {memory_line(predicted, max(proof['phases'].values()), proof['batch_share'])}"
    return f"{line}; {_time(plan, proof)}" if proof["step_seconds"] else line


def _time(plan: Mapping[str, Any], proof: Mapping[str, Any]) -> str:
    step, steps = proof["step_seconds"], plan["plan"]["total_steps"]
    return f"a step takes at most {format_duration(step)}, {steps:,} of them {format_duration(step * steps)}"


def probe_report(plan: Mapping[str, Any], proof: Mapping[str, Any]) -> RenderableType:
    """Measured against predicted, phase by phase, of a plan that was found to fit; arguments as for `proof_line`."""
    predicted = (plan["memory"] or {}).get("phases", {})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(("phase", "predicted", "measured", "difference")):
        table.add_column(name, justify="right" if index else "left")
    top = max(proof["phases"], key=lambda phase: proof["phases"][phase], default="")
    for phase, measured in proof["phases"].items():
        expected = predicted.get(phase)
        table.add_row(
            phase,
            MISSING if expected is None else format_bytes(expected),
            format_bytes(measured),
            MISSING if expected is None else f"{100 * (measured - expected) / expected:+.2f} %",
            style="bold" if phase == top else "",
        )
    lines: list[RenderableType] = [table, ""] if proof["phases"] else []
    lines.append(Text(proof_line(plan, proof)))
    if proof["reserved_bytes"]:
        lines.append(Text(f"reserved from the device: {format_bytes(proof['reserved_bytes'])}"))
    budget = (plan["memory"] or {}).get("budget_bytes")
    lines.append(Text(f"fits{f' the budget of {format_bytes(budget)}' if budget else ''}", style="bold green"))
    return Group(*lines)

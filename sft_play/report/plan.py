"""Console report of a plan: what was chosen and why, its memory, and the alternatives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.choices.engines import WHOLE
from sft_play.engines.registry import engine_of, label_of
from sft_play.parts import Activations
from sft_play.report.layout import apart, bullets
from sft_play.report.memory import memory_tables
from sft_play.report.scaling import process_unit, scaling_report
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import MISSING, by_duration, by_speed, formatted, said_of
from sft_play.report.ways import hours_text, methods_on_screen
from sft_play.spelling import var
from sft_play.ui.screen import NamedValues, Words
from sft_play.units import counted, format_bytes, format_duration, plural

SHOWN = 6  # micro-batches of the chosen kind


def candidates(tree: Mapping[str, Any], most: int | None = None) -> list[Mapping[str, Any]]:
    """The chosen plan of `Plan.to_json()` and the others, by kind and size.

    With `most`, of the chosen kind only so many, those that are closest to it in size.
    """
    plan, memory = tree["plan"], tree["memory"]
    chosen = {
        **plan,
        "process_bytes": _needed(memory),
        "fits": True,
        "relative_speed": 1.0 if plan.get("step_seconds") else None,
        "chosen": True,
    }
    rows = [chosen, *sorted(tree["alternatives"], key=_kind)]
    alike = [row for row in rows if _kind(row) == _kind(chosen)]
    alike.sort(key=lambda row: row["micro_batch_size"])
    most = most or len(alike)
    first = max(0, min(alike.index(chosen) - most // 2, len(alike) - most))
    return [*alike[first : first + most], *(row for row in rows if _kind(row) != _kind(chosen))]


def candidates_table(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Table:
    """What else was possible: predicted speed and peak of the chosen plan and others (`candidates`)."""
    chosen = [number for number, row in enumerate(rows) if "chosen" in row]
    unit = "tokens/s" if plan.get("tokens_per_second") else "speed"
    return Table(
        ("micro-batch x accumulation", "activations", unit, "peak"),
        [
            (
                f"{row['micro_batch_size']:,} x {row['gradient_accumulation_steps']}",
                _activations(row, plan),
                _speed_text(row, plan),
                formatted(_needed(row) or None, format_bytes),
            )
            for row in rows
        ],
        "Alternatives",
        left=(0, 1),
        bold=chosen,
        short={"micro-batch x accumulation": "micro-batch"},
    )


def notes_on_candidates(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    """What the speeds of a table of candidates assume, and why those that look faster were not chosen."""
    return [*_how_compared(plan), *_faster_ones(rows, plan)]


def _how_compared(plan: Mapping[str, Any]) -> list[str]:
    """What the one speed of each plan assumes, where it may have others."""
    if not plan.get("step_seconds_range_reason"):
        return []
    beyond = plan["step_seconds_range"][1] > plan["step_seconds"]
    besides = ", but not what divided weights may add at worst" if beyond else ""
    said = "tokens/s in this table assume the slowest links and no overlap, as when plans are compared"
    return [said + besides]


def _candidates_on_screen(tree: Mapping[str, Any]) -> RenderableType:
    """The candidates, with bars of their speed and peak."""
    rows = candidates(tree, SHOWN)
    bars = {2: _shares(map(_speed, rows)), 3: _shares(map(_needed, rows))}
    table = on_screen(candidates_table(rows, tree["plan"]), gap=2, bars=bars, mark="> ")
    notes = notes_on_candidates(rows, tree["plan"])
    return Group(table, *(Words(Text(note, style="dim")) for note in notes))


def _faster_ones(rows: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    """Why the rows of a table of candidates were not chosen that look faster than the plan, and fit."""
    chosen, found = engine_of(plan["engine"]), dict[str, None]()
    for row in rows:
        if _speed(row) <= 1 or _speed_text(row, plan) == _speed_text({**row, "relative_speed": 1.0}, plan):
            continue
        other, name, ours = engine_of(row["engine"]), engine_label(row), engine_label(plan)
        if other.shards_weights and not chosen.shards_weights:
            why = f"{name} may take longer than predicted, by more than it would gain over {ours}"
        elif other is not chosen and other.trades_speed and not other.shards_weights:
            why = f"{name} costs time that predictions leave out: {WHOLE.label} is preferred where it fits"
        else:
            size = f"{row['micro_batch_size']:,} x {row['gradient_accumulation_steps']}"
            why = f"{size} is faster by less than predictions can resolve; the chosen plan has fewer passes"
        found[why] = None
    return list(found)


def _shares(values: Iterable[float]) -> list[float]:
    """Each relative to the largest one."""
    found = list(values)
    largest = max(found) or 1
    return [value / largest for value in found]


def _speed(row: Mapping[str, Any]) -> float:
    """Relative to the chosen plan; 0 if it is unknown or the plan does not fit."""
    return (row["relative_speed"] or 0.0) if row["fits"] else 0.0


def _needed(row: Mapping[str, Any]) -> int:
    """The bytes of a process; of tensors alone, where no more is known."""
    return row.get("process_bytes") or row["peak_bytes"]


def _kind(row: Mapping[str, Any]) -> tuple[bool, str, str]:
    return row["gradient_checkpointing"], way_of(row), engine_label(row)


def way_of(row: Mapping[str, Any]) -> str:
    """What becomes of activations, in a word or two."""
    return Activations.of_json(row).way


def engine_label(row: Mapping[str, Any]) -> str:
    """How the processes of a plan share its work."""
    return label_of(row["engine"], row.get("replicas", 1), row.get("offload", "none"))


def _activations(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """What becomes of activations, and the engine if there are several processes."""
    several = plan["world_size"] > 1 or plan.get("offload", "none") != "none"
    engine = f"{engine_label(row)}, " if several else ""
    return engine + way_of(row)


def _speed_text(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Tokens per second; where nobody has counted the tokens, relative to the chosen plan."""
    speed, relative = plan.get("tokens_per_second"), row["relative_speed"]
    if not row["fits"]:
        return "ran out before" if row.get("ran_out") else "does not fit"
    if relative is None:
        return MISSING
    return f"{speed * relative:,.0f}" if speed else f"{relative:.0%}"


def plan_summary(tree: Mapping[str, Any]) -> RenderableType:
    """What was chosen, and why, from `Plan.to_json()`."""
    plan, why = tree["plan"], tree["why"]
    return Group(Words(Text(why[0], style="bold")), Words(_steps(plan)), *_time(plan), bullets(why[1:]))


def _steps(plan: Mapping[str, Any]) -> str:
    return f"{counted(plan['steps_per_epoch'], 'step')} per epoch, {plan['total_steps']:,} in total"


def _time(plan: Mapping[str, Any]) -> list[Words]:
    seconds, speed = plan.get("step_seconds"), plan.get("tokens_per_second")
    if not seconds:
        return []
    step = by_duration(plan, seconds, format_duration)
    total = by_duration(plan, seconds * plan["total_steps"], format_duration)
    tokens = f", {by_speed(plan, speed, '{:,.0f}'.format)} tokens/s" if speed else ""
    between = f": {reason}" if (reason := plan.get("step_seconds_range_reason")) else ""
    said = said_of(plan.get("step_seconds_origin"))
    return [Words(f"{said}: {step} a step, {total} in total{tokens}{between}")]


def plan_answer(tree: Mapping[str, Any], title: str, notes: Sequence[str] = ()) -> RenderableType:
    """What a person asks first, and what else was possible; arguments as in `plan_lines`."""
    return apart(plan_lines(tree, title, notes), *plan_others(tree))


def plan_lines(tree: Mapping[str, Any], title: str, notes: Sequence[str] = ()) -> RenderableType:
    """What a person asks first of a plan with its memory: whether it fits, the batch, memory and time.

    The title says what fits where, and the notes what is assumed.
    """
    plan, memory = tree["plan"], tree["memory"]
    lines = [("batch", tree["why"][0].removeprefix("effective batch "))]
    needed = _needed(memory)
    share, budget = needed / memory["budget_bytes"], format_bytes(memory["budget_bytes"])
    said = f"{format_bytes(needed)} a process, predicted: {share:.0%} of the budget of {budget}"
    lines.append(("memory", said))
    if host := memory.get("host"):
        lines.append(("RAM", f"{format_bytes(host['needed_bytes'])} of the machine, predicted"))
    time = [words.text.plain for words in _time(plan)]
    if not time and plan["device"] == "cuda":
        time = ["n/a: no data sheet of this GPU is in the catalogue"]
    lines += [("time", said) for said in time]
    if hours := plan.get("gpu_hours"):
        price = plan.get("cost")
        cost = "" if price is None else f", which cost {by_duration(plan, price, '{:,.2f}'.format)}"
        lines.append(("GPU hours", hours_text(plan, hours) + cost))
    lines.append(("steps", _steps(plan)))
    return Group(Words(Text(title, style="bold")), NamedValues(lines), bullets(notes))


def plan_others(tree: Mapping[str, Any]) -> list[RenderableType]:
    """What else was possible: the other methods, if they were planned, and other micro-batches."""
    plan, parts = tree["plan"], list[RenderableType]()
    if len(tree.get("methods") or []) > 1:
        parts.append(methods_on_screen(tree))
    if tree["alternatives"]:
        parts.append(_candidates_on_screen(tree))
    more = f"{var(WHY=1)} adds the reason for each choice, memory by phase, and other numbers of "
    return [*parts, Words(Text(more + plural(process_unit(plan["device"])), style="dim"))]


def plan_report(tree: Mapping[str, Any], scaling: Sequence[Mapping[str, Any]] = ()) -> RenderableType:
    """The whole plan, from `Plan.to_json()`, whose "plan" may also have "tokens_per_second"."""
    plan, memory = tree["plan"], tree["memory"]
    parts: list[RenderableType] = [plan_summary(tree)]
    if memory is None:
        parts.append(Text("memory: not predicted, for the reason above"))
    else:
        if tree["alternatives"]:
            parts.append(_candidates_on_screen(tree))
        parts.append(memory_tables(memory))
    if scaling:
        parts.append(scaling_report(scaling, process_unit(plan["device"])))
    return apart(*parts)

"""Console report of a plan: what was chosen and why, its memory, and the alternatives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.config.methods import METHODS
from sft_play.engines.registry import ENGINES, engine_of, label_of
from sft_play.parts import Activations
from sft_play.reasons.choices import group_of
from sft_play.report.layout import apart, bullets
from sft_play.report.memory import memory_tables
from sft_play.report.scaling import process_unit, scaling_report
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import MISSING, by_duration, by_speed, formatted, said_of
from sft_play.spelling import as_typed
from sft_play.ui.screen import NamedValues, Words
from sft_play.units import GIB, counted, format_bytes, format_count, format_duration, plural

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
    return Table(
        ("micro-batch x accumulation", "activations", _unit_of_speed(plan), "peak"),
        [
            (
                f"{row['micro_batch_size']:,} x {row['gradient_accumulation_steps']}",
                _activations(row, plan),
                _speed_text(row, plan),
                formatted(_needed(row) or None, format_bytes),
            )
            for row in rows
        ],
        "What else was possible",
        left=(0, 1),
        bold=[number for number, row in enumerate(rows) if "chosen" in row],
        short={"micro-batch x accumulation": "micro-batch"},
    )


def how_compared(plan: Mapping[str, Any]) -> list[str]:
    """What the one speed of each plan assumes, where it may have others."""
    said = "tokens/s of this table: over the slowest links, nothing overlapped, as plans are compared"
    return [said] if plan.get("step_seconds_range_reason") else []


def _candidates_on_screen(tree: Mapping[str, Any]) -> RenderableType:
    """The candidates, with bars of their speed and peak."""
    rows = candidates(tree, SHOWN)
    bars = {2: _shares(map(_speed, rows)), 3: _shares(map(_needed, rows))}
    table = on_screen(candidates_table(rows, tree["plan"]), gap=2, bars=bars, mark="> ")
    return Group(table, *(Words(Text(said, style="dim")) for said in how_compared(tree["plan"])))


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


def _unit_of_speed(plan: Mapping[str, Any]) -> str:
    return "tokens/s" if plan.get("tokens_per_second") else "speed"


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


def _hours(plan: Mapping[str, Any], hours: float | None) -> str:
    return by_duration(plan, hours, lambda spent: f"{spent:,.{int(spent < 100)}f}")


def plan_answer(tree: Mapping[str, Any], title: str, notes: Sequence[str] = ()) -> RenderableType:
    """What a person asks first: whether it fits, the batch, memory and time; and what else was possible.

    Args:
        tree: as in `plan_report`, of a plan whose memory is predicted.
        title: what fits where.
        notes: what is assumed.
    """
    plan, memory = tree["plan"], tree["memory"]
    lines = [("batch", tree["why"][0].removeprefix("effective batch "))]
    needed = _needed(memory)
    share, budget = needed / memory["budget_bytes"], format_bytes(memory["budget_bytes"])
    said = f"{format_bytes(needed)} a process, predicted: {share:.0%} of the budget of {budget}"
    lines.append(("memory", said))
    if host := memory.get("host"):
        lines.append(("RAM", f"{format_bytes(host['needed_bytes'])} of the machine, predicted"))
    lines += [("time", words.text.plain) for words in _time(plan)]
    if hours := plan.get("gpu_hours"):
        price = plan.get("cost")
        cost = "" if price is None else f", which cost {by_duration(plan, price, '{:,.2f}'.format)}"
        lines.append(("GPU hours", _hours(plan, hours) + cost))
    lines.append(("steps", _steps(plan)))
    parts: list[RenderableType] = [
        Group(Words(Text(title, style="bold")), NamedValues(lines), bullets(notes)),
    ]
    if tree["alternatives"]:
        parts.append(_candidates_on_screen(tree))
    more = "WHY=1 adds the reason of each choice, memory by phase, and other numbers of "
    return apart(*parts, Words(Text(as_typed(more) + plural(process_unit(plan["device"])), style="dim")))


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


def gpus_report(tree: Mapping[str, Any]) -> RenderableType:
    """What a model would be like on common GPUs, from `plans_by_gpu`; fits in 80 columns."""
    details = as_typed(f'For details: make plan MODEL={tree["model"]} GPU="RTX 4090"')
    notes = (Words(Text(note, style="dim")) for note in [*gpus_legend(tree), details, *tree["why"]])
    table = gpus_table(tree)
    return Group(Text(table.caption, style="bold"), on_screen(table, gap=1), *notes)


def gpus_table(tree: Mapping[str, Any]) -> Table:
    """A row for each GPU; names of columns have line breaks."""
    hours = tree["seen"]
    each = "the fewest GPUs that fit" if tree["gpus"] is None else counted(tree["gpus"], "GPU")
    names = [METHODS[mode].removesuffix(" fine-tuning") for mode in tree["cards"][0]["plans"]]
    priced = any(plan.get("cost") is not None for row in tree["cards"] for plan in row["plans"].values())
    columns = ("n x mb", *(("GPU-h", "cost") if priced else ("tok/s", "GPU-h" if hours else "GiB")))
    heads = [f"{name}\n{what}" for name in names for what in columns]
    rows = []
    for row in tree["cards"]:
        cells = [cell for plan in row["plans"].values() for cell in _card_cells(plan, columns)]
        rows.append([row["gpu"], f"{row['total_bytes'] / GIB:.0f}", *cells])
    caption = f"{tree['model']} on {each}, rows of {tree['row_tokens']:,} tokens"
    return Table(["GPU", "GiB", *heads], rows, caption)


def gpus_legend(tree: Mapping[str, Any]) -> list[str]:
    """What the cells of the table of GPUs mean."""
    plans = [plan for row in tree["cards"] for plan in row["plans"].values() if "problem" not in plan]
    used = {plan["engine"] for plan in plans}
    marks = "".join(f", {one.mark}: {one.label}" for one in ENGINES if one.mark and one.name in used)
    of = f", of 1, 2, 4 ... 512 on machines of eight{marks}" if tree["gpus"] is None else ""
    counts = f"n x mb: GPUs{of}, and the micro-batch of each in the fastest plan."
    if any(group_of(plan) > 1 for plan in plans):
        counts += " 1/4: four GPUs divide the tokens of one (sequence parallelism)."
    batches = {plan["effective_batch_size"] for plan in plans}
    grown = "Where GPUs outnumber the rows of a step, the effective batch grows to one row per GPU. "
    least = (
        "GiB: the peak of tensors, at least (micro-batch 1, activations recomputed) and in the fastest plan."
    )
    hours = "GPU-h: hours of the run times GPUs, a range where links decide."
    last = hours if tree["seen"] else least
    return [
        counts,
        *([grown] if len(batches) > 1 else []),
        "-: it does not fit. tok/s: tokens per second, predicted from data sheets, n/a without one; over the "
        f"slowest link that there may be. {last}",
    ]


def _card_cells(plan: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    if "problem" in plan:
        return ("-",) * len(columns)
    speed = formatted(
        plan["tokens_per_second"], lambda found: f"{found:,.0f}" if found < 1e5 else format_count(found)
    )
    group = f"/{group_of(plan)}" if group_of(plan) > 1 else ""
    cells = {
        "n x mb": f"{plan['gpus']}{engine_of(plan['engine']).mark}x{plan['micro_batch_size']}{group}",
        "tok/s": speed,
        "GPU-h": _in_cell(plan, plan["gpu_hours"], _hours(plan, plan["gpu_hours"])),
        "cost": _in_cell(plan, plan.get("cost"), formatted(plan.get("cost"), "{:,.2f}".format)),
        "GiB": _range(plan["least_bytes"], plan["peak_bytes"]),
    }
    return tuple(cells[name] for name in columns)


def _in_cell(plan: Mapping[str, Any], value: float | None, one: str) -> str:
    """A range of hours or prices in few digits, or the text of one number."""
    found = by_duration(
        plan, value, lambda part: format_count(part) if part >= 1000 else f"{part:.{int(part < 10)}f}"
    )
    return found.replace(" to ", "-") if " to " in found else one


def _range(least: int | None, most: int | None) -> str:
    """Two sizes in GiB: "9.2-18", or one if both are nearly the same."""
    if least is None or most is None:
        return MISSING
    low, high = (f"{size / GIB:.{int(size < 10 * GIB)}f}" for size in (least, most))
    return low if low == high else f"{low}-{high}"

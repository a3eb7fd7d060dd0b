"""Console report of a plan: what was chosen and why, its memory, and the alternatives."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sft_play.config.methods import METHODS
from sft_play.engines.registry import ENGINES, engine_of, label_of
from sft_play.reasons.evidence import link_text
from sft_play.report.layout import Bar, apart, bullets, columns
from sft_play.report.tables import MISSING, formatted, said_of
from sft_play.spelling import as_typed
from sft_play.ui.screen import NamedValues, Words
from sft_play.units import GIB, counted, format_bytes, format_count, format_duration, plural

SHOWN = 6  # micro-batches of the chosen kind


def _process_table(memory: Mapping[str, Any]) -> RenderableType:
    """What tensors take, what the allocator reserves for them, and what the driver counts."""
    table = columns("one process on the GPU", "memory", "of the budget", "", left=(0, 3))
    context = format_bytes(memory["terms"]["context"])
    for name, size, note in (
        ("allocated", memory["peak_bytes"], "tensors"),
        ("reserved", memory["reserved_bytes"], "with fragmentation"),
        ("process", memory["process_bytes"], f"with {context} of context"),
    ):
        share = f"{size / memory['budget_bytes']:.0%}"
        table.add_row(name, format_bytes(size), share, note, style="bold" if name == "process" else "")
    return table


def memory_tables(memory: Mapping[str, Any]) -> RenderableType:
    """Predicted memory of the process, by phase, and the breakdown of the peak."""
    phases = columns("phase", "peak", "of the budget")
    for name, size in memory["phases"].items():
        style = "bold" if name == memory["peak_phase"] else ""
        phases.add_row(name, format_bytes(size), f"{size / memory['budget_bytes']:.0%}", style=style)
    terms = columns(f"in the {memory['peak_phase']} peak", "memory")
    for name, size in sorted(memory["terms"].items(), key=lambda item: -item[1]):
        if size and name != "context":
            terms.add_row(name, format_bytes(size))
    side_by_side = Table.grid(padding=(0, 4))
    side_by_side.add_row(phases, terms)
    in_ram = [_host_table(memory["host"])] if memory.get("host") else []
    budget, guard = format_bytes(memory["budget_bytes"]), format_bytes(memory.get("guard_bytes", 0))
    title = Text(f"memory of a process, {said_of(memory.get('origin'))} (budget {budget}, guard {guard})")
    if memory.get("process_bytes") is None:
        return Group(title, side_by_side)
    return Group(title, _process_table(memory), side_by_side, *in_ram)


def _host_table(host: Mapping[str, Any]) -> Table:
    """The RAM of a machine whose processes offload to it."""
    each, budget = counted(host["processes"], "process"), host["budget_bytes"]
    table = columns(f"RAM of the machine, {each}", "memory", "of what may be used", left=(0,))
    for name, size in sorted(host["terms"].items(), key=lambda item: -item[1]):
        table.add_row(f"{name}, of each", format_bytes(size), "")
    table.add_row("assumed for itself, of each", format_bytes(host["own_bytes"]), "")
    table.add_row("to save what is trained", format_bytes(host["saved_bytes"]), "")
    share = "unknown" if not budget else f"{host['needed_bytes'] / budget:.0%} of {format_bytes(budget)}"
    table.add_row("needed", format_bytes(host["needed_bytes"]), share, style="bold")
    return table


def candidates_table(plan: Mapping[str, Any], peak: int, others: Sequence[Mapping[str, Any]]) -> Table:
    """What else was possible: predicted speed and peak, in bytes, of the chosen plan and others, as bars."""
    own_speed = 1.0 if plan["step_seconds"] else None
    chosen = {**plan, "process_bytes": peak, "fits": True, "relative_speed": own_speed}
    rows = _shown([chosen, *sorted(others, key=_kind)], chosen)
    table = columns("micro-batch", "activations", "tokens/s", "", "peak", "", left=(0, 1, 3, 5))
    table.padding = (0, 2, 0, 0)
    for heading in table.columns:
        heading.no_wrap = heading.header != ""  # the bars give way
    fastest, largest = max(map(_speed, rows)) or 1, max(row["process_bytes"] for row in rows)
    for row in rows:
        mark = "> " if row is chosen else "  "
        table.add_row(
            f"{mark}{row['micro_batch_size']:,} x {row['gradient_accumulation_steps']}",
            _activations(row, plan),
            _tokens_per_second(row, plan),
            Bar(_speed(row) / fastest),
            format_bytes(row["process_bytes"]),
            Bar(row["process_bytes"] / largest),
            style="bold" if row is chosen else "",
        )
    return table


def _speed(row: Mapping[str, Any]) -> float:
    """Relative to the chosen plan; 0 if it is unknown or the plan does not fit."""
    return (row["relative_speed"] or 0.0) if row["fits"] else 0.0


def _kind(row: Mapping[str, Any]) -> tuple[bool, str, str, int, str]:
    return row["gradient_checkpointing"], way_of(row), *_engine(row)


def way_of(row: Mapping[str, Any]) -> str:
    """What becomes of activations, in a word or two; plans of earlier versions tell of two ways only."""
    if row.get("kept_layers"):
        return "partly kept"
    tiled = ", in tiles" if row.get("mlp_tiles", 1) > 1 else ""
    if row.get("activations") == "offload":
        return f"offloaded{tiled}"
    return f"recomputed{tiled}" if row["gradient_checkpointing"] else "kept"


def _engine(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """The arguments of `label_of`."""
    return row["engine"], row["replicas"], row["offload"]


def _shown(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows by kind and size; of the chosen kind, those that are closest to it in size."""
    alike = [row for row in rows if _kind(row) == _kind(chosen)]
    alike.sort(key=lambda row: row["micro_batch_size"])
    place = alike.index(chosen)
    first = max(0, min(place - SHOWN // 2, len(alike) - SHOWN))
    return [*alike[first : first + SHOWN], *(row for row in rows if _kind(row) != _kind(chosen))]


def _activations(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """What becomes of activations, and the engine if there are several processes."""
    several = plan["world_size"] > 1 or plan["offload"] != "none"
    engine = f"{label_of(*_engine(row))}, " if several else ""
    return engine + way_of(row)


def _tokens_per_second(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    speed, relative = plan.get("tokens_per_second"), row["relative_speed"]
    if not row["fits"]:
        return "ran out before" if row.get("ran_out") else "does not fit"
    return MISSING if speed is None or relative is None else f"{speed * relative:,.0f}"


def process_unit(device: str) -> str:
    """What a process of a run is called where they are counted: the GPU that it has, or a process."""
    return "GPU" if device == "cuda" else "process"


def scaling_table(rows: Sequence[Mapping[str, Any]], unit: str = "GPU") -> RenderableType:
    """The same run on other numbers of GPUs or processes (`process_unit`); fits in 80 columns."""
    rules = [f"lr {rule}" if rule == "none" else rule for rule in ("none", "sqrt", "linear")]
    table = columns(plural(unit), "micro", "accum", "batch", "steps", *rules, "GiB", "comm", "speed")
    table.padding = (0, 1, 0, 0)  # type: ignore[assignment]
    planned = [row for row in rows if "problem" not in row]
    for row in planned:
        table.add_row(
            str(row["world_size"]),
            f"{row['micro_batch_size']:,}",
            str(row["gradient_accumulation_steps"]),
            f"{row['effective_batch_size']:,}",
            f"{row['steps_per_epoch']:,}",
            *(f"{rate:.1e}" for rate in row["learning_rates"].values()),
            formatted(row["process_bytes"], lambda size: f"{size / GIB:.2f}"),
            communication(row),
            speed_up(row),
        )
    problems = [Words(problem) for problem in scaling_problems(rows, unit)]
    notes = [
        f"lr: relative to batch {row['reference_batch_size']:,}, for each train.lr_scaling "
        f"(in use: {row['lr_scaling']})"
        for row in planned[-1:]
    ]
    notes += speed_up_notes(planned, unit)
    return Group(table, *problems, *(Words(Text(note, style="dim"), hang=2) for note in notes))


def scaling_problems(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """Why some numbers of GPUs or processes cannot be."""
    return [f"{counted(row['world_size'], unit)}: {row['problem']}" for row in rows if "problem" in row]


def communication(row: Mapping[str, Any]) -> str:
    """The share of a step in which devices exchange gradients or weights."""
    whole, alone = row["speed_up"], row["speed_up_at_most"]
    return MISSING if whole is None or not alone else f"{max(0.0, 1 - whole / alone):.0%}"


def speed_up(row: Mapping[str, Any]) -> str:
    """How much faster than the fewest; "<2.00x" if it is no more than that."""
    if row["speed_up"] is not None:
        return f"{row['speed_up']:.2f}x"
    bound = row["speed_up_at_most"]
    # predictions for several CPU processes are rough: no bound is above the number of processes
    return MISSING if bound is None else f"<{min(bound, row['world_size']):.2f}x"


def speed_up_notes(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """What the speed-ups of planned rows assume; [] if they are unknown."""
    notes, several = [], [row for row in rows if row["exchanged_bytes"]]
    measured = [row for row in several if row.get("exchange_measured")]
    derived = [row for row in several if row not in measured and row.get("links")]
    unknown = [row for row in rows if row["speed_up"] is None and row["speed_up_at_most"]]
    for row in measured[-1:]:
        counts = ", ".join(str(one["world_size"]) for one in measured)
        notes.append(
            f"speed on {counts} {plural(unit)}: communication as measured here ({_sent(row, unit)}), "
            "added in full, as if none overlapped with computation"
        )
    for row in derived[-1:]:
        sent = f"{_sent(row, unit)} at {link_text(row['links'])}"
        notes.append(f"speed: {sent}, added in full, as if none overlapped with computation")
    if unknown:
        notes.append("speed: upper bound (<), without communication, because the link is unknown")
    return notes


def _sent(row: Mapping[str, Any], unit: str) -> str:
    each = counted(row["world_size"], unit)
    return f"each of {each} sends {format_bytes(row['exchanged_bytes'])} per step (ring)"


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
    tokens = f", {speed:,.0f} tokens/s" if speed else ""
    total = format_duration(seconds * plan["total_steps"])
    said = said_of(plan.get("step_seconds_origin"))
    return [Words(f"{said}: {format_duration(seconds)} a step, {total} in total{tokens}")]


def plan_answer(tree: Mapping[str, Any], title: str, notes: Sequence[str] = ()) -> RenderableType:
    """What a person asks first: whether it fits, the batch, memory and time; and what else was possible.

    Args:
        tree: as in `plan_report`, of a plan whose memory is predicted.
        title: what fits where.
        notes: what is assumed.
    """
    plan, memory = tree["plan"], tree["memory"]
    lines = [("batch", tree["why"][0].removeprefix("effective batch "))]
    needed = memory.get("process_bytes") or memory["peak_bytes"]
    share, budget = needed / memory["budget_bytes"], format_bytes(memory["budget_bytes"])
    said = f"{format_bytes(needed)} a process, predicted: {share:.0%} of the budget of {budget}"
    lines.append(("memory", said))
    if host := memory.get("host"):
        lines.append(("RAM", f"{format_bytes(host['needed_bytes'])} of the machine, predicted"))
    lines += [("time", words.text.plain) for words in _time(plan)]
    if hours := plan.get("gpu_hours"):
        cost = "" if plan.get("cost") is None else f", which cost {plan['cost']:,.2f}"
        lines.append(("GPU hours", f"{hours:,.{int(hours < 100)}f}{cost}"))
    lines.append(("steps", _steps(plan)))
    parts: list[RenderableType] = [
        Group(Words(Text(title, style="bold")), NamedValues(lines), bullets(notes)),
    ]
    if tree["alternatives"]:
        parts.append(candidates_table(plan, needed, tree["alternatives"]))
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
            peak = memory.get("process_bytes") or memory["peak_bytes"]
            parts.append(candidates_table(plan, peak, tree["alternatives"]))
        parts.append(memory_tables(memory))
    if scaling:
        parts.append(scaling_table(scaling, process_unit(plan["device"])))
    return apart(*parts)


def gpus_report(tree: Mapping[str, Any]) -> RenderableType:
    """What a model would be like on common GPUs, from `plans_by_gpu`; fits in 80 columns."""
    head, rows = table_of_gpus(tree)
    table = columns(*head)
    table.padding = (0, 1, 0, 0)  # type: ignore[assignment]
    for row in rows:
        table.add_row(*row)
    details = as_typed(f'For details: make plan MODEL={tree["model"]} GPU="RTX 4090"')
    notes = [*gpus_legend(tree), details, *tree["why"]]
    title = Text(gpus_title(tree), style="bold")
    return Group(title, table, *(Words(Text(note, style="dim")) for note in notes))


def gpus_title(tree: Mapping[str, Any]) -> str:
    """What the table of GPUs shows."""
    each = "the fewest GPUs that fit" if tree["gpus"] is None else counted(tree["gpus"], "GPU")
    return f"{tree['model']} on {each}, rows of {tree['row_tokens']:,} tokens"


def table_of_gpus(tree: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head of the table of GPUs, with line breaks, and its rows."""
    hours = tree["seen"]
    names = [METHODS[mode].removesuffix(" fine-tuning") for mode in tree["cards"][0]["plans"]]
    heads = [f"{name}\n{what}" for name in names for what in ("n x mb", "tok/s", "GPU-h" if hours else "GiB")]
    rows = []
    for row in tree["cards"]:
        cells = [cell for plan in row["plans"].values() for cell in _card_cells(plan, hours=hours)]
        rows.append([row["gpu"], f"{row['total_bytes'] / GIB:.0f}", *cells])
    return ["GPU", "GiB", *heads], rows


def gpus_legend(tree: Mapping[str, Any]) -> list[str]:
    """What the cells of the table of GPUs mean."""
    plans = [plan for row in tree["cards"] for plan in row["plans"].values() if "problem" not in plan]
    used = {plan["engine"] for plan in plans}
    marks = "".join(f", {one.mark}: {one.label}" for one in ENGINES if one.mark and one.name in used)
    of = f", of 1, 2, 4 ... 512 on machines of eight{marks}" if tree["gpus"] is None else ""
    counts = f"n x mb: GPUs{of}, and the micro-batch of each in the fastest plan."
    if any(plan["sequence_ranks"] > 1 for plan in plans):
        counts += " 1/4: four GPUs divide the tokens of one (sequence parallelism)."
    batches = {plan["effective_batch_size"] for plan in plans}
    grown = "Where GPUs outnumber the rows of a step, the effective batch grows to one row per GPU. "
    least = (
        "GiB: the peak of tensors, at least (micro-batch 1, activations recomputed) and in the fastest plan."
    )
    last = "GPU-h: hours of the run times GPUs." if tree["seen"] else least
    return [
        counts,
        *([grown] if len(batches) > 1 else []),
        "-: it does not fit. tok/s: tokens per second, predicted from data sheets, n/a where they do not "
        f"tell it or the link. {last}",
    ]


def _card_cells(plan: Mapping[str, Any], *, hours: bool) -> tuple[str, ...]:
    if "problem" in plan:
        return "-", "-", "-"
    speed = formatted(
        plan["tokens_per_second"], lambda found: f"{found:,.0f}" if found < 1e5 else format_count(found)
    )
    if hours:
        last = formatted(plan["gpu_hours"], lambda spent: f"{spent:,.{int(spent < 100)}f}")
    else:
        last = _range(plan["least_bytes"], plan["peak_bytes"])
    group = f"/{plan['sequence_ranks']}" if plan["sequence_ranks"] > 1 else ""
    return f"{plan['gpus']}{engine_of(plan['engine']).mark}x{plan['micro_batch_size']}{group}", speed, last


def _range(least: int | None, most: int | None) -> str:
    """Two sizes in GiB: "9.2-18", or one if both are nearly the same."""
    if least is None or most is None:
        return MISSING
    low, high = (f"{size / GIB:.{int(size < 10 * GIB)}f}" for size in (least, most))
    return low if low == high else f"{low}-{high}"

"""On what a run would train: by each method on its GPUs, and on each common GPU, the cheapest ways first."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.config.methods import METHODS
from sft_play.engines.registry import label_of
from sft_play.reasons.choices import group_of
from sft_play.report.layout import apart
from sft_play.report.misfit import MISFIT
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import by_duration, formatted
from sft_play.spelling import make, quoted, var
from sft_play.ui.screen import Words
from sft_play.units import GIB, capitalized, counted, format_bytes

NO_FIT = "does not fit"


def methods_on_screen(tree: Mapping[str, Any]) -> RenderableType:
    """The methods beside the planned one, which is marked, and how to plan another."""
    return Group(on_screen(methods_table(tree), gap=2, mark="> "), *_dim(methods_legend(tree)))


def methods_table(tree: Mapping[str, Any]) -> Table:
    """A row for each method of a plan that has `methods`, as `other_methods` gives them."""
    rows, chosen = tree["methods"], tree["method"]
    cells = [(capitalized(METHODS[row["method"]]), *_way_cells(row)) for row in rows]
    return Table(
        ("method", "GPUs", "tokens/s", "hours", "memory"),
        cells,
        "By each method",
        left=(0, 1),
        bold=[number for number, row in enumerate(rows) if row["method"] == chosen],
    )


def _way_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if not row["fits"]:
        return "no plan found", "", "", ""
    memory = format_bytes(row["process_bytes"])
    return f"{row['gpus']}{_ram(row)}", _speed(row), hours_text(row, row["hours"]), memory


def methods_legend(tree: Mapping[str, Any]) -> list[str]:
    """What the rows of other methods are, and how to plan one."""
    rows, chosen = tree["methods"], tree["method"]
    others = [row for row in rows if row["method"] != chosen]
    said = [f"{var(MODE=others[-1]['method'])} plans another method, whose fastest plan may be faster"]
    if any(row.get("ram_bytes") for row in rows):
        said.append("in RAM: weights, gradients and optimizer states")
    speed = tree["plan"].get("tokens_per_second") or 0
    if faster := [METHODS[row["method"]] for row in others if (row.get("tokens_per_second") or 0) > speed]:
        names = " and ".join(faster)
        said.append(f"{names} would be faster, but the method is yours to choose: it decides what is trained")
    return said


def gpus_report(tree: Mapping[str, Any]) -> RenderableType:
    """What a model would be like on common GPUs: the cheapest ways, and a table for each method."""
    details = f"For details: {make('plan', MODEL=tree['model'], GPU=quoted('RTX 4090'))}"
    cheapest = [cheapest_table(tree)] if tree["cheapest"] else []
    tables = [*cheapest, *gpus_tables(tree)]
    return apart(
        Text(gpus_caption(tree), style="bold"),
        *(Group(Text(table.caption, style="bold"), on_screen(table, gap=2)) for table in tables),
        Group(*_dim([*gpus_legend(tree), details, *tree["why"]])),
    )


def card_heads(modes: Sequence[str]) -> Text:
    """What stands above the lines of `card_line`."""
    names = [capitalized(METHODS[mode]) for mode in modes]
    return Text(_in_line("GPU", "memory", names), style="bold")


def card_line(card: Mapping[str, Any]) -> Text:
    """What a GPU needs by each method, while others are still being planned."""
    needs = [_needs(plan) for plan in card["plans"].values()]
    return Text(_in_line(card["gpu"], f"{card['total_bytes'] / GIB:.0f} GiB", needs))


def _in_line(gpu: str, memory: str, cells: Sequence[str]) -> str:
    return "".join([f"{gpu:<11}{memory:>7}", *(f"  {cell:<17}" for cell in cells)]).rstrip()


def gpus_caption(tree: Mapping[str, Any]) -> str:
    """Which model, on how many GPUs, and which rows."""
    each = "the fewest GPUs that fit" if tree["gpus"] is None else counted(tree["gpus"], "GPU")
    return f"{tree['model']} on {each}, rows of {tree['row_tokens']:,} tokens"


def cheapest_table(tree: Mapping[str, Any]) -> Table:
    """What to rent or own for each method: one line, and another for one GPU with much RAM."""
    found, rows = tree["cheapest"], list[tuple[str, ...]]()
    priced = any(row.get("cost") is not None for row in found)
    for number, row in enumerate(found):
        again = number and found[number - 1]["method"] == row["method"]
        name = "" if again else capitalized(METHODS[row["method"]])
        where = f"{row['gpus']} x {row['gpu']} ({row['total_bytes'] / GIB:.0f} GiB){_ram(row)}"
        cost = (_cost(row),) if priced else ()
        rows.append((name, where, _speed(row), hours_text(row, row["hours"]), *cost))
    head = ("method", "what to rent or own", "tokens/s", "hours", *(("cost",) if priced else ()))
    by = "by your prices" if priced else "the fewest GPUs, and of these the smallest"
    return Table(head, rows, f"The cheapest ways: {by}", left=(0, 1))


def gpus_tables(tree: Mapping[str, Any]) -> list[Table]:
    """A table for each method that some GPU is enough for, with a row for each GPU."""
    plans = [plan for row in tree["cards"] for plan in row["plans"].values()]
    hours = "GPU hours" if tree["seen"] else "hours"
    last = (hours, "cost") if any(plan.get("cost") is not None for plan in plans) else ("tokens/s", hours)
    tables = []
    for mode, planned in _by_mode(tree).items():
        if all("problem" in plan for plan in planned):
            continue  # the legend says so once
        rows = []
        for card, plan in zip(tree["cards"], planned, strict=True):
            cells = (_needs(plan), "", "", "") if "problem" in plan else _card_cells(plan, last)
            rows.append((card["gpu"], f"{card['total_bytes'] / GIB:.0f} GiB", *cells))
        head = ("GPU", "memory", "needs", "micro-batch", *last)
        tables.append(Table(head, rows, capitalized(METHODS[mode]), left=(0, 2)))
    return tables


def _by_mode(tree: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Method -> its plans on each GPU."""
    plans = [card["plans"] for card in tree["cards"]]
    return {mode: list(map(itemgetter(mode), plans)) for mode in plans[0]}


def _without_plan(tree: Mapping[str, Any]) -> list[str]:
    """The methods that no GPU is enough for, and each other reason why there is no plan, once."""
    said = list[str]()
    for mode, planned in _by_mode(tree).items():
        causes = [plan["problem"] for plan in planned if "problem" in plan]
        if len(causes) == len(planned) and _is_misfit(planned[0]):
            said.append(f"{capitalized(METHODS[mode])} {NO_FIT} on any of these GPUs.")
        said += dict.fromkeys(
            f"{capitalized(METHODS[mode])}: {cause}" for cause in causes if MISFIT not in cause
        )
    return said


def _is_misfit(plan: Mapping[str, Any]) -> bool:
    return plan["problem"].startswith(MISFIT)


def gpus_legend(tree: Mapping[str, Any]) -> list[str]:
    """What the cells of the tables of GPUs mean, and which methods have no table."""
    plans = [plan for row in tree["cards"] for plan in row["plans"].values() if "problem" not in plan]
    said = _without_plan(tree)
    if not plans:
        return said
    if tree["gpus"] is None:
        said.append("The fewest of 1, 2, 4 ... 512 GPUs, on machines of eight.")
    if any(group_of(plan) > 1 for plan in plans):
        said.append("1 of 2 GPUs: two GPUs divide the tokens of one row (sequence parallelism).")
    if len({plan["effective_batch_size"] for plan in plans}) > 1:
        said.append("Where GPUs outnumber the rows of a step, the effective batch grows to one row per GPU.")
    said.append(
        "tokens/s: predicted from data sheets, n/a without one, over the slowest possible links. "
        f"hours: of the whole run{', times GPUs' if tree['seen'] else ''}, a range where links decide."
    )
    if any(row.get("ram_bytes") for row in tree["cheapest"]):
        ram = "weights, gradients and optimizer states are in RAM; tokens/s: at least."
        said.append(f"With {var(OFFLOAD='ram')}, {ram}")
    return said


def _card_cells(plan: Mapping[str, Any], last: Sequence[str]) -> tuple[str, ...]:
    group = f" of {group_of(plan)} GPUs" if group_of(plan) > 1 else ""
    cells = {
        "tokens/s": _speed(plan),
        "hours": hours_text(plan, plan["hours"]),
        "GPU hours": hours_text(plan, plan["gpu_hours"]),
        "cost": _cost(plan),
    }
    first = _needs(plan), f"{plan['micro_batch_size']:,}{group}"
    return *first, *(cells[name] for name in last)


def _needs(plan: Mapping[str, Any]) -> str:
    if "problem" in plan:
        return NO_FIT if _is_misfit(plan) else "no plan"
    engine = f", {label_of(plan['engine'], plan['replicas'])}" if plan["gpus"] > 1 else ""
    return counted(plan["gpus"], "GPU") + engine


def _ram(row: Mapping[str, Any]) -> str:
    ram = row.get("ram_bytes")
    return f" and {ram / GIB:,.0f} GiB of RAM" if ram else ""


def _speed(row: Mapping[str, Any]) -> str:
    """By which plans are compared: over the slowest links that there may be."""
    return formatted(row["tokens_per_second"], "{:,.0f}".format)


def hours_text(row: Mapping[str, Any], hours: float | None) -> str:
    """Hours of a plan, as the range of its steps' seconds has them; n/a if they are unknown."""
    return by_duration(row, hours, lambda found: f"{found:,.{int(found < 100)}f}")


def _cost(row: Mapping[str, Any]) -> str:
    return by_duration(row, row.get("cost"), "{:,.2f}".format)


def _dim(texts: Sequence[str]) -> list[Words]:
    return [Words(Text(text, style="dim")) for text in texts]

"""The longest rows on the screen, from the tree of `sft-play plan --context`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sft_play.config.methods import METHODS
from sft_play.engines.registry import label_of
from sft_play.parts import Activations, recomputed_words
from sft_play.reasons.choices import group_of
from sft_play.report.layout import bullets
from sft_play.report.table import Table, on_screen
from sft_play.report.tables import formatted
from sft_play.spelling import var
from sft_play.ui.screen import Words
from sft_play.units import GIB, counted, plural


def context_report(tree: Mapping[str, Any]) -> RenderableType:
    """A row for each method, number of processes, place of the weights and group; fits in 80 columns."""
    unit, asked = _unit(tree), None if tree["asked"] == "max" else tree["asked"]
    heads, divided = ["", plural(unit)], any(group_of(row) > 1 for row in tree["rows"])
    heads += [*(["group"] if divided else []), "longest row", "limit"]
    texts = [len(heads) - 1, len(heads)]
    if asked:
        heads, texts = [*heads, f"{asked:,}"], [*texts, len(heads) + 1]
    rows = [_cells(row, asked, divided=divided) for row in tree["rows"]]
    table = Table([*heads, "engine", "tokens/s", "GiB"], rows, left=(0, *texts))
    place = f"{tree['gpu']}" if tree["gpu"] else "this CPU"
    title = Text(f"{tree['model']} on {place}: the longest rows that fit", style="bold")
    return Group(Words(title), on_screen(table, gap=2 - divided), bullets([*_notes(tree), *tree["why"]]))


def _unit(tree: Mapping[str, Any]) -> str:
    return "GPU" if tree["gpu"] else "process"


def method_of(row: Mapping[str, Any]) -> str:
    """The method, and where weights are if not on the device."""
    name = METHODS[row["mode"]].removesuffix(" fine-tuning")
    return name if row["offload"] == "none" else f"{name}, {row['offload'].upper()}"


def _cells(row: Mapping[str, Any], asked: int | None, *, divided: bool) -> list[str]:
    longest = row["longest"]
    cells = [method_of(row), str(row["processes"]), *([str(group_of(row))] if divided else [])]
    cells.append(f"{longest:,}" if longest else "-")
    cells.append(row.get("limit", "") if longest else "")
    if asked:
        cells.append("fits" if row.get("fits") else "-")
    if "engine" not in row:
        return [*cells, "", "", ""]
    speed = formatted(row["tokens_per_second"], "{:,.0f}".format)
    engine = label_of(row["engine"], row["replicas"])
    return [*cells, engine, speed, f"{row['process_bytes'] / GIB:.1f}"]


def _notes(tree: Mapping[str, Any]) -> list[str]:
    rows, asked = tree["rows"], tree["asked"]
    length = "the longest row" if asked == "max" else f"rows of {asked:,} tokens"
    recomputed = recomputed_words(map(Activations.of_json, rows))
    found = [
        f"one row in a micro-batch, loss on every token, activations {recomputed}; speed and "
        f"memory of a {_unit(tree)} at {length}, predicted"
    ]
    if any(group_of(row) > 1 for row in rows):
        found.append(
            f"group: {plural(_unit(tree))} that divide the tokens of each row, the fewest that reach this "
            "length; parallel.sequence_parallel_size, which a plan chooses where whole rows do not fit"
        )
    if any(row.get("limit") == "positions" and row["longest"] for row in rows):
        found.append(
            f"limit positions: memory is left, but the model has {counted(tree['positions'], 'position')}; "
            "model.rope_scaling.rope_type=yarn model.rope_scaling.factor=4 gives it four times as many"
        )
    if any(row["longest"] is None and "problem" not in row for row in rows):
        found.append("where the longest row is -, not even rows of 1,024 tokens fit")
    found += dict.fromkeys(f"{method_of(row)}: {row['problem']}" for row in rows if "problem" in row)
    return found


def row_line(row: Mapping[str, Any], *, gpu: bool) -> str:
    """How long rows may be, while others are still being looked for."""
    longest = f"{row['longest']:,} tokens" if row["longest"] else "no row fits"
    return f"{_where(row, 'GPU' if gpu else 'process')}: {longest}"


def _where(row: Mapping[str, Any], unit: str) -> str:
    divided = f" in groups of {group_of(row)}" if group_of(row) > 1 else ""
    return f"{method_of(row)} on {counted(row['processes'], unit)}{divided}"


def problem_of(tree: Mapping[str, Any]) -> str:
    """That rows of the asked length do not fit anywhere, and which ones do, in a sentence."""
    unit, asked = _unit(tree), tree["asked"]
    known = [f"{_where(row, unit)} {row['longest']:,}" for row in tree["rows"] if row["longest"]]
    problems = [row["problem"] for row in tree["rows"] if "problem" in row]
    longest = f"the longest that fit have {', '.join(known)} tokens ({var(CONTEXT='max')})" if known else ""
    longest = longest or "; ".join(dict.fromkeys(problems)) or "nor do rows of any length"
    return f"rows of {asked:,} tokens do not fit {tree['model']} on {tree['gpu'] or 'this CPU'}: {longest}"

"""Console report of a device profile: what operations cost on a device, and where the figures come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sft_play.report.layout import apart
from sft_play.report.table import Table, on_screen
from sft_play.ui.screen import Words
from sft_play.units import format_bytes


def _product_table(products: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """The rate of square products, and of products with one short side, as in adapters."""
    sides = next(iter(products.values()))["sides"]
    names = (*(f"side {side:,.0f}" for side in sides), f"one side {sides[0]:,.0f}")
    rows = []
    for name, grid in products.items():
        count, seconds = len(sides), grid["seconds"]
        square = [2 * side**3 / seconds[i * (count**2 + count + 1)] / 1e9 for i, side in enumerate(sides)]
        thin = 2 * sides[-1] ** 2 * sides[0] / seconds[-count] / 1e9
        rows.append((name, *(f"{rate:,.0f}" for rate in (*square, thin))))
    return Table(("matrix products, GFLOP/s", *names), rows)


def _curve_tables(tree: Mapping[str, Any]) -> list[Table]:
    """Attention by tokens, element-wise operations by bytes."""
    attention, moving = [], []
    for name, key in (("forward", "attention"), ("backward", "attention_backward")):
        attention.append((name, *(f"{1e9 * seconds:,.2f}" for seconds in tree[key]["seconds"])))
    for name, key in (("simple", "elementwise"), ("exp and similar", "transcendental")):
        curve = tree[key]
        rates = (size / s / 1e9 for size, s in zip(curve["sizes"], curve["seconds"], strict=True))
        moving.append((name, *(f"{rate:,.1f}" for rate in rates)))
    tokens = (f"{n:,} tokens" for n in tree["attention"]["sizes"])
    sizes = (format_bytes(n) for n in tree["elementwise"]["sizes"])
    return [
        Table(("attention, ns per token and element", *tokens), attention),
        Table(("element-wise, GB/s", *sizes), moving),
    ]


def _collectives_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Milliseconds of collective operations by number of processes and size of the tensor."""
    names = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
    sizes = max((one[key]["sizes"] for one in found.values() for key in names.values()), key=len)
    rows = []
    for processes, one in found.items():
        for name, key in names.items():
            cells = [f"{1e3 * seconds:,.2f}" for seconds in one[key]["seconds"]]
            unmeasured = ["n/a"] * (len(sizes) - len(cells))
            rows.append((f"{name} between {processes} processes", *cells, *unmeasured))
    return Table(("communication, ms", *(format_bytes(size) for size in sizes)), rows)


def _single_table(tree: Mapping[str, Any]) -> Table:
    """What is paid for each of something."""
    single = (
        ("call of an operation by Python", "call_forward_s", 1e6, "µs"),
        ("call of an operation by autograd", "call_backward_s", 1e6, "µs"),
        ("unpacked 4-bit weight", "unpack_s", 1e9, "ns"),
        ("byte of new memory", "fresh_byte_s", 1e9, "ns"),
        ("updated element", "update_element_s", 1e9, "ns"),
        ("updated tensor", "update_tensor_s", 1e6, "µs"),
    )
    rows = [(name, f"{tree[key] * factor:,.2f} {unit}") for name, key, factor, unit in single]
    return Table(("per", "time"), rows)


def profile_report(tree: Mapping[str, Any]) -> RenderableType:
    """The whole profile, from its JSON, with what was measured between several processes."""
    threads = f", {tree['threads']} threads" if tree["threads"] else ""
    title = Text.assemble(("device profile  ", "bold"), f"{tree['device']}{threads}: {tree['source']}")
    if tree["busy"] >= 0.01:
        title.append(f"; other programs used {tree['busy']:.0%} of the CPU")
    exchange: RenderableType = Words("communication: measured by the first run of several processes")
    if tree["collectives"]:
        exchange = on_screen(_collectives_table(tree["collectives"]))
    tables = (_product_table(tree["products"]), *_curve_tables(tree), _single_table(tree))
    return apart(Words(title), *map(on_screen, tables), exchange)

"""Console report of a device profile: what operations cost on a device, and where the figures come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sft_play.report.layout import apart, columns
from sft_play.ui.screen import Words
from sft_play.units import format_bytes


def product_table(products: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """The rate of square products, and of products with one short side, as in adapters."""
    sides = next(iter(products.values()))["sides"]
    names = (*(f"side {side:,.0f}" for side in sides), f"one side {sides[0]:,.0f}")
    table = columns("matrix products, GFLOP/s", *names)
    for name, grid in products.items():
        count, seconds = len(sides), grid["seconds"]
        square = [2 * side**3 / seconds[i * (count**2 + count + 1)] / 1e9 for i, side in enumerate(sides)]
        thin = 2 * sides[-1] ** 2 * sides[0] / seconds[-count] / 1e9
        table.add_row(name, *(f"{rate:,.0f}" for rate in (*square, thin)))
    return table


def curve_tables(tree: Mapping[str, Any]) -> list[Table]:
    """Attention by tokens, element-wise operations by bytes."""
    attention = columns(
        "attention, ns per token and element", *(f"{n:,} tokens" for n in tree["attention"]["sizes"])
    )
    for name, key in (("forward", "attention"), ("backward", "attention_backward")):
        attention.add_row(name, *(f"{1e9 * seconds:,.2f}" for seconds in tree[key]["seconds"]))
    moving = columns("element-wise, GB/s", *(format_bytes(n) for n in tree["elementwise"]["sizes"]))
    for name, key in (("simple", "elementwise"), ("exp and similar", "transcendental")):
        curve = tree[key]
        rates = (size / s / 1e9 for size, s in zip(curve["sizes"], curve["seconds"], strict=True))
        moving.add_row(name, *(f"{rate:,.1f}" for rate in rates))
    return [attention, moving]


def collectives_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Milliseconds of collective operations by number of processes and size of the tensor."""
    names = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
    sizes = max((one[key]["sizes"] for one in found.values() for key in names.values()), key=len)
    table = columns("communication, ms", *(format_bytes(size) for size in sizes))
    for processes, one in found.items():
        for name, key in names.items():
            cells = [f"{1e3 * seconds:,.2f}" for seconds in one[key]["seconds"]]
            unmeasured = ["n/a"] * (len(sizes) - len(cells))
            table.add_row(f"{name} between {processes} processes", *cells, *unmeasured)
    return table


def profile_report(tree: Mapping[str, Any]) -> RenderableType:
    """The whole profile, from its JSON, with what was measured between several processes."""
    single = columns("per", "time")
    for name, key, factor, unit in (
        ("call of an operation by Python", "call_forward_s", 1e6, "µs"),
        ("call of an operation by autograd", "call_backward_s", 1e6, "µs"),
        ("unpacked 4-bit weight", "unpack_s", 1e9, "ns"),
        ("byte of new memory", "fresh_byte_s", 1e9, "ns"),
        ("updated element", "update_element_s", 1e9, "ns"),
        ("updated tensor", "update_tensor_s", 1e6, "µs"),
    ):
        single.add_row(name, f"{tree[key] * factor:,.2f} {unit}")
    threads = f", {tree['threads']} threads" if tree["threads"] else ""
    title = Text.assemble(("device profile  ", "bold"), f"{tree['device']}{threads}: {tree['source']}")
    if tree["busy"] >= 0.01:
        title.append(f"; other programs used {tree['busy']:.0%} of the CPU")
    exchange: RenderableType = Words("communication: measured by the first run of several processes")
    if tree["collectives"]:
        exchange = collectives_table(tree["collectives"])
    return apart(Words(title), product_table(tree["products"]), *curve_tables(tree), single, exchange)

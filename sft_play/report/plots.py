"""Plots as inline SVG whose colours are CSS variables, so that a page can be light or dark.

Texts stay texts, and what the pointer is over shows its value, without a script. A legend is HTML (html.py):
names of runs can be long, and they come from people.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from sft_play.units import UNITS, counted, format_bytes, format_count

COLOURS = 8  # as many as html.py has variables for
MAX_POINTS = 400  # of a line; more cannot be told apart in a plot of this size
NICE = (1, 2, 5, 10)  # distances of ticks
LOG_FROM = 100  # times the lowest value that the highest one is: below, a linear axis shows both
BUDGET_SHOWN_FROM = 0.2  # share of the budget; a lower peak would be a sliver beside its line
# Stand for CSS variables until the SVG is finished; matplotlib takes only real colours.
PLACEHOLDERS = {f"#0000{index:02x}": f"c{index}" for index in range(1, COLOURS + 1)}
PLACEHOLDERS |= {"#0000a0": "ink", "#0000a1": "rule", "#0000a2": "accent"}
INK, RULE, ACCENT = "#0000a0", "#0000a1", "#0000a2"
WIDTH, POINTS_PER_INCH = 5.0, 72  # inches; fonts are readable from 340 to 600 pixels
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 11, "lines.linewidth": 1.6, "grid.linewidth": 0.6,
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": RULE, "grid.color": RULE,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One curve: finite values over steps."""

    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0  # below COLOURS
    markers: bool = False
    name: str = ""
    width: float = 1.6  # points
    dashed: bool = False


@dataclass(frozen=True)
class Hint:
    """What is shown while the pointer is over a part of a plot, in coordinates of its data."""

    text: str
    across: tuple[float, float]
    up: tuple[float, float] | None = None  # None: the whole height


def colour_of(index: int) -> str:
    """The colour of a series."""
    return f"#0000{index + 1:02x}"


def thinned(line: Line, limit: int = MAX_POINTS) -> tuple[Line, int]:
    """The curve with at most `limit` points, each the mean of equally many, and how many those are."""
    size = -(-len(line.steps) // limit) or 1
    if size == 1:
        return line, 1

    def means(values: Sequence[float]) -> list[float]:
        chunks = (values[start : start + size] for start in range(0, len(values), size))
        return [math.fsum(chunk) / len(chunk) for chunk in chunks]

    return replace(line, steps=means(line.steps), values=means(line.values)), size


def curves(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    number: Callable[[float], str] = "{:g}".format,
    level: float | None = None,
    from_zero: bool = False,
    end: int | None = None,
) -> str:
    """Lines over optimizer steps; `title` is for screen readers, `level` is drawn as a dashed line.

    The axis is logarithmic where values span decades, unless it is to begin at zero. That of the steps
    goes to `end`, so that the curves of a run grow within it.
    """

    def draw(axes: Axes) -> list[Hint]:
        for line in lines:
            marker = "o" if line.markers or len(line.steps) == 1 else ""
            dashes: Any = (0, (4, 1.5)) if line.dashed else "-"
            (drawn,) = axes.plot(line.steps, line.values, color=colour_of(line.colour), linestyle=dashes)
            drawn.set(linewidth=line.width, marker=marker, markersize=4)
        if level is not None:
            axes.axhline(level, color=ACCENT, linestyle="--", linewidth=1.2)
        if from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # else a line could lie on the upper edge
        elif _span_decades(lines):
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
        locator = LogLocator(numticks=6) if axes.get_yscale() == "log" else MaxNLocator(5, steps=NICE)
        axes.yaxis.set_major_locator(locator)
        if end and end >= max(step for line in lines for step in line.steps):
            axes.set_xlim(-0.03 * end, 1.03 * end)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=NICE, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(unit)
        return _hints(lines, number)

    return _svg(title, draw, height=2.9)


def _span_decades(lines: Sequence[Line]) -> bool:
    values = [value for line in lines for value in line.values]
    return min(values) > 0 and max(values) >= LOG_FROM * min(values)


def _hints(lines: Sequence[Line], number: Callable[[float], str]) -> list[Hint]:
    """The values at each step, in a strip that reaches half way to the steps beside it."""
    values: dict[float, list[str]] = {}
    for line in lines:
        for step, value in zip(line.steps, line.values, strict=True):
            values.setdefault(step, []).append(f"{line.name} {number(float(f'{value:.4g}'))}".strip())
    steps = sorted(values)
    middles = [(one + two) / 2 for one, two in pairwise(steps)]
    edges = [*middles[:1], *middles, *middles[-1:]] or [steps[0] - 0.5, steps[0] + 0.5]
    if middles:
        edges[0], edges[-1] = 2 * steps[0] - middles[0], 2 * steps[-1] - middles[-1]
    return [
        Hint("\n".join([f"step {step:g}", *values[step]]), across)
        for step, across in zip(steps, pairwise(edges), strict=True)
    ]


def histogram(title: str, start: int, width: int, rows: Sequence[int], longer: int) -> str:
    """How many `rows` have how many tokens, in bins of `width` tokens from `start` on.

    The `longer` ones than the last bin get a bar of their own; `title` is for screen readers.
    """
    end = start + width * len(rows)

    def draw(axes: Axes) -> list[Hint]:
        starts = range(start, end, width)
        axes.bar(starts, rows, width=0.92 * width, align="edge", color=colour_of(0))
        if longer:
            axes.bar([end + width], [longer], width=0.92 * width, align="edge", color=colour_of(1))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=NICE, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=NICE, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        axes.grid(False, axis="x")
        axes.set_xlabel("tokens of a row")
        axes.set_ylabel("rows")
        last = Hint(f"{end:,} tokens or more: {counted(longer, 'row')}", (end + width, end + 2 * width))
        return [
            Hint(f"{_bin(first, width)}: {counted(count, 'row')}", (first, first + width))
            for first, count in zip(starts, rows, strict=True)
        ] + [last] * bool(longer)

    return _svg(title, draw, height=2.6)


def _bin(first: int, width: int) -> str:
    return counted(first, "token") if width == 1 else f"{first:,} to {first + width - 1:,} tokens"


@dataclass(frozen=True)
class PhaseMemory:
    """Predicted and measured bytes of one phase."""

    name: str
    terms: Sequence[tuple[str, int, int]]  # (name, colour, bytes), in the order of the stack; all positive
    measured: int | None


def memory_bars(title: str, phases: Sequence[PhaseMemory], budget: int | None) -> str:
    """Two bars for each phase: predicted, stacked by term, and measured below it, if anything was.

    The budget, in bytes, is a line, unless the memory is so far below it that the bars would vanish.
    """
    predicted = [sum(size for *_, size in phase.terms) for phase in phases]
    top = max([*predicted, *(phase.measured or 0 for phase in phases)], default=1) or 1
    scale, unit = next((unit for unit in UNITS if top >= unit[0]), (1, "bytes"))
    measures = any(phase.measured is not None for phase in phases)
    line = budget if budget and top >= BUDGET_SHOWN_FROM * budget else None
    end = max(1.3 * top, 1.05 * (line or 0))

    def label(axes: Axes, size: int, y: float) -> None:
        crossed = line is not None and size < line < size + 0.2 * end  # a label is as wide as a fifth
        place = (line if line and crossed else size) / scale
        axes.annotate(
            format_bytes(size), (place, y), (4, 0), textcoords="offset points", va="center", fontsize=10
        )

    def draw(axes: Axes) -> list[Hint]:
        hints = []
        for row, phase in enumerate(phases):
            left, middle = 0.0, row - 0.19 * measures
            for name, colour, size in phase.terms:
                axes.barh(middle, size / scale, 0.36, left=left / scale, color=colour_of(colour))
                across = (left / scale, (left + size) / scale)
                hints.append(Hint(f"{name} {format_bytes(size)}", across, (middle - 0.18, middle + 0.18)))
                left += size
            label(axes, int(left), middle)
            if phase.measured is not None:
                axes.barh(row + 0.21, phase.measured / scale, 0.3, fc="none", ec=INK, lw=1, hatch="////")
                label(axes, phase.measured, row + 0.21)
        if line:
            axes.axvline(line / scale, color=ACCENT, linestyle="--", linewidth=1.4)
        axes.set_yticks(range(len(phases)), [phase.name for phase in phases])
        axes.set_ylim(len(phases) - 0.5, -0.5)
        axes.set_xlim(0, max(end, (line or 0) + 0.2 * end) / scale)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=NICE))
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(unit)
        return hints

    return _svg(title, draw, height=0.75 + 0.56 * len(phases))


def _svg(title: str, draw: Callable[[Axes], Sequence[Hint]], *, height: float) -> str:
    """The SVG of a figure with one plot; `height` is in inches."""
    out = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), dpi=POINTS_PER_INCH, layout="constrained")
        axes = figure.subplots()
        hints = draw(axes)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    shown = "".join(_over(axes, hint, height * POINTS_PER_INCH) for hint in hints)
    return _embedded(out.getvalue().replace("</svg>", f"{shown}</svg>"), title, height)


def _over(axes: Axes, hint: Hint, height: float) -> str:
    """A transparent rectangle with the text of a hint, within the axes; `height` of the plot in points."""
    (low, high), view = sorted(hint.up or axes.get_ylim()), axes.get_window_extent()
    corners = axes.transData.transform([(hint.across[0], low), (hint.across[1], high)])
    left, right = max(corners[0][0], view.x0), min(corners[1][0], view.x1)
    bottom, top = sorted(corner[1] for corner in corners)
    size = f'width="{max(0.0, right - left):.1f}" height="{top - bottom:.1f}"'
    place = f'x="{left:.1f}" y="{height - top:.1f}" {size}'
    return f'<rect class="hint" {place}><title>{html.escape(hint.text)}</title></rect>'


def _embedded(svg: str, title: str, height: float) -> str:
    """The SVG as part of a page: a name for screen readers, no unused ids, CSS variables as colours."""
    content = re.sub(r"<style.*?</style>", "", svg[svg.index(">", svg.index("<svg")) + 1 :], flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)[)\"]", content))
    content = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", content)
    for placeholder, name in PLACEHOLDERS.items():
        content = content.replace(placeholder, f"var(--{name})")
    name, size = html.escape(title), f"{WIDTH * POINTS_PER_INCH:g} {height * POINTS_PER_INCH:g}"
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="{name}">{content}'

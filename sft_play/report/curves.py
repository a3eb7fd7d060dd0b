"""The curves of one run or of several on the same axes, from their metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sft_play.report.html import Figure, Legend
from sft_play.report.plots import Line, curves, thinned
from sft_play.report.record import RunRecord
from sft_play.report.tables import said_of
from sft_play.units import capitalized, format_count, format_duration


@dataclass(frozen=True)
class Curve:
    """A number of the metrics that is plotted."""

    key: str
    title: str
    unit: str
    number: Callable[[float], str] = "{:g}".format
    from_zero: bool = True  # otherwise its axis is logarithmic where the values span decades


LOSSES = (
    Curve("train/loss", "Training loss", "nats per token", from_zero=False),
    Curve("eval/loss", "Held-out loss", "nats per token", from_zero=False),
)
CURVES = (
    Curve("train/learning_rate", "Learning rate", ""),
    Curve("train/grad_norm", "Gradient norm, before clipping", ""),
    Curve("speed/tokens_per_second", "Tokens per second, padding not counted", "tokens/s", format_count),
)
STEP = Curve("speed/step_seconds", "Seconds per step", "seconds")


def curve_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """The curves of all runs; one run has both losses in one figure, several a line each."""
    if len(runs) == 1:
        losses = [line(runs[0], curve.key, colour, curve.title) for colour, curve in enumerate(LOSSES)]
        legend = [Legend(curve.title, colour) for colour, curve in enumerate(LOSSES)]
        end = runs[0].total_steps
        figures = [_figure(replace(LOSSES[0], key="", title="Loss"), losses, legend, ends=True, end=end)]
        figures += [_figure(curve, [line(runs[0], curve.key)], end=end) for curve in CURVES]
    else:
        legend = [Legend(run.name, colour, dashed=colour % 2 == 1) for colour, run in enumerate(runs)]
        figures = []
        for curve in (*LOSSES, *CURVES):
            lines = _told_apart([line(run, curve.key, colour, run.name) for colour, run in enumerate(runs)])
            figures.append(_figure(curve, lines, legend))
            figures += [_difference(curve, lines, legend)] if curve in LOSSES else []
    return [figure for figure in figures if figure]


def _told_apart(lines: Sequence[Line]) -> list[Line]:
    """The lines so that each is seen where others lie on it: thin over thick ones, every other dashed."""
    most = max(1, len(lines) - 1)
    return [
        replace(line, width=1.2 + 2.6 * (most - index) / most, dashed=index % 2 == 1)
        for index, line in enumerate(lines)
    ]


def _difference(curve: Curve, lines: Sequence[Line], legend: Sequence[Legend]) -> Figure | None:
    """By how much a loss is above that of the first run, at two or more steps that both have; else None."""
    base = dict(zip(lines[0].steps, lines[0].values, strict=True))
    others = []
    for line in lines[1:]:
        pairs = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if step in base]
        steps = [step for step, _ in pairs]
        others.append(replace(line, steps=steps, values=[value - base[step] for step, value in pairs]))
    others = [line for line in others if len(line.steps) > 1]  # one step is no curve
    title = f"{curve.title}, difference from {lines[0].name}"
    known = [*(legend[line.colour] for line in others), Legend(lines[0].name, level=True)]
    figure = _figure(replace(curve, key="", title=title), others, known, level=0.0)
    return figure and replace(figure, caption="; ".join(filter(None, ("Below 0 is better", figure.caption))))


def step_figure(run: RunRecord, expected: float | None, origin: str | None) -> Figure | None:
    """Seconds of a step over the run, and the expected ones as a line; None if they were not recorded."""
    legend = [Legend("measured", 0)]
    if expected:
        legend.append(Legend(f"{said_of(origin)}: {format_duration(expected)}", level=True))
    return _figure(STEP, [line(run, STEP.key)], legend, level=expected, end=run.total_steps)


def line(run: RunRecord, key: str, colour: int = 0, name: str = "") -> Line:
    """A number over the steps, without values that are missing, NaN or infinite."""
    steps, values = [], []
    for record in run.metrics:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(record["step"])
            values.append(float(value))
    return Line(steps, values, colour, markers=key == "eval/loss", name=name)


def _figure(
    curve: Curve,
    lines: Sequence[Line],
    legend: Sequence[Legend] = (),
    *,
    level: float | None = None,
    ends: bool = False,
    end: int | None = None,
) -> Figure | None:
    """The figure of the lines that have points; None if none has. With `ends`, it says their last values."""
    kept = [line for line in lines if line.steps]
    if not kept:
        return None
    shown = [thinned(line) for line in kept]
    size = max(count for _, count in shown)
    notes = [f"each point is the mean of {size} records"] if size > 1 else []
    if ends:
        notes += [f"last {legend[line.colour].name.lower()}: {line.values[-1]:.4f}" for line in kept]
    title = f"{curve.title} over optimizer steps"
    svg = curves(
        title,
        [line for line, _ in shown],
        unit=curve.unit,
        number=curve.number,
        level=level,
        from_zero=curve.from_zero,
        end=end,
    )
    caption = "; ".join(notes)
    return Figure(curve.title, svg, capitalized(caption), legend)

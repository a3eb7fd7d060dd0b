"""The curves of one run or of several on the same axes, from their metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sft_play.report.html import Figure, Legend
from sft_play.report.plots import Line, curves, thinned
from sft_play.report.record import RunRecord
from sft_play.units import format_count, format_duration


@dataclass(frozen=True)
class Curve:
    """A number of the metrics that is plotted."""

    key: str
    title: str
    unit: str
    number: Callable[[float], str] = "{:g}".format


LOSSES = (
    Curve("train/loss", "Training loss", "nats per token"),
    Curve("eval/loss", "Held-out loss", "nats per token"),
)
CURVES = (
    Curve("train/learning_rate", "Learning rate", ""),
    Curve("train/grad_norm", "Gradient norm, before clipping", ""),
    Curve("speed/tokens_per_second", "Tokens per second, padding not counted", "tokens/s", format_count),
)
STEP = Curve("speed/step_seconds", "Seconds per step", "seconds")


def curve_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """The curves of all runs; one run has both losses in one figure, several a line each."""
    drawn = CURVES if len(runs) == 1 else (*LOSSES, *CURVES)
    figures = [_losses(runs[0])] if len(runs) == 1 else []
    figures += [_figure(runs, curve) for curve in drawn]
    return [figure for figure in figures if figure]


def step_figure(run: RunRecord, predicted: float | None) -> Figure | None:
    """Seconds of a step over the run, with the prediction as a line; None if they were not recorded."""
    legend = [Legend("measured", 0)]
    if predicted:
        legend.append(Legend(f"predicted: {format_duration(predicted)}", level=True))
    return _figure([run], STEP, level=predicted, legend=legend)


def points(run: RunRecord, key: str) -> tuple[list[float], list[float]]:
    """Steps and values of a number, without those that are missing, NaN or infinite."""
    found = [(record["step"], record.get(key)) for record in run.metrics]
    finite = [
        (step, value) for step, value in found if isinstance(value, int | float) and math.isfinite(value)
    ]
    steps = [step for step, _ in finite]
    return steps, [float(value) for _, value in finite]


def _losses(run: RunRecord) -> Figure | None:
    """Training and held-out loss of one run."""
    lines = [
        Line(*points(run, curve.key), colour, markers=curve.key == "eval/loss")
        for colour, curve in enumerate(LOSSES)
    ]
    legend = [Legend(curve.title, line.colour) for curve, line in zip(LOSSES, lines, strict=True)]
    return _drawn(Curve("", "Loss", LOSSES[0].unit), lines, legend, ends=True)


def _figure(
    runs: Sequence[RunRecord],
    curve: Curve,
    *,
    level: float | None = None,
    legend: Sequence[Legend] = (),
) -> Figure | None:
    few = curve.key == "eval/loss"
    lines = [Line(*points(run, curve.key), colour, markers=few) for colour, run in enumerate(runs)]
    if len(runs) > 1:
        legend = [Legend(run.name, colour) for colour, run in enumerate(runs)]
    return _drawn(curve, lines, legend, level=level)


def _drawn(
    curve: Curve,
    lines: Sequence[Line],
    legend: Sequence[Legend],
    *,
    level: float | None = None,
    ends: bool = False,
) -> Figure | None:
    """The figure of the lines that have points; None if none has."""
    kept = [line for line in lines if line.steps]
    if not kept:
        return None
    shown = [thinned(line) for line in kept]
    size = max(count for _, count in shown)
    notes = [f"each point is the mean of {size} records"] if size > 1 else []
    if ends:
        notes += [f"last {legend[line.colour].name.lower()}: {line.values[-1]:.4f}" for line in kept]
    svg = curves(
        f"{curve.title} over optimizer steps",
        [line for line, _ in shown],
        unit=curve.unit,
        number=curve.number,
        level=level,
    )
    caption = "; ".join(notes)
    return Figure(curve.title, svg, caption[:1].upper() + caption[1:], legend)

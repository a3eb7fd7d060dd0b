import re
from itertools import pairwise

import pytest

from sft_play.report.curves import curve_figures, line
from sft_play.report.plots import Line, PhaseMemory, curves, histogram, memory_bars, thinned
from sft_play.report.record import RunRecord
from sft_play.units import GIB, MIB


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_long_curve_is_thinned_to_means_that_keep_its_average():
    steps, values = list(range(1000)), [step % 7 for step in range(1000)]
    line, size = thinned(Line(steps, values, 3), limit=100)
    assert (len(line.steps), size, line.colour) == (100, 10, 3)
    assert sum(line.values) / 100 == pytest.approx(sum(values) / 1000)
    assert line.steps[0] == 4.5


def test_a_short_curve_keeps_every_point():
    line = Line([1, 2], [3.0, 4.0])
    assert thinned(line) == (line, 1)


def test_values_that_are_missing_or_not_finite_are_no_points():
    numbers = [1.0, None, float("nan"), float("inf"), "x", 2]
    metrics = [{"step": step, "k": value} for step, value in enumerate(numbers)]
    assert line(RunRecord("one", metrics=metrics), "k") == Line([0, 5], [1.0, 2.0])


def test_steps_are_labelled_by_whole_numbers_and_axes_by_their_units():
    found = texts(curves("Loss", [Line([1, 2], [3.0, 4.0])], unit="nats per token"))
    assert {"1", "2", "optimizer step", "nats per token"} <= set(found) and "1.5" not in found


def test_a_plot_is_the_same_text_whenever_it_is_drawn():
    lines = [Line([1, 2], [3.0, 4.0], markers=True)]
    assert curves("Loss", lines) == curves("Loss", lines)


def test_every_run_is_a_line_of_each_plot_with_its_name_in_the_legend():
    metrics = [{"step": step, "train/loss": 1.0, "train/grad_norm": 2.0} for step in (1, 2)]
    figures = curve_figures([RunRecord(name, metrics=metrics) for name in ("one", "two", "three")])
    loss, difference, norm = figures
    assert (loss.title, norm.title) == ("Training loss", "Gradient norm, before clipping")
    assert difference.title == "Training loss, difference from one"
    assert [entry.name for entry in difference.legend] == ["two", "three", "one"]
    assert difference.caption == "Below 0 is better"
    for figure in (loss, norm):
        assert [entry.name for entry in figure.legend] == ["one", "two", "three"]
        assert {"var(--c1)", "var(--c2)", "var(--c3)"} == set(re.findall(r"var\(--c\d\)", figure.svg))


def test_curves_that_lie_on_each_other_are_told_apart_by_width_and_dashes():
    metrics = [{"step": step, "train/loss": 1.0} for step in (1, 2)]
    figure = curve_figures([RunRecord(name, metrics=metrics) for name in ("one", "two", "three")])[0]
    lines = [style for style in re.findall(r'style="(fill: none[^"]*)"', figure.svg) if "var(--c" in style]
    widths = [float(re.search(r"stroke-width: ([\d.]+)", style)[1]) for style in lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3
    assert ["dasharray" in style for style in lines] == [False, True, False]
    assert [entry.dashed for entry in figure.legend] == [False, True, False]


def test_the_difference_of_losses_is_that_at_the_steps_that_both_runs_have():
    one, two = (
        RunRecord(name, metrics=[{"step": step, "eval/loss": loss} for step, loss in points])
        for name, points in (
            ("one", [(0, 3.0), (10, 2.0), (30, 1.0)]),
            ("two", [(0, 3.0), (10, 1.5), (20, 1.0)]),
        )
    )
    hints = re.findall(r"<title>([^<]*)</title>", curve_figures([one, two])[1].svg)
    assert hints == ["step 0\ntwo 0", "step 10\ntwo -0.5"]
    three = RunRecord("three", metrics=[{"step": 0, "eval/loss": 4.0}, {"step": 15, "eval/loss": 2.0}])
    assert [figure.title for figure in curve_figures([one, three])] == ["Held-out loss"]  # one step in common
    assert [entry.name for entry in curve_figures([one, three, two])[1].legend] == ["two", "one"]


def test_the_axis_of_a_run_that_goes_on_reaches_to_its_last_step():
    short = curves("Loss", [Line([1, 2], [3.0, 4.0])], end=500)
    assert {"0", "500"} <= set(texts(short))
    assert "500" not in texts(curves("Loss", [Line([1, 600], [3.0, 4.0])], end=500))  # it went on for longer


def test_a_curve_of_one_point_shows_it():
    assert "<use" in curves("Loss", [Line([1], [3.0])])


def test_rows_longer_than_the_last_bin_get_a_bar_of_their_own():
    colours = [set(re.findall(r"var\(--c\d\)", histogram("h", 0, 5, [1, 2], longer))) for longer in (0, 7)]
    assert colours == [{"var(--c1)"}, {"var(--c1)", "var(--c2)"}]
    assert hints(histogram("h", 0, 5, [1, 2], 7))[-1] == "10 tokens or more: 7 rows"


@pytest.mark.parametrize(("budget", "shown"), [(2 * GIB, True), (100 * GIB, False), (None, False)])
def test_the_budget_is_a_line_unless_the_bars_would_vanish_beside_it(budget, shown):
    svg = memory_bars("m", [PhaseMemory("load", [("weights", 0, GIB)], GIB + MIB)], budget)
    assert ("var(--accent)" in svg) is shown
    assert {"load", "1.00 GiB", "GiB"} <= set(texts(svg))


def test_the_line_of_the_budget_does_not_cross_the_size_of_a_bar():
    sizes = {"a": int(1.9 * GIB), "b": GIB}
    svg = memory_bars(
        "m", [PhaseMemory(name, [("w", 0, size)], None) for name, size in sizes.items()], 2 * GIB
    )
    left = {text: float(x) for x, text in re.findall(r'x="([\d.]+)" y="[^>]*>([\d.]+ GiB)<', svg)}
    (line,) = re.findall(r'<path d="M ([\d.]+) [^>]*stroke-dasharray', svg)
    assert left["1.00 GiB"] < float(line) < left["1.90 GiB"]


def test_a_phase_that_was_not_measured_has_one_bar():
    one, two = (
        memory_bars("m", [PhaseMemory("save", [("weights", 0, MIB)], found)], None) for found in (None, MIB)
    )
    assert (texts(one).count("1.00 MiB"), texts(two).count("1.00 MiB")) == (1, 2)


def hints(svg: str) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", svg)


def test_a_step_shows_the_values_of_all_lines_there_and_the_strips_cover_the_plot():
    lines = [Line([10, 20, 40], [3.0, 2.0, 1.0], name="train"), Line([20], [2.5], 1, name="held-out")]
    svg = curves("Loss", lines)
    assert hints(svg) == ["step 10\ntrain 3", "step 20\ntrain 2\nheld-out 2.5", "step 40\ntrain 1"]
    strips = [
        tuple(map(float, found))
        for found in re.findall(r'"hint" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    ]
    assert all(width > 0 for _, width in strips)
    for (left, width), (right, _) in pairwise(strips):
        assert left + width == pytest.approx(right, abs=0.11)


def test_names_of_runs_in_hints_are_no_markup():
    assert hints(curves("Loss", [Line([1], [3.0], name="<b>")])) == ["step 1\n&lt;b&gt; 3"]


def test_bars_show_their_bins_and_terms():
    assert hints(histogram("h", 4, 5, [1, 2], 0)) == ["4 to 8 tokens: 1 row", "9 to 13 tokens: 2 rows"]
    svg = memory_bars("m", [PhaseMemory("load", [("weights", 0, GIB), ("adapters", 1, MIB)], None)], None)
    assert hints(svg) == ["weights 1.00 GiB", "adapters 1.00 MiB"]


@pytest.mark.parametrize(("lowest", "logarithmic"), [(0.01, True), (0.5, False), (0.0, False)])
def test_an_axis_is_logarithmic_where_values_span_decades(lowest, logarithmic):
    labels = texts(curves("Loss", [Line([1, 2], [8.0, lowest])]))
    assert ("0.1" in labels, "6" in labels) == (logarithmic, not logarithmic)


def test_an_axis_from_zero_begins_there_whatever_the_values_span():
    assert "0" in texts(curves("Speed", [Line([1, 2], [8000.0, 7000.0])], from_zero=True))
    assert "0" not in texts(curves("Speed", [Line([1, 2], [8000.0, 7000.0])]))

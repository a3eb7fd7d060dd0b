"""What the scaling benchmark makes of its measurements."""

import pytest

from benchmarks.scaling import draw, summarise


def row(processes: int, seconds: list[float], without: list[float]) -> dict:
    return {
        "processes": processes,
        "tokens_per_step": 1000,
        "seconds": seconds,
        "seconds_without_exchange": without,
    }


def test_speed_up_efficiency_and_the_share_of_the_exchange():
    one, two, four = summarise(
        [row(1, [2.0, 9.0, 2.0], []), row(2, [1.25] * 3, [1.0] * 3), row(4, [0.8] * 3, [0.6] * 3)]
    )
    assert (one["speed_up"], one["efficiency"], one["exchange_share"]) == (
        1,
        1,
        0,
    )  # the median: one slow step does not count
    assert (two["tokens_per_second"], two["speed_up"]) == (800, pytest.approx(1.6)) and two[
        "efficiency"
    ] == pytest.approx(0.8)
    assert two["exchange_share"] == pytest.approx(0.2) and four["exchange_share"] == pytest.approx(0.25)


def test_without_a_run_of_one_process_the_first_row_is_what_counts():
    two, four = summarise([row(2, [1.0], [1.0]), row(4, [0.5], [0.5])])
    assert (two["speed_up"], four["speed_up"], four["efficiency"]) == (2, 4, 1)


def test_a_plot_is_drawn(tmp_path):
    draw({"lora": summarise([row(1, [2.0], []), row(2, [1.1], [1.0])])}, "2 cores", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

"""What steps of two kernels in turn say of the second."""

import math

import pytest

from sft_play.planning.speed.timed_kernels import (
    Verdict,
    keep_seconds_to_compile,
    read_verdicts,
    seconds_to_compile,
    winners_of,
    write_verdict,
)
from sft_play.train.kernel_turns import verdict_of

SAME = [[(2.0, 1.0)], [(2.0, 1.0)]]
WEEK_S = 7 * 24 * 3600.0


def turns(beside, own, values=SAME, tolerance=1e-5):
    """The first step of each side warms up."""
    return verdict_of([[9.0, *beside], [9.0, *own]], values, tolerance)


def test_kernels_win_by_more_than_the_spread_of_either_side_and_never_by_less_than_two_percent():
    assert turns([1.0, 1.0, 1.0], [0.97, 0.97, 0.97]).wins
    assert not turns([1.0, 1.0, 1.0], [0.99, 0.99, 0.99]).wins
    assert not turns([0.95, 1.0, 1.05], [0.93, 0.93, 0.93]).wins
    assert not turns([1.0, 1.0, 1.0], [0.8, 0.9, 1.1]).wins
    assert not turns([1.0, 1.0, 1.0], [1.5, 1.5, 1.5]).wins


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ((2.001, 1.0), "their result differs: loss 2.001 instead of 2"),
        ((2.0, 1.05), "their result differs: gradient norm 1.05 instead of 1"),
        ((2.0, math.nan), "their result differs: gradient norm nan instead of 1"),
    ],
)
def test_what_computes_something_else_is_refused_with_both_numbers_however_fast(theirs, said):
    found = turns([1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [[(2.0, 1.0)], [theirs]])
    assert found.problem == said and not found.wins
    assert found.said("Kernels") == f"Kernels: left out, since {said}"


def test_the_fastest_that_won_is_taken_and_asked_again_after_a_week(tmp_path):
    path = tmp_path / "kernels"
    tried = {
        "slower": Verdict(seconds=2.0, beside=1.0),
        "good": Verdict(seconds=0.8, beside=1.0),
        "best": Verdict(seconds=1.4, beside=2.0),
        "wrong": Verdict(problem="memory ran out"),
    }
    for name, verdict in tried.items():
        write_verdict(path, name, verdict, now=lambda: 0.0)
    known = read_verdicts(path, now=lambda: 0.9 * WEEK_S)
    assert set(known) == set(tried) and winners_of(known) == ["best", "good"]
    assert read_verdicts(path, now=lambda: 1.1 * WEEK_S) == {}
    assert winners_of({"slower": tried["slower"], "wrong": tried["wrong"]}) == []
    assert tried["good"].said("Kernels") == "Kernels: a step took 800 ms instead of 1.0 s"
    assert tried["slower"].said("Kernels").endswith(", not a clear gain")


def test_what_takes_long_to_begin_pays_in_a_run_that_gains_more():
    compiled = Verdict(seconds=1.5, beside=2.0, first_seconds=90.0)
    assert compiled.pays(181) and not compiled.pays(180)
    assert (
        compiled.said("Compiled layers")
        == "Compiled layers: a step took 1.5 s instead of 2.0 s, after 1 min 30 s of preparation"
    )
    assert not Verdict(seconds=2.0, beside=2.0).pays(10**9)
    # others take 0.8 of the time, so that it gains 0.1 s a step
    assert compiled.pays(901, 0.8) and not compiled.pays(899, 0.8) and not compiled.pays(10**9, 0.75)


def test_what_was_timed_beside_faster_kernels_is_kept_as_beside_our_own():
    liger = Verdict(seconds=0.8, beside=1.0)
    compiled = Verdict(seconds=0.72, beside=0.9, spread=0.01)
    assert compiled.beside_own(liger).share == pytest.approx(0.64)
    assert winners_of({"liger": liger, "compiled": compiled.beside_own(liger)}) == ["compiled", "liger"]
    for without in (None, Verdict(problem="memory ran out"), Verdict(seconds=1.0, beside=1.0)):
        assert compiled.beside_own(without) is compiled
    wrong = Verdict(problem="memory ran out")
    assert wrong.beside_own(liger) is wrong


def test_the_longest_time_to_compile_is_remembered_for_each_device():
    assert seconds_to_compile("GPU", 91.0) == 91.0
    for seconds in (60.0, 20.0):  # the second time, code was kept
        keep_seconds_to_compile("GPU", seconds)
    assert seconds_to_compile("GPU", 91.0) == 60.0 and seconds_to_compile("another", 91.0) == 91.0

"""What earlier runs say of the seconds of later plans: seconds are injected, and so is the time of day."""

from dataclasses import replace

import pytest

from sft_play.config.schema import RunConfig
from sft_play.planning.speed.measured_speed import (
    HALF_LIFE_S,
    MeasuredSpeed,
    Timing,
    corrected_clock,
    read_speed,
    speed_path,
    speeds_of,
    write_times,
)
from sft_play.planning.speed.profile import derived_from_data_sheet
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

CONFIG = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "t"}})
TOKENS = 500.0  # of a step
SMALL, LARGE = (plan_with(PLAN, micro_batch_tokens=tokens) for tokens in (1000, 4000))
RECOMPUTING = plan_with(LARGE, activations="recompute")
PREDICTED = {SMALL: 2.0, LARGE: 1.9, RECOMPUTING: 2.6}
MONDAY = 1.8e9


@pytest.fixture
def path(tmp_path):
    return tmp_path / "speed"


def keep(path, now, **took):
    """Keeps seconds of steps of plans that were timed in turn at that time, and were predicted."""
    plans = {"small": SMALL, "large": LARGE, "recomputing": RECOMPUTING}
    timed = []
    for name, seconds in took.items():
        plan = replace(plans[name], profile_seconds=PREDICTED[plans[name]])
        timed.append(Timing.of(plan, seconds, seconds / TOKENS))
    write_times(path, timed, lambda: now)


def seconds(path, now=MONDAY):
    """What a plan of that time says of each plan."""
    speed = read_speed(path, lambda: now)
    return {plan: speed.seconds(plan, TOKENS, predicted) for plan, predicted in PREDICTED.items()}


def chosen(path, now=MONDAY):
    found = seconds(path, now)
    return min(found, key=found.__getitem__)


def test_the_latest_run_corrects_all_plans_alike_and_its_own_is_as_it_was_measured(path):
    assert seconds(path) == PREDICTED
    assert read_speed(path).origin_of(SMALL, 2.0) == "profile"
    keep(path, MONDAY, large=2.85)
    assert seconds(path) == pytest.approx({SMALL: 3.0, LARGE: 2.85, RECOMPUTING: 3.9})
    assert {read_speed(path).origin_of(plan, 2.0) for plan in PREDICTED} == {"earlier run"}
    keep(path, MONDAY, large=2.28)  # its steps count instead of its probe
    assert seconds(path)[LARGE] == pytest.approx(2.28)


def test_a_run_beside_a_build_makes_no_plan_lose(path):
    keep(path, MONDAY, large=2.0)
    keep(path, MONDAY + 60, large=6.0)
    assert chosen(path) == LARGE  # all others would take as long
    keep(path, MONDAY + 90, small=2.0)  # asked for by a config, when the machine was idle again
    assert chosen(path) == LARGE and seconds(path)[LARGE] == pytest.approx(1.9)


def test_plans_that_were_timed_in_turn_decide_also_beside_a_build_and_whatever_comes_later(path):
    keep(path, MONDAY, small=3.0, large=3.5, recomputing=4.5)
    assert chosen(path) == SMALL
    assert seconds(path) == pytest.approx({SMALL: 3.0, LARGE: 3.5, RECOMPUTING: 4.5})
    keep(path, MONDAY, small=9.0)  # the steps of the run
    assert seconds(path) == pytest.approx({SMALL: 9.0, LARGE: 10.5, RECOMPUTING: 13.5})
    assert chosen(path) == SMALL


def test_a_plan_that_lost_because_a_build_began_is_taken_again_after_a_while(path):
    keep(path, MONDAY, small=2.0, large=6.0)
    assert chosen(path) == SMALL and seconds(path)[LARGE] == pytest.approx(6.0)
    before, later = MONDAY + 0.9 * HALF_LIFE_S, MONDAY + 1.1 * HALF_LIFE_S
    lately = [read_speed(path).timed_lately(LARGE, now) for now in (before, later)]
    assert lately == [True, False]  # so a run times it again
    assert seconds(path, MONDAY + HALF_LIFE_S)[LARGE] == pytest.approx(1.9 * (6.0 / 1.9) ** 0.5, rel=0.05)
    keep(path, later, small=2.0, large=1.9)
    assert chosen(path, later) == LARGE
    assert read_speed(path).timed_lately(LARGE, later)


def test_what_was_timed_in_an_earlier_run_is_compared_through_what_both_have_timed(path):
    keep(path, MONDAY, small=2.0, large=2.5)
    keep(path, MONDAY + 60, small=6.0, recomputing=6.6)  # beside a build
    assert seconds(path) == pytest.approx({SMALL: 6.0, LARGE: 7.5, RECOMPUTING: 6.6})
    keep(path, MONDAY + 90, large=2.5, recomputing=2.2)  # another order of the same
    keep(path, MONDAY + 95, small=2.0)
    assert seconds(path) == pytest.approx({SMALL: 2.0, LARGE: 2.5, RECOMPUTING: 2.2})


def test_a_comparison_that_has_no_plan_in_common_replaces_an_earlier_one(path):
    keep(path, MONDAY, small=2.0, large=3.8)
    other = plan_with(SMALL, micro_batch_tokens=2000, profile_seconds=2.0)
    times = [Timing.of(plan, 2.0, 0.004) for plan in (other, plan_with(other, micro_batch_tokens=3000))]
    write_times(path, times, lambda: MONDAY)
    assert len(read_speed(path).rivals) == 2 and chosen(path) == LARGE


@pytest.mark.parametrize(("tokens", "alike"), [(985, True), (1015, True), (970, False), (1100, False)])
def test_micro_batches_with_about_as_many_tokens_are_alike(path, tokens, alike):
    keep(path, MONDAY, small=4.0, large=1.9)  # ratios 2 and 1, of which the mean is the square root of 2
    near = plan_with(SMALL, micro_batch_tokens=tokens)
    speed = read_speed(path, lambda: MONDAY)
    assert speed.seconds(near, TOKENS, 2.0) == pytest.approx(4.0 if alike else 2.0 * 2**0.5)


def test_a_step_that_was_not_predicted_does_not_correct_others(path):
    """The first run of several processes: communication is measured after its plan was made."""
    write_times(path, [Timing.of(LARGE, 6.0, 0.012)], lambda: MONDAY)
    assert seconds(path) == PREDICTED  # all are predicted by now
    speed = read_speed(path)
    assert speed.origin_of(LARGE, 1.9) == "profile" and speed.origin_of(LARGE, None) == "earlier run"
    # as long as nothing is predicted, there is what was measured
    assert speed.seconds(LARGE, TOKENS, None) == pytest.approx(6.0)
    assert speed.seconds(SMALL, TOKENS, None) is None and speed.origin_of(SMALL, None) == "profile"
    keep(path, MONDAY, small=4.0)
    assert seconds(path)[LARGE] == pytest.approx(3.8)
    write_times(
        path, [Timing.of(RECOMPUTING, 60.0, 0.12)], lambda: MONDAY
    )  # unpredicted, as of another engine
    assert seconds(path)[LARGE] == pytest.approx(3.8)


def test_plans_that_were_timed_but_not_predicted_are_timed_again(path):
    times = [Timing.of(plan, took, took / TOKENS) for plan, took in ((SMALL, 2.0), (LARGE, 3.0))]
    write_times(path, times, lambda: MONDAY)
    speed = read_speed(path, lambda: MONDAY)
    assert [speed.seconds(plan, TOKENS, None) for plan in (SMALL, LARGE)] == pytest.approx([2.0, 3.0])
    assert seconds(path) == PREDICTED and not speed.timed_lately(SMALL, MONDAY)
    keep(path, MONDAY, small=2.0, large=3.0)
    assert chosen(path) == SMALL and read_speed(path).timed_lately(SMALL, MONDAY)


def test_plans_that_a_run_may_have_instead_share_a_file_and_what_changes_predictions_begins_another(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    profile = derived_from_data_sheet("this one", "cpu", 1e11, 1e10)
    about = "{}", "card", CONFIG
    path = speed_path(*about, SMALL, profile)
    others = (LARGE, RECOMPUTING, plan_with(SMALL, engine="ddp", defers_exchange=True, kept_layers=3))
    assert {speed_path(*about, plan, profile) for plan in others} == {path}
    assert speed_path(*about, plan_with(SMALL, world_size=2), profile) != path
    assert speed_path(*about, SMALL, replace(profile, call_forward_s=1.0)) != path
    assert speed_path(*about, SMALL, None) != path
    predicted = replace(SMALL, profile_seconds=2.0)
    write_times(path, [Timing.of(predicted, 3.0, 0.006)])
    clock = corrected_clock(
        lambda config, plan: PREDICTED[plan], speeds_of("{}", "card", profile), lambda plan: TOKENS
    )
    assert [clock(CONFIG, plan) for plan in PREDICTED] == pytest.approx([3.0, 2.85, 3.9])
    write_times(path, [Timing.of(predicted, 4.0, 0.008)])
    assert clock(CONFIG, SMALL) == pytest.approx(3.0)  # a clock keeps what it has read


@pytest.mark.parametrize("text", ["", "{", "[]", '{"latest": 3}'])
def test_a_file_that_cannot_be_read_corrects_nothing(path, text):
    path.write_text(text)
    assert read_speed(path) == MeasuredSpeed()


def test_how_much_a_comparison_counts_does_not_grow_with_a_clock_that_was_set_back(path):
    keep(path, MONDAY, small=2.0, large=6.0)
    assert seconds(path, MONDAY - HALF_LIFE_S) == seconds(path, MONDAY)

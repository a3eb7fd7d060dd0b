"""What the benchmark of seconds on several processes makes of its lines."""

import pytest

from benchmarks.sharding_time import ENGINES, PLACES, places_of, summary, totals


def lines(world: int, measured: dict[str, tuple[float, ...]], chosen: str) -> list[dict]:
    """A line for each round of each engine; all are predicted to take a second."""
    return [
        {
            "case": "2M-full-even", "processes": world, "engine": engine, "round": number, "predicted": 1.0,
            "measured": seconds, "chosen": engine == chosen, "plan": {},
        }
        for engine, rounds in measured.items()
        for number, seconds in enumerate(rounds)
    ]  # fmt: skip


def test_regret_is_that_of_the_chosen_engine_by_medians_of_rounds():
    seconds = {"ddp": (1.0, 1.2, 9.0), "deepspeed_z2": (1.0, 1.0, 1.0), "fsdp2": (2.0, 2.0, 2.0)}
    (found,) = summary(lines(2, seconds, "ddp"))
    assert (found["chosen"], found["best"], found["rounds"]) == ("ddp", "deepspeed_z2", 3)
    assert found["regret"] == pytest.approx(0.2)
    assert found["errors"]["fsdp2"] == pytest.approx(-0.5)
    alone = lines(1, {"none": (1.0,)}, "none")
    reached = totals([found, *summary(alone)])
    assert reached["regret_worst"] == pytest.approx(0.2)
    assert reached["error_by_engine"]["none"] == 0


def test_what_an_interruption_left_incomplete_is_not_compared():
    assert summary(lines(4, {"ddp": (1.0,), "fsdp2": (1.0,)}, "ddp")) == []


def test_every_other_round_goes_back():
    assert places_of(0) == PLACES and places_of(1) == PLACES[::-1]
    assert {engine for world, engine in PLACES if world > 1} == set(ENGINES)

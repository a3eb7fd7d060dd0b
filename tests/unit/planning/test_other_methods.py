"""The same run by other methods and on other GPUs: what is named fits, and no plan of it is slower."""

import pytest

from sft_play.config.methods import METHODS
from sft_play.machine.gpus import what_if
from sft_play.planning.answers import other_methods
from sft_play.planning.answers.other_methods import cheapest_ways, plan_in_ram
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.sizing.estimator import Traces
from tests.unit.planning.test_advice import request

FOUND = {"gpus": 1, "engine": "none", "tokens_per_second": 1.0}


def on_a_4090(limit_gib: float, mode: str) -> Request:
    return request(limit_gib, mode).changed(machine=what_if("RTX 4090"))


@pytest.fixture(scope="module")
def planned():
    """A run and its plan."""
    asked = on_a_4090(1.5, "lora")
    return asked, fastest_plan(asked, explain=False)


def test_each_method_has_a_plan_that_fits_and_the_planned_one_is_as_it_is(planned):
    asked, chosen = planned
    rows = {row["method"]: row for row in other_methods.other_methods(asked, chosen, fewer=False)}
    assert list(rows) == list(METHODS) and all(row["fits"] for row in rows.values())
    assert rows["lora"]["tokens_per_second"] == asked.facts.tokens_per_second(chosen)
    budget = chosen.memory.budget_bytes
    assert all(row["process_bytes"] <= budget for row in rows.values())
    assert (
        rows["full"]["offload"] == "ram" and rows["full"]["ram_bytes"] > 0
    )  # its weights alone are too much
    fastest = fastest_plan(asked.changed({"tuning.mode": "qlora"}), explain=False)
    assert rows["qlora"]["hours"] >= 0.99 * fastest.step_seconds * fastest.schedule.total_steps / 3600


def test_weights_that_are_too_much_are_not_traced_and_what_contradicts_is_left_out(planned, monkeypatch):
    asked, chosen = planned
    asked = asked.changed({"parallel.offload": "none"})
    traced = []
    monkeypatch.setattr(Traces, "_traced", lambda self, spec: traced.append(spec.mode))
    small = asked.changed({"parallel.memory_gib": 0.6})
    monkeypatch.setattr(other_methods, "METHODS", ("full", "lora"))
    assert other_methods.other_methods(small, chosen, fewer=False)[0] == {"method": "full", "fits": False}
    assert not traced
    monkeypatch.setattr(other_methods, "METHODS", ("qlora", "lora"))
    decomposed = asked.changed({"tuning.lora.init": "pissa"})
    assert [row["method"] for row in other_methods.other_methods(decomposed, chosen, fewer=False)] == ["lora"]


def test_fewer_gpus_do_for_a_lighter_method_where_nobody_said_how_many(planned, monkeypatch):
    asked, chosen = planned
    tried = []
    monkeypatch.setattr(other_methods, "plan_like", lambda run, like: tried.append(run.processes) or chosen)
    two = asked.on_gpus(2)
    assert other_methods.other_methods(two, chosen, fewer=True)[2]["gpus"] == 1 and tried == [1, 1]
    other_methods.other_methods(two, chosen, fewer=False)
    assert tried[2:] == [2, 2]


def test_the_cheapest_way_is_the_fewest_gpus_or_by_prices_what_costs_least(planned, monkeypatch):
    cards = [
        {"gpu": name, "total_bytes": size * 2**30, "plans": {"lora": FOUND | {"gpus": gpus, "hours": hours}}}
        for name, size, gpus, hours in (("RTX 4090", 24, 2, 3.0), ("L40S", 45, 1, 5.0), ("H200", 140, 1, 2.0))
    ]
    asked, _ = planned
    monkeypatch.setattr(other_methods, "plan_in_ram", lambda request: None)
    assert [row["gpu"] for row in cheapest_ways(asked, ["lora"], cards)] == ["L40S"]
    monkeypatch.setattr(other_methods, "price_of", {"RTX 4090": 0.4, "H200": 4.0}.get)
    assert [row["gpu"] for row in cheapest_ways(asked, ["lora"], cards)] == ["RTX 4090"]


def test_a_smaller_gpu_with_weights_in_ram_is_a_way_too(planned):
    asked, _ = planned
    asked = asked.changed({"tuning.mode": "full"})
    cards = [
        {"gpu": name, "total_bytes": size * 2**30, "plans": {"full": FOUND | {"hours": 1.0}}}
        for name, size in (("RTX 4090", 24), ("H200", 140))
    ]
    cards[0]["plans"]["full"] = {"problem": "does not fit"}
    ways = cheapest_ways(asked, ["full"], cards)
    assert [(row["gpu"], row["gpus"]) for row in ways] == [("H200", 1), ("RTX 4090", 1)]
    assert ways[1]["offload"] == "ram" and ways[1]["ram_bytes"] == plan_in_ram(asked).memory.host.needed_bytes

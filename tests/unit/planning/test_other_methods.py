"""The same run by other methods and on other GPUs: what is named fits, and no plan of it is slower."""

from dataclasses import replace

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.config.methods import METHODS
from sft_play.machine.gpus import what_if
from sft_play.planning.allowed import candidates
from sft_play.planning.answers import other_methods as answers
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.facts.architecture import Architecture
from tests.unit.planning.test_advice import request

DEEP = WIDE | dict(hidden=1024, inner=4096, heads=8, groups=8, head_dim=128, layers=36)
MODEL = Architecture.of(small_config("llama", DEEP))  # 2.3 GiB in fp32
FOUND = {"gpus": 1, "engine": "none", "tokens_per_second": 1.0, "hours": 1.0}


def asked(gib: float = 2.3, **settings) -> Request:
    """LoRA on an RTX 4090 of which a process may use so much."""
    run = request(gib).changed({"parallel.offload": "auto"} | settings, machine=what_if("RTX 4090"))
    return replace(run, architecture=MODEL)


def cards(mode: str, *rows):
    """Rows of a table of GPUs: name, GiB, and the plan of one mode."""
    return [{"gpu": name, "total_bytes": gib * 2**30, "plans": {mode: plan}} for name, gib, plan in rows]


@pytest.mark.thorough
def test_each_method_has_a_plan_that_fits_and_the_planned_one_is_as_it_is():
    run = asked()
    chosen = fastest_plan(run, explain=False)
    rows = {row["method"]: row for row in answers.other_methods(run, chosen, fewer=False)}
    assert list(rows) == list(METHODS) and all(row["fits"] for row in rows.values())
    assert all(row["process_bytes"] <= chosen.memory.budget_bytes for row in rows.values())
    assert rows["lora"]["tokens_per_second"] == run.facts.tokens_per_second(chosen)
    assert rows["full"]["offload"] == "ram" and rows["full"]["ram_bytes"] > 2**30  # its weights are too much
    fastest = fastest_plan(run.changed({"tuning.mode": "qlora"}), explain=False)
    assert rows["qlora"]["hours"] >= 0.99 * answers.run_hours(fastest)


@pytest.mark.thorough
def test_a_smaller_gpu_with_weights_in_ram_is_a_way_too():
    run = asked().changed({"tuning.mode": "full"})
    table = cards("full", ("RTX 4090", 24, {"problem": "does not fit"}), ("H200", 140, FOUND))
    ways = answers.cheapest_ways(run, ["full"], table)
    assert [(row["gpu"], row["gpus"]) for row in ways] == [("H200", 1), ("RTX 4090", 1)]
    in_ram = answers.plan_in_ram(run)
    assert ways[1]["offload"] == "ram" and ways[1]["ram_bytes"] == in_ram.memory.host.needed_bytes


def test_weights_that_are_too_much_are_not_traced(monkeypatch):
    monkeypatch.setattr(Traces, "step", lambda self, spec: pytest.fail("a step was traced"))
    monkeypatch.setattr(answers, "METHODS", ("full",))
    run = asked(**{"parallel.offload": "none"})
    found = answers.other_methods(run, candidates(run)[0], fewer=False)
    assert found == [{"method": "full", "fits": False}]


def test_a_method_that_contradicts_the_settings_is_left_out(monkeypatch):
    monkeypatch.setattr(answers, "METHODS", ("qlora",))
    lora = asked().config.tuning.lora.model_copy(update={"init": "pissa"})
    run = asked(**{"tuning.lora": lora})
    assert answers.other_methods(run, candidates(run)[0], fewer=False) == []


@pytest.mark.parametrize(("fewer", "tried"), [(True, [1, 2]), (False, [2])])
def test_fewer_gpus_do_for_another_method_where_nobody_said_how_many(fewer, tried, monkeypatch):
    counts = []
    monkeypatch.setattr(answers, "METHODS", ("qlora",))
    monkeypatch.setattr(answers, "plan_in_ram", lambda run: None)
    monkeypatch.setattr(answers, "plan_like", lambda run, like: counts.append(run.processes))
    run = asked().on_gpus(2)
    answers.other_methods(run, candidates(run)[0], fewer=fewer)
    assert counts == tried


def test_the_cheapest_way_is_the_fewest_gpus_or_by_prices_what_costs_least(monkeypatch):
    table = cards(
        "lora",
        ("RTX 4090", 24, FOUND | {"gpus": 2, "hours": 3.0}),
        ("L40S", 45, FOUND | {"hours": 5.0}),
        ("H200", 140, FOUND | {"hours": 2.0}),
    )
    monkeypatch.setattr(answers, "plan_in_ram", lambda run: None)
    monkeypatch.setattr(answers, "price_of", {}.get)
    assert [row["gpu"] for row in answers.cheapest_ways(asked(), ["lora"], table)] == ["L40S"]
    monkeypatch.setattr(answers, "price_of", {"RTX 4090": 0.4, "H200": 4.0}.get)
    assert [row["gpu"] for row in answers.cheapest_ways(asked(), ["lora"], table)] == ["RTX 4090"]

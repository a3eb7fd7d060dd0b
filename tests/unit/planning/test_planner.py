"""Planning a run from data, model and machine: facts of the rows, budgets, the same run on more processes."""

import json
import os
import platform
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.data.prepare import PreparedData
from sft_play.data.stats import SPLITS
from sft_play.errors import ConfigError
from sft_play.machine.allocator import VARIABLES, set_allocator
from sft_play.machine.gpus import Machine, what_if
from sft_play.machine.host import Host
from sft_play.plan import Plan
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.answers.other_machines import scaling
from sft_play.planning.budget import memory_device, memory_of_a_process, training_device
from sft_play.planning.candidates.batch import BatchSplit
from sft_play.planning.explain import waiting_reasons
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.devices import Collectives, profile_of, write_collectives
from sft_play.planning.speed.measured_speed import Timing, speed_path, write_times
from sft_play.planning.speed.profile import Curve
from sft_play.report.plan import plan_report
from sft_play.sizing.estimate import memory
from sft_play.sizing.estimate.budget import guard
from sft_play.sizing.estimate.corrections import (
    ProbeResult,
    record_path,
    write_overhead,
    write_ran_out,
    write_record,
)
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import Batch, JoinedRows, PaddedRows, StepSpec
from sft_play.units import GIB, MIB
from tests.plans import plan_with
from tests.unit.report.test_plan import screen
from tests.unit.train.plans import PLAN

HOST = Host(
    cpu_model=None,
    cpu_cores=2,
    cpu_bf16=None,
    ram_total_bytes=24 * GIB,
    ram_free_bytes=16 * GIB,
    ram_limited=False,
)
CPU = Machine(gpus=(), note="", host=HOST)
# For tests of what a plan says: it chooses among few plans, of which others take more traces.
DECIDED = dict(memory_gib=2, batch_size=2, gradient_checkpointing=True)
LENGTHS = np.random.default_rng(0).integers(36, 65, 1000)
FACTS = DataFacts(LENGTHS, LENGTHS, longest_row=64, mean_tokens=50.0, mean_squared_tokens=2570.0, seed=0)
MODEL = Architecture.of(small_config("llama", WIDE))


def run(mode="lora", memory_gib="auto", **train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "some/model"},
            "data": {"train_path": "x"},
            "tuning": {"mode": mode},
            "train": train,
            "parallel": {"memory_gib": memory_gib},
        }
    )


def request(config: RunConfig, machine: Machine) -> Request:
    return Request(config, MODEL, FACTS, machine, 1)


def planned(config: RunConfig, machine: Machine) -> Plan:
    return fastest_plan(request(config, machine))


def test_rows_are_padded_for_noise_that_is_scaled_by_their_length():
    drafts, reasons = allowed_plans(request(run(neftune_noise_alpha=5), CPU))
    assert drafts and not any(draft.rows.joined for draft in drafts)
    assert "rows are padded: NEFTune scales its noise by the length of a row" in map(str, reasons)


def scaled_runs(config: RunConfig, machine: Machine) -> list[dict]:
    return scaling(request(config, machine))


def facts(
    rows: list[tuple[int, int]], tmp_path, *, packing: bool = False, val: list[int] | None = None
) -> DataFacts:
    """Of rows given as (tokens, supervised tokens)."""
    config = RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "data": {"train_path": "t"},
            "train": {"packing": packing, "effective_batch_size": 256},
        }
    )
    train = [{"length": n, "labels": [-100] * (n - learned) + [1] * learned} for n, learned in rows]
    validation = Dataset.from_list([{"length": n, "labels": [1] * n} for n in val]) if val else None
    stats = dict.fromkeys(SPLITS)
    data = PreparedData(
        Dataset.from_list(train), validation, None, max_seq_len=64, stats=stats, cache_path=tmp_path
    )
    return DataFacts.of(data, config)


def split(accumulation: int, effective: int = 4) -> BatchSplit:
    return BatchSplit(effective, accumulation, 1)


def test_the_largest_micro_batch_of_a_run_is_known_before_it_starts(tmp_path):
    found = facts([(10, 8), (40, 20), (12, 2), (30, 9)], tmp_path, val=[25, 30])
    assert (found.rows, found.longest_row, found.mean_tokens) == (4, 40, 23.0)
    assert found.largest_micro_batch(split(1), 3, 64, True) == (92, 39)  # all rows of a step
    assert found.largest_micro_batch(split(4), 3, 64, True) == (40, 20)  # one row each
    assert found.largest_micro_batch(split(2), 3, 64, True)[0] in range(46, 53)
    assert found.largest_micro_batch(split(2), 3, 64, False)[0] == 2 * 40  # padded: two of the longer rows


def test_evaluation_batches_are_as_large_as_the_token_budget(tmp_path):
    found = facts([(10, 8), (40, 20)], tmp_path, val=[25, 30, 8])
    plan = plan_with(PLAN, micro_batch_tokens=40, micro_batch_size=2, effective_batch_size=2)
    assert evaluated(found, plan) == [JoinedRows(38), JoinedRows(25)]
    # a long row has a batch of its own
    assert evaluated(found, plan_with(plan, micro_batch_tokens=20)) == [JoinedRows(n) for n in (30, 25, 8)]
    padded = plan_with(plan, padding_free=False, micro_batch_tokens=64)
    assert evaluated(found, padded) == [PaddedRows(2, 32), PaddedRows(1, 8)]
    assert evaluated(found, plan_with(padded, micro_batch_tokens=20)) == [
        PaddedRows(1, width) for width in (32, 32, 8)
    ]
    assert evaluated(facts([(10, 8)], tmp_path), plan) == []


def evaluated(found: DataFacts, plan) -> list[Batch]:
    """The batches of an evaluation."""
    return [each.batch for each in found.batches_of(plan, 64).evaluation]


def test_the_micro_batches_that_may_need_most_have_the_rows_of_the_run(tmp_path):
    """Of two micro-batches, the first one finds no gradients; a changed plan would need other rows."""
    found = facts([(10, 8), (40, 20), (12, 2), (30, 9)], tmp_path)
    two = dict(effective_batch_size=4, micro_batch_size=2, total_steps=1)
    tokens, supervised = found.largest_micro_batch(split(2), 1, 64, True)
    plan = plan_with(PLAN, **two, gradient_accumulation_steps=2, micro_batch_tokens=tokens)
    train = found.batches_of(plan, 64).train
    assert {each.first for each in train} == {True, False}
    assert sorted(length for each in train for length in each.lengths) == [10, 12, 30, 40]
    assert all(sum(each.lengths) == each.tokens for each in train)
    assert max(each.supervised for each in train) == supervised
    assert found.batches_of(plan_with(plan, micro_batch_tokens=tokens + 1), 64).train == ()
    whole = plan_with(plan, gradient_accumulation_steps=1, micro_batch_tokens=92)
    assert [(each.tokens, each.supervised, each.first) for each in found.batches_of(whole, 64).train] == [
        (92, 39, False)
    ]


def test_packed_sequences_are_filled_with_rows(tmp_path):
    found = facts([(10, 8), (40, 20)], tmp_path, packing=True)
    assert (found.rows, found.longest_row) == (1, 64)
    assert found.largest_micro_batch(split(1, effective=1), 1, 64, True) == (50, 28)


def test_what_an_earlier_probe_saw_beside_tensors_replaces_the_assumption(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    machine = what_if("A100 80GB", 2)
    assumed = memory_device(run(), machine, 2)
    assert assumed.assumed == ("context", "communicator")
    write_overhead(machine.gpus[0].name, machine.driver, 2, 800 * MIB)
    measured = memory_device(run(), machine, 2)
    assert measured.assumed == ()
    assert measured.context_bytes == 800 * MIB
    assert measured.budget_bytes == assumed.budget_bytes
    assert memory_device(run(), machine, 1).assumed == ("context",)
    assert measured.budget_bytes < 80 * GIB


def test_a_process_may_take_what_is_free_or_less_if_the_config_says_so():
    assert memory_of_a_process(run(), CPU, 1) == 16 * GIB
    assert memory_of_a_process(run(), CPU, 4) == 4 * GIB
    assert memory_of_a_process(run(memory_gib=3), CPU, 4) == 3 * GIB
    assert (
        memory_of_a_process(run(memory_gib=20), CPU, 1) == 16 * GIB
    )  # it is there, but somebody else has it
    machine = what_if("RTX 4090", 2)
    assert memory_of_a_process(run(), machine, 2) == machine.gpus[0].free_bytes
    assert memory_of_a_process(run(memory_gib=0.5), machine, 2) == GIB // 2


def test_the_fullest_gpu_decides():
    machine = what_if("RTX 4090", 2)
    second = replace(machine.gpus[1], free_bytes=5 * GIB)
    assert memory_of_a_process(run(), replace(machine, gpus=(machine.gpus[0], second)), 2) == 5 * GIB


@pytest.mark.parametrize(
    ("machine", "processes", "asked", "message"),
    [
        (
            what_if("RTX 4090"),
            1,
            24,
            r"memory_gib=24: NVIDIA GeForce RTX 4090 has 23.99 GiB.*allowed: up to 23.98, or auto",
        ),
        (
            CPU,
            1,
            25,
            (
                r"memory_gib=25: the RAM has .* 24.00 GiB, of which 16.00 GiB are free; "
                r"allowed: up to 24, or auto"
            ),
        ),
        (CPU, 2, 13, r"each of 2 processes 12.00 GiB"),
    ],
)
def test_more_than_there_is_cannot_be_asked_for(machine, processes, asked, message):
    with pytest.raises(ConfigError, match=message):
        memory_of_a_process(run(memory_gib=asked), machine, processes)


def test_only_a_mixture_has_experts_to_balance():
    with pytest.raises(
        ConfigError, match=r"router_aux_loss_coef=0\.01 balances the experts .* leave it at 0"
    ):
        planned(run(router_aux_loss_coef=0.01), CPU)


@pytest.mark.thorough
def test_the_limit_is_the_budget_and_both_are_in_the_reasons():
    machine = what_if("RTX 4090")
    budget = memory_device(run(memory_gib=2), machine, 1)
    assert budget.budget_bytes == 2 * GIB - guard("cuda", 2 * GIB).bytes
    plan = planned(run(**DECIDED), machine)
    assert plan.memory.budget_bytes == budget.budget_bytes and plan.memory.guard_bytes == budget.guard.bytes
    assert "each process may use 2 GiB (parallel.memory_gib)" in plan.why
    assert any(reason.startswith("guard 256.00 MiB: ") for reason in plan.why)


def test_a_limit_above_what_is_free_says_what_is_free():
    plan = planned(run(**DECIDED | {"memory_gib": 20}), CPU)
    assert "each process may use 20 GiB (parallel.memory_gib), but only 16.00 GiB are free" in plan.why


@pytest.mark.thorough
def test_more_processes_keep_the_effective_batch_and_the_rate_unless_told_otherwise():
    rows = scaled_runs(run(effective_batch_size=16), what_if("H100"))
    assert [row["world_size"] for row in rows] == [1, 2, 4, 8]
    assert {row["effective_batch_size"] for row in rows} == {16}
    assert all(row["learning_rates"] == dict.fromkeys(("none", "sqrt", "linear"), 2e-4) for row in rows)
    assert rows[0]["speed_up"] == 1 and rows[0]["exchanged_bytes"] == 0
    sent = [row["exchanged_bytes"] for row in rows[1:]]
    assert sent == sorted(sent) and sent[0] > 0
    for row in rows[1:]:
        assert 0 < row["speed_up"] < row["speed_up_at_most"]  # what is exchanged costs time


def test_a_fixed_micro_batch_grows_the_effective_one_and_the_rates_follow_by_their_rules():
    rows = scaled_runs(run(batch_size=2, grad_accum=2), what_if("H100"))
    assert [row["effective_batch_size"] for row in rows] == [4, 8, 16, 32]
    assert [row["steps_per_epoch"] for row in rows] == [250, 125, 63, 32]
    last = rows[-1]["learning_rates"]
    assert last == {"none": 2e-4, "sqrt": pytest.approx(2e-4 * 8**0.5), "linear": pytest.approx(16e-4)}
    assert rows[-1]["learning_rate"] == 2e-4 and rows[-1]["reference_batch_size"] == 4
    scaled = scaled_runs(
        run(batch_size=2, grad_accum=2, lr_scaling="linear", reference_batch_size=8),
        what_if("H100"),
    )
    assert all(row["learning_rate"] == pytest.approx(row["learning_rates"]["linear"]) for row in scaled)


def test_a_plan_says_that_processes_wait_for_the_one_with_the_most_tokens():
    def said(rows: int, ranks: int) -> list[str]:
        split = dict(effective_batch_size=rows, micro_batch_size=rows // ranks, world_size=ranks)
        plan = plan_with(PLAN, engine="ddp", gradient_accumulation_steps=1, total_steps=100, **split)
        return waiting_reasons(request(run(), CPU), plan)

    longest = FACTS.largest_micro_batch(BatchSplit(8, 1, 8), 100, MODEL.facts.hidden_size, True)[0]
    [sentence] = said(8, ranks=8)
    waited = int(re.search(r"waits (\d+)% of a step", sentence)[1])
    assert 100 * (1 - 50 / 60) < waited <= 100 * (1 - 50 / longest)  # rows of 50 tokens, and at most 64
    assert said(64, ranks=8) == said(1, ranks=1) == []


@pytest.mark.thorough
def test_without_a_known_link_the_speed_up_has_an_upper_bound_only():
    rows = scaled_runs(run(effective_batch_size=16), CPU)
    assert rows[0]["speed_up"] == 1
    # the calls of so small a model take as long for fewer rows, and the busiest of eight has a few more
    assert all(row["speed_up"] is None and row["speed_up_at_most"] > 0.9 for row in rows[1:])


@pytest.mark.thorough
def test_what_a_step_sends_for_divided_tokens_does_not_depend_on_the_split():
    sent = []
    for rows, accumulation in ((1, 8), (8, 1)):
        asked = request(
            run(gradient_checkpointing=False, batch_size=rows, grad_accum=accumulation), what_if("H100")
        )
        sent.append(scaling(asked.in_groups_of(2))[1]["exchanged_bytes"])
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_numbers_of_processes_that_cannot_be_say_why():
    rows = scaled_runs(run(effective_batch_size=6), what_if("H100"))
    assert "fewer than the 8 processes; set it to 8 or more" in rows[3]["problem"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "capability", "kernels"),
    [
        ("T4", (7, 5), (7, 5)),
        ("A100", (8, 0), (8, 0)),
        ("H100", (9, 0), (8, 0)),
        ("RTX 5090", (12, 0), (8, 6)),
    ],
)
def test_a_plan_is_priced_with_the_kernels_of_its_gpu(name, capability, kernels):
    plan = planned(run(memory_gib=2), what_if(name))
    assert plan.compute_capability == capability
    assert StepSpec.of(run(), plan).compute_capability == kernels
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.thorough
def test_the_plan_says_what_is_trained_beside_the_adapters_and_needs_memory_for_it():
    tree = run(**DECIDED).model_dump()
    tree["model"]["new_tokens"] = ["<a>", "<b>"]
    tokens = RunConfig.model_validate(tree)
    tree["model"]["new_tokens"] = []
    tree["tuning"]["lora"]["modules_to_save"] = ["embed_tokens", "input_layernorm"]
    whole = RunConfig.model_validate(tree)
    plain, rows, modules = (
        planned(config, what_if("RTX 4090")) for config in (run(**DECIDED), tokens, whole)
    )
    trained = "2 new tokens: 1,024 parameters of the embedding and output head are trained for them"
    assert trained in rows.why
    assert any(why.startswith("1,025,024 parameters of 5 modules are trained in full") for why in modules.why)
    assert plain.memory.peak_bytes < rows.memory.peak_bytes
    # an embedding of 4,000 x 256 in fp32, its gradient and two moments
    assert modules.memory.peak_bytes - plain.memory.peak_bytes > 4 * 4 * 4000 * 256


@pytest.mark.thorough
def test_of_different_gpus_the_oldest_decides_and_an_unknown_one_is_said_to_be_assumed():
    both = what_if("A100", 2)
    mixed = replace(both, gpus=(both.gpus[0], what_if("T4").gpus[0]))
    assert training_device(mixed).compute_capability == (7, 5)
    unknown = replace(both, gpus=(replace(both.gpus[0], compute_capability=None),))
    plan = planned(run(**DECIDED), unknown)
    assert any("compute capability unknown" in reason and "8.0" in reason for reason in plan.why)
    assert StepSpec.of(run(), plan).compute_capability == (8, 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("RTX 4090", "lora", r"in 1 published run with 16-bit .* 8\.9: allocated [^ ]*%, reserved [^ ]*%$"),
        pytest.param(
            "T4",
            "qlora",
            r"in \d\d published runs with 4-bit .* 7\.5: allocated .* to .*, process .* to .*%$",
            marks=pytest.mark.slow,
        ),
        ("A100", "lora", r"no measurements on compute capability 8\.0 are published"),
        ("H100", "lora", r"^guard .*from under-predictions of at most .* on an H200|^guard .*the minimum"),
    ],
)
def test_the_plan_says_what_is_known_of_errors_on_such_gpus(name, mode, said):
    plan = planned(run(mode, memory_gib=2), what_if(name))
    assert any(re.search(said, reason) for reason in plan.why)


@pytest.mark.parametrize(
    ("environment", "kernel", "expandable"),
    [
        ({}, "6.8.0-45-generic", True),
        ({}, "5.15.153.1-microsoft-standard-WSL2", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "5.15.153.1-microsoft-standard-WSL2", True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "6.8.0-45-generic", False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "6.8.0-45-generic", False),
    ],
)
def test_the_allocator_is_the_one_that_the_environment_asks_for(environment, kernel, expandable, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(release=kernel))
    set_allocator()
    asked = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    assert asked == (
        environment or ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {})
    )
    assert memory_device(run(), what_if("T4"), 1).expandable == expandable


@pytest.mark.thorough
def test_a_plan_for_a_gpu_says_what_the_process_takes_and_what_is_known_of_errors():
    plan = planned(run(memory_gib=4), what_if("T4"))
    tree = plan.to_json()["memory"]
    assert tree["peak_bytes"] < tree["reserved_bytes"] < tree["process_bytes"] <= tree["budget_bytes"]
    assert tree["process_bytes"] == tree["reserved_bytes"] + tree["terms"]["context"]
    assert any("errors in " in reason and "7.5: allocated -" in reason for reason in plan.why)
    assert any("memory-efficient kernel" in reason for reason in plan.why)
    unmeasured = planned(run(memory_gib=4), what_if("RTX 3090"))
    assert any("no measurements on compute capability 8.6" in reason for reason in unmeasured.why)


@pytest.mark.thorough
def test_fragmentation_decides_in_the_end(monkeypatch):
    """A plan that the search takes for roomy is dropped if its replay shows that it does not fit."""
    budget = 4 * GIB
    first = planned(run(memory_gib=4), what_if("T4"))
    largest = first.rows.most_tokens
    whole = memory.reserved_bytes

    def much_for_the_largest(step, peak_bytes, device, warmup_bytes):
        is_largest = peak_bytes >= first.memory.peak_bytes
        return budget if is_largest else whole(step, peak_bytes, device, warmup_bytes)

    monkeypatch.setattr(memory, "reserved_bytes", much_for_the_largest)
    second = planned(run(memory_gib=4), what_if("T4"))
    assert second.rows.most_tokens < largest
    assert not any(row["fits"] and row["process_bytes"] > budget for row in second.alternatives)


@pytest.mark.thorough
def test_a_step_over_a_link_that_may_be_one_or_another_is_a_range_with_its_reason(tmp_path, monkeypatch):
    pair = what_if("RTX 3090", 2)
    config = run(mode="full", **DECIDED, effective_batch_size=4).changed({"parallel.engine": "ddp"})
    plan = fastest_plan(Request(config, MODEL, FACTS, pair, 2), explain=False)
    least, most = plan.step_seconds_range
    assert least < plan.step_seconds == most
    assert plan.step_seconds_range_reason == "with an NVLink bridge, or through RAM over PCIe 4.0 x 8"
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.step_seconds_range == (least, most)
    shown = " ".join(screen(plan_report(plan.to_json())).split())
    assert " a step, " in shown and "with an NVLink bridge, or through RAM over PCIe 4.0 x 8" in shown
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    curve = Curve((1 << 14, 1 << 26), (1e-4, 1e-2))
    write_collectives(pair.gpus[0].name, 2, Collectives(curve, curve, curve))
    measured = fastest_plan(Request(config, MODEL, FACTS, replace(pair, what_if=False), 2), explain=False)
    assert measured.step_seconds_range == (measured.step_seconds, measured.step_seconds)
    assert measured.step_seconds_range_reason is None


def test_what_an_earlier_run_measured_is_not_called_a_prediction(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    config = run(effective_batch_size=8, batch_size=4, gradient_checkpointing=False)
    before = planned(config, CPU)
    path = record_path(MODEL.text, "the CPU", config, before)
    assert (before.memory.origin, before.step_seconds_origin) == ("trace", "profile")
    phases = {phase: round(1.01 * size) + 2**17 for phase, size in before.memory.phases.items()}
    write_record(path, before, ProbeResult(phases=phases, expected=before.memory.phases))
    speeds = speed_path(MODEL.text, "the CPU", config, before, profile_of(CPU, 1))
    write_times(speeds, [Timing.of(before, 1.0, 0.01)])
    after = planned(config, CPU)
    assert (after.memory.origin, after.step_seconds_origin) == ("earlier run", "earlier run")
    assert after.step_seconds == pytest.approx(1.0) and after.profile_seconds == before.step_seconds
    assert record_path(MODEL.text, "the CPU", config, after) == path
    assert not any("seconds from the profile" in reason for reason in after.why)
    again = Plan.from_json(json.loads(json.dumps(after.to_json())))
    assert (again.memory.origin, again.step_seconds_origin) == ("earlier run", "earlier run")
    shown = " ".join(screen(plan_report(after.to_json())).split())
    assert "from an earlier run:" in shown and "memory of a process, from an earlier run" in shown
    assert "predicted:" not in shown


def test_after_memory_ran_out_a_smaller_plan_is_made_and_a_prescribed_one_is_tried_again(
    tmp_path, monkeypatch
):
    """Whatever is free then: the free memory of a machine is never the same twice."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    fixed = run(effective_batch_size=8, batch_size=4, gradient_checkpointing=False)
    auto = run(effective_batch_size=8, gradient_checkpointing=False)
    before = planned(fixed, CPU)
    write_ran_out(record_path(MODEL.text, "the CPU", fixed, before), before)
    for free_gib in (15, 16, 16.5):
        later = replace(CPU, host=replace(HOST, ram_free_bytes=int(free_gib * GIB)))
        again, smaller = planned(fixed, later), planned(auto, later)
        assert (again.batch.micro, smaller.batch.micro) == (4, 2)
        assert again.memory.phases == before.memory.phases
        assert any("so this one is tried again" in reason for reason in again.why)
        assert any("memory ran out with" in reason for reason in smaller.why)


@pytest.mark.parametrize(("gpus", "machines"), [(1, 1), (8, 1), (9, 3), (11, 11), (12, 2), (16, 2), (20, 4)])
def test_gpus_elsewhere_are_on_machines_with_equally_many(gpus, machines):
    assert request(run(), what_if("T4")).on_gpus(gpus).on_machines == machines

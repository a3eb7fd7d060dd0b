"""What makes a run fit: each change that is offered is a run that fits, with the figures that are printed."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.cli import parse
from sft_play.commands.plan import _again, plan_command
from sft_play.commands.plan_flags import Asked
from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.machine.gpus import what_if
from sft_play.planning.answers import other_machines
from sft_play.planning.answers.advice import Change, _kinds, advise, as_overrides, plan_or_advise
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture
from sft_play.spelling import BY_MAKE
from sft_play.units import GIB, format_bytes
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

MODEL = Architecture.of(small_config("llama", WIDE))
LENGTHS = np.random.default_rng(0).integers(500, 1025, 1000)
UNEVEN = DataFacts(LENGTHS, LENGTHS, longest_row=1024, mean_tokens=760.0, mean_squared_tokens=6e5, seed=0)
FULL = DataFacts.full_rows(1024, seed=0)


@pytest.fixture(autouse=True)
def _few_gpus(monkeypatch):
    monkeypatch.setattr(other_machines, "COUNTS", (1, 2, 4))


def request(limit_gib: float, mode: str = "lora", gpus: int = 1, **train) -> Request:
    """The run on T4s of which each process may use so much."""
    tree = {
        "model": {"name": "some/model"},
        "data": {"train_path": "x"},
        "tuning": {"mode": mode},
        "train": {"effective_batch_size": 16} | train,
        "parallel": {"memory_gib": limit_gib},
    }
    return Request(RunConfig.model_validate(tree), MODEL, FULL, what_if("T4", gpus), gpus)


@pytest.mark.thorough
def test_each_change_is_a_run_that_fits_with_the_figures_that_it_has():
    asked = request(1.0, batch_size=16, gradient_checkpointing=False)
    with pytest.raises(DoesNotFitError):
        fastest_plan(asked)
    found = advise(asked)
    assert {"train.gradient_checkpointing": "auto"} in [change.settings for change in found]
    assert {"train.batch_size": "auto"} in [change.settings for change in found]
    assert all("train.optimizer" not in change.settings for change in found)  # which saves too little
    for change in found:
        if change.plan.sharing.world_size == asked.processes:
            again = fastest_plan(asked.changed(change.settings), explain=False)
            assert again == change.plan and change.plan.memory.fits


def test_rows_that_are_too_long_are_left_out_or_cut():
    asked = replace(request(1.0), facts=UNEVEN)
    shorter = asked.changed({"model.max_seq_len": 768})
    assert shorter.facts.lengths.max() <= 768 and len(shorter.facts.lengths) == (LENGTHS <= 768).sum()
    cut = asked.changed({"model.max_seq_len": 768, "data.overlong": "truncate"})
    assert len(cut.facts.lengths) == len(LENGTHS) and cut.facts.longest_row == 768


@pytest.mark.thorough
def test_a_run_that_names_an_engine_may_use_another_one():
    asked = request(1.22, "full", gpus=4, gradient_checkpointing=True).changed({"parallel.engine": "ddp"})
    first, *_ = advise(asked)
    assert first.settings == {"parallel.engine": "deepspeed_z2"} and first.plan.memory.fits


@pytest.mark.thorough
def test_a_gpu_that_is_full_may_be_left_out(monkeypatch):
    monkeypatch.delenv(BY_MAKE, raising=False)
    asked = request(2.0, gpus=3)
    free = zip(asked.machine.gpus, (14, 0.3, 14), strict=True)
    gpus = tuple(replace(gpu, free_bytes=int(gib * GIB)) for gpu, gib in free)
    asked = replace(asked, machine=replace(asked.machine, gpus=gpus, what_if=False))
    *_, change = advise(asked)
    assert change.settings == {} and change.plan.sharing.world_size == 2
    typed = _again(Asked.of(parse(["plan", "--config", "c.yaml"])), 3, change)
    assert typed == "sft-play plan --gpus 2 --config c.yaml"


@pytest.mark.thorough
def test_a_hopeless_run_says_so(monkeypatch):
    with pytest.raises(DoesNotFitError, match="largest parts: .*\nno single setting makes it fit"):
        plan_or_advise(request(0.26, "qlora", engine_only(monkeypatch)), lambda change: "")


def engine_only(monkeypatch) -> int:
    """One GPU, and no more to be had."""
    monkeypatch.setattr("sft_play.planning.answers.advice._more_gpus", lambda request: [])
    return 1


def test_earlier_overrides_give_way():
    earlier = ["train.batch_size=4", "tuning.mode=full"]
    assert as_overrides({"tuning.mode": "qlora"}, earlier) == ["train.batch_size=4", "tuning.mode=qlora"]


@pytest.mark.slow
@pytest.mark.parametrize("by_make", [False, True])
def test_what_is_printed_can_be_typed_and_has_the_memory_that_is_said(by_make, monkeypatch):
    """Of a full 0.6B on a card of 8 GiB, with all that could help switched off."""
    words = ["plan", "--model", "qwen3-0.6b", "--gpu", "RTX 3070 Ti", "--gpus", "1", "tuning.mode=full"]
    words += ["parallel.offload=none", "model.max_seq_len=4096"]
    monkeypatch.setenv(BY_MAKE, "1") if by_make else monkeypatch.delenv(BY_MAKE, raising=False)
    with pytest.raises(DoesNotFitError) as caught:
        plan_command(parse(words))
    lines = re.split("makes? it fit:\n", str(caught.value))[1].splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert pairs
    if by_make:
        assert all(line.startswith("  make plan MODEL=qwen3-0.6b ") for line, _ in pairs)
        return
    for line, said in pairs[:2]:
        program, *typed = shlex.split(line)
        assert program == "sft-play"
        tree = plan_command(parse(typed)).tree
        assert said.strip().startswith(f"{format_bytes(tree['memory']['process_bytes'])} a process")


def test_states_may_be_lighter_or_of_an_optimizer_that_can_divide_them():
    ways = [list(_kinds(request(1.0, optimizer=name))) for name in ("adamw", "adamw_8bit")]
    assert [{"train.optimizer": "adamw_8bit"}] in ways[0] and [{"train.optimizer": "adamw"}] in ways[1]


def test_what_is_asked_of_rows_is_asked_again(monkeypatch):
    monkeypatch.delenv(BY_MAKE, raising=False)
    words = ["plan", "--model", "m", "--gpu", "T4", "--rows", "300", "--tokens", "200", "--gpu-hour", "0.4"]
    asked = Asked.of(parse([*words, "tuning.mode=full"]))
    change = Change({"tuning.mode": "lora"}, plan_with(PLAN, world_size=2), None)
    typed = _again(asked, 1, change)
    assert shlex.split(typed)[1:] == [*words[:5], "--gpus", "2", *words[5:], "tuning.mode=lora"]


@pytest.mark.parametrize("enough", [*range(1, 9), 100])
def test_the_fewest_are_found_without_trying_all(enough):
    counts, tried = [1, 2, 3, 4, 5, 6, 7, 8], []
    found = other_machines._first(counts, lambda count: tried.append(count) or count >= enough)
    assert found == (enough if enough <= 8 else None) and len(tried) <= 6
    assert tried == {1: [1], 2: [1, 8, 2], 100: [1, 8]}.get(enough, tried)


def test_more_gpus_than_experts_may_need_more_memory_than_fewer(monkeypatch):
    """Each process gathers experts that are padded to as many as there are processes."""

    monkeypatch.setattr(other_machines, "COUNTS", (1, 2, 4, 8, 16, 32, 64))
    monkeypatch.setattr(other_machines, "_fits_whole", lambda request: request.processes == 4)
    monkeypatch.setattr(other_machines, "fits_in_groups", lambda request: False)
    asked = request(1.0, effective_batch_size=64)
    found = [
        other_machines.fewest_gpus(
            replace(asked, architecture=Architecture.of(small_config(name, WIDE))), batch_grows=True
        )
        for name in ("qwen3_moe", "llama")
    ]
    assert found == [4, None]


@pytest.mark.thorough
def test_more_gpus_come_with_the_batch_that_they_need():
    asked = request(0.42, "full", effective_batch_size=1, gradient_checkpointing=True, optimizer="adamw_8bit")
    more = [change for change in advise(asked) if change.plan.sharing.world_size > 1]
    for change in more:
        assert isinstance(change, Change) and change.plan.memory.process_bytes < 0.42 * GIB
        assert change.settings == {"train.effective_batch_size": change.plan.batch.effective}

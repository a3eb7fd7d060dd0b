"""Plans and advice that divide the tokens of micro-batches: only where nothing else fits, and as they would train."""

from dataclasses import replace

import pytest

from benchmarks.small_models import TALL, WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.machine.gpus import what_if
from sft_play.planning import advice
from sft_play.planning.advice import Change, Request, changed, changes_that_fit, plan_or_advise
from sft_play.planning.facts import DataFacts
from sft_play.planning.sequence import group_sizes
from sft_play.sizing.architecture import Architecture

GIB = 2**30
MODEL = small_config("llama", WIDE)  # 8 heads
# GiB a process, of which a quarter stays free: whole rows fit, groups of two are enough, groups of four are
WHOLE, TWO, FOUR = 2.05, 1.9, 1.8
KEY = "parallel.sequence_parallel_size"


def request(limit_gib: float, gpus: int = 4, size="auto", **train) -> Request:
    """Rows of 32,768 tokens, with all else that could help decided."""
    tree = {
        "model": {"name": "some/model"},
        "data": {"train_path": "x"},
        "tuning": {"mode": "qlora"},
        "train": {
            "gradient_checkpointing": True, "mlp_tiles": 1, "optimizer": "adamw_8bit", "effective_batch_size": 16,
        } | train,
        "parallel": {"memory_gib": limit_gib, "engine": "ddp", "sequence_parallel_size": size},
    }  # fmt: skip
    facts = DataFacts.full_rows(32_768, seed=0)
    return Request(RunConfig.model_validate(tree), MODEL, facts, what_if("RTX 4090", gpus), gpus)


def divided(found: list[Change]) -> list[dict]:
    return [dict(change.settings) for change in found if KEY in change.settings]


@pytest.fixture(autouse=True)
def _no_more_gpus(monkeypatch):
    monkeypatch.setattr(advice, "_more_gpus", lambda request: [])


@pytest.mark.parametrize(("limit", "ranks"), [(WHOLE, 1), (TWO, 2), (FOUR, 4)])
def test_tokens_are_divided_only_if_nothing_else_fits_and_among_as_few_as_are_enough(limit, ranks):
    asked = request(limit)
    plan = plan_or_advise(asked, lambda change: "")
    assert plan.sequence_ranks == ranks and plan.memory.fits
    assert plan.effective_batch_size == 16 and plan.data_ranks == 4 // ranks
    said = [reason for reason in plan.why if "since nothing else fits" in reason]
    assert len(said) == (ranks > 1)
    if said:
        with pytest.raises(DoesNotFitError):
            asked.plan()
        typed = changed(asked, {KEY: ranks}).plan()
        assert replace(plan, why=plan.why[:-1]) == typed and said[0].startswith(
            f"groups of {ranks} processes"
        )


@pytest.mark.parametrize("batch", [{}, {"batch_size": 1, "grad_accum": 4}, {"grad_accum": 4}])
def test_what_the_config_has_decided_is_advised_with_the_effective_batch_that_it_has(batch):
    """The smallest groups that are enough, planned as they are typed."""
    asked = request(TWO, size="auto" if batch else 1, **batch)
    with pytest.raises(DoesNotFitError, match=f"makes? it fit:(.*\n)*  typed {KEY}=2"):
        plan_or_advise(
            asked, lambda change: "typed " + " ".join(f"{k}={v}" for k, v in change.settings.items())
        )
    found = changes_that_fit(asked)
    assert divided(found) == [{KEY: 2} | ({"train.grad_accum": 8} if batch else {})]
    (plan,) = [change.plan for change in found if KEY in change.settings]
    assert (plan.effective_batch_size, plan.micro_batch_size, plan.sequence_ranks) == (16, 1, 2)
    assert plan.memory.fits and changed(asked, divided(found)[0]).plan(explain=False) == plan


@pytest.mark.parametrize(
    ("train", "gpus", "model"),
    [
        ({"neftune_noise_alpha": 5}, 4, MODEL),
        ({"padding_free": False}, 4, MODEL),
        ({}, 1, MODEL),
        ({}, 4, small_config("llama", TALL)),  # 5 heads
    ],
)
def test_what_cannot_be_divided_is_neither_chosen_nor_advised(train, gpus, model):
    """Where groups of four would be enough."""
    asked = replace(request(FOUR, gpus, **train), architecture=model)
    assert advice._with_tokens_divided(asked) is None
    assert list(advice._fitting(asked, [advice._divisions(asked)])) == []


@pytest.mark.parametrize(
    ("heads", "processes", "machines", "asked", "sizes"),
    [
        (8, 8, 1, "auto", [2, 4, 8]),
        (12, 8, 1, "auto", [2, 4]),
        (7, 8, 1, "auto", []),
        (32, 16, 2, "auto", [2, 4, 8]),
        (32, 8, 1, 2, [4, 8]),
        (12, 12, 1, 2, [4, 6, 12]),
        (32, 1, 1, "auto", []),
    ],
)
def test_groups_divide_the_processes_of_a_machine_and_the_heads(heads, processes, machines, asked, sizes):
    model = small_config("llama", WIDE | {"heads": heads, "hidden": 32 * heads, "groups": 1})
    found = group_sizes(request(1, size=asked).config, Architecture.of(model), processes, machines)
    assert found == sizes

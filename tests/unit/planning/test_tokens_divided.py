"""Plans and advice that divide the tokens of micro-batches: only where it is worth it, and as they would train."""

import re
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.small_models import TALL, WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError
from sft_play.job import Job, plan_again, takes_less
from sft_play.machine.gpus import what_if
from sft_play.plan import Memory
from sft_play.planning import planner
from sft_play.planning.answers import advice, other_machines
from sft_play.planning.answers.advice import Change, advise, plan_or_advise
from sft_play.planning.answers.other_machines import plans_by_mode
from sft_play.planning.candidates.sequence import group_sizes
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

GIB = 2**30
MODEL = Architecture.of(small_config("llama", WIDE))  # 8 heads
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "ranks"),
    [(FOUR, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((WHOLE, 1), (TWO, 2)))],
)
def test_tokens_are_divided_only_if_nothing_else_fits_and_among_as_few_as_are_enough(limit, ranks):
    asked = request(limit)
    plan = plan_or_advise(asked, lambda change: "")
    assert plan.sharing.sequence_ranks == ranks and plan.memory.fits
    assert plan.batch.effective == 16 and plan.sharing.data_ranks == 4 // ranks
    said = [reason for reason in plan.why if "since nothing else fits" in reason]
    assert len(said) == (ranks > 1)
    if said:
        with pytest.raises(DoesNotFitError):
            fastest_plan(asked.changed({KEY: 1}))
        typed = fastest_plan(asked.changed({KEY: ranks}))
        assert replace(plan, why=plan.why[:-1]) == typed and said[0].startswith(
            f"groups of {ranks} processes"
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "batch",
    [{}, {"batch_size": 1, "grad_accum": 4}, pytest.param({"grad_accum": 4}, marks=pytest.mark.slow)],
)
def test_what_the_config_has_decided_is_advised_with_the_effective_batch_that_it_has(batch):
    """The smallest groups that are enough, planned as they are typed."""
    asked = request(TWO, size="auto" if batch else 1, **batch)
    with pytest.raises(DoesNotFitError, match=f"makes? it fit:(.*\n)*  typed {KEY}=2"):
        plan_or_advise(
            asked, lambda change: "typed " + " ".join(f"{k}={v}" for k, v in change.settings.items())
        )
    found = advise(asked)
    assert divided(found) == [{KEY: 2} | ({"train.grad_accum": 8} if batch else {})]
    (plan,) = [change.plan for change in found if KEY in change.settings]
    assert (plan.batch.effective, plan.batch.micro, plan.sharing.sequence_ranks) == (16, 1, 2)
    assert plan.memory.fits
    assert fastest_plan(asked.changed(divided(found)[0]), explain=False) == plan


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("train", "gpus", "model"),
    [
        ({"neftune_noise_alpha": 5}, 4, MODEL),
        ({"padding_free": False}, 4, MODEL),
        ({}, 1, MODEL),
        ({}, 4, Architecture.of(small_config("llama", TALL))),  # 5 heads
    ],
)
def test_what_cannot_be_divided_is_neither_chosen_nor_advised(train, gpus, model):
    """Where groups of four would be enough."""
    asked = replace(request(FOUR, gpus, **train), architecture=model)
    with suppress(DoesNotFitError):  # a GPU alone has more room
        assert gpus == fastest_plan(asked, explain=False).sharing.sequence_ranks == 1
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


# Of groups of 1 (whole rows), 2, 4 and 8: seconds of a step and what the plan does to save memory; None: no fit
TILED, IN_RAM, AGAIN = {"mlp_tiles": 8}, {"offload": "ram"}, {"activations": "recompute"}


@pytest.mark.parametrize(
    ("ways", "chosen", "said"),
    [
        ([(4, AGAIN), (1, {}), (1, {}), (1, {})], 1, None),
        ([(4, IN_RAM), (2, AGAIN), (1, {}), (1, {})], 4, "4.00 times as long with whole rows, 2.00 times"),
        ([(4, TILED), None, (3.98, AGAIN), (9, {})], 1, "stay whole: a step is predicted to take 0.99 times"),
        ([(4, TILED), (5, {}), (5, {}), (5, {})], 1, "stay whole: groups of processes that divide"),
        ([(None, IN_RAM), (1, {}), (1, {}), (1, {})], 1, None),
        ([None, (2, {}), (1, {}), (1, {})], 2, "since nothing else fits: they"),
        (
            [None, (2, TILED), (3, {}), (3, {})],
            2,
            "since nothing else fits: .*; larger groups cannot be faster",
        ),
        (
            [None, (2, AGAIN), (1, AGAIN), (2, {})],
            4,
            "do not fit, and a step is predicted to take 2.00 times",
        ),
        ([None, (2, AGAIN), None, (1, {})], 8, "2.00 times as long with groups of 2: they wait"),
        ([None, (None, AGAIN), (1, {}), (1, {})], 2, "since nothing else fits"),
        ([None, None, None, None], None, None),
    ],
)
def test_the_fastest_groups_are_taken_and_no_more_are_planned_than_may_be_faster(
    monkeypatch, ways, chosen, said
):
    """With made-up seconds. Those without anything that saves memory are the least that groups could take."""
    known = dict(zip((1, 2, 4, 8), ways, strict=True))
    planned = []

    def of_groups(request, accept, **how):
        size = request.config.parallel.sequence_ranks
        planned.append(size)
        if known[size] is None:
            raise DoesNotFitError("too much")
        seconds, saving = known[size]
        return plan_with(PLAN, sequence_ranks=size, world_size=8, step_seconds=seconds, **saving)

    def least(request, accept):
        way = known[request.config.parallel.sequence_ranks]
        return 0 if way is None or way[1] else way[0]

    monkeypatch.setattr(planner, "_with_these_groups", of_groups)
    monkeypatch.setattr(planner, "_least_seconds", least)

    def memories(request):
        fits = known[request.config.parallel.sequence_ranks] is not None
        return [Memory(budget_bytes=2, peak_bytes=2, peak_phase="loss", terms={"loss": 1}, ran_out=not fits)]

    monkeypatch.setattr(planner, "leanest_memories", memories)
    asked = request(1, gpus=8, mlp_tiles="auto", gradient_checkpointing="auto")
    asked = asked.changed({"parallel.engine": "auto"})
    if chosen is None:
        with pytest.raises(DoesNotFitError, match="too much"):
            fastest_plan(asked)
        return
    plan = fastest_plan(asked)
    assert plan.sharing.sequence_ranks == chosen and plan.step_seconds == known[chosen][0]
    assert len(plan.why) == len(PLAN.why) + (said is not None)
    if said:
        assert re.search(said, plan.why[-1])
    assert max(planned) <= max(chosen, 4)


@pytest.mark.thorough
def test_groups_of_a_plan_stay_when_it_is_planned_again(monkeypatch):
    """As after memory ran out: with a smaller micro-batch, and nothing that the config leaves open."""
    asked = request(3)
    first = fastest_plan(asked.changed({KEY: 2, "train.batch_size": 4}), explain=False)
    monkeypatch.setattr(DataFacts, "of", lambda data, config, look: asked.facts)
    resolved = SimpleNamespace(config=asked.config)
    job = Job(resolved, None, MODEL.config, None, None, asked.machine, first)
    again = plan_again(job, takes_less(first))
    assert (again.sharing.sequence_ranks, again.batch.micro, again.batch.accumulation) == (2, 2, 4)
    assert again.batch.effective == first.batch.effective and again.sharing.engine == first.sharing.engine
    assert again.memory.budget_bytes == first.memory.budget_bytes and again.memory.fits


@pytest.mark.slow
def test_the_fewest_gpus_divide_tokens_where_no_number_has_room_for_whole_rows(monkeypatch):
    monkeypatch.setattr(other_machines, "COUNTS", (1, 2, 4))
    for size in ("auto", 1):
        rows = DataFacts.full_rows(131_072, seed=0)  # so long that half of one saves more than NCCL takes
        table = plans_by_mode(replace(request(2.3, size=size), facts=rows), ("qlora",))["qlora"]
        if size == 1:
            assert "does not fit" in table["problem"]
        else:
            assert (table["gpus"], table["sequence_ranks"], table["micro_batch_size"]) == (4, 4, 1)

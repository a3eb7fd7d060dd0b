"""Tiles of MLPs in plans: chosen when, and only when, nothing else fits; bad settings are refused."""

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine.gpus import what_if
from sft_play.plan import Memory, Plan
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.candidates.drafts import draft_plans, leanest
from sft_play.planning.candidates.tiles import may_tile, with_tiles
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.search.choice import choose_plan
from sft_play.reasons import choices
from sft_play.sizing.facts.architecture import Architecture
from sft_play.units import GIB
from tests.unit.planning.test_choice import GPU, clock, config

ROW = 8192


def estimate_of(asked: list[Plan], budget: float, weights: float = 10):
    """A row takes 4 GiB, recomputed 2, in tiles 1, from inputs in RAM half of that."""

    def estimate(run: RunConfig, plan: Plan, complete=False) -> Memory:
        asked.append(plan)
        row = 4.0 if not plan.activations.recomputes else 2.0
        row *= (0.5 if plan.activations.mlp_tiles > 1 else 1) * (
            0.5 if plan.activations.policy == "offload" else 1
        )
        terms = {"weights": int(weights * GIB), "activations": int(row * plan.rows_per_micro_batch * GIB)}
        budget_bytes = int(budget * GIB)
        return Memory(
            budget_bytes=budget_bytes, peak_bytes=sum(terms.values()), peak_phase="backward", terms=terms
        )

    return estimate


def planned(
    budget: float, row: int = ROW, weights: float = 10, asked: list[Plan] | None = None, **train
) -> tuple[Plan, list, list[Plan]]:
    """The plan, its reasons about tiles, and what was sized for it."""
    asked = [] if asked is None else asked
    run = config(**train)
    drafts = draft_plans(run, device=GPU, world_size=1, rows=1000, max_seq_len=row, attention="sdpa")
    drafts = with_tiles(run.train, drafts) if may_tile(run, row) else drafts
    plan, why = choose_plan(run, drafts, estimate_of(asked, budget, weights), clock(0.1))
    return plan, [reason for reason in why if reason.startswith("MLPs in ")], asked


def test_tiles_are_chosen_before_inputs_in_ram_and_only_if_nothing_else_fits():
    plan, why, asked = planned(12)
    assert (plan.activations.policy, plan.activations.mlp_tiles) == ("recompute", 1) and why == []
    assert not any(each.activations.mlp_tiles > 1 for each in asked)
    plan, why, asked = planned(11)
    assert (plan.activations.policy, plan.activations.mlp_tiles, plan.batch.micro) == ("recompute", 8, 1)
    assert plan.mlp_tile == 1024 and why == [choices.tiles(8, 1024, "exceed")]
    assert not any(each.activations.policy == "offload" for each in asked)
    plan, why, _ = planned(10.5)
    assert (plan.activations.policy, plan.activations.mlp_tiles) == ("offload", 8)
    with pytest.raises(DoesNotFitError, match="MLPs in 8 tiles. needs 11.00 GiB"):
        planned(10.4)


def test_tiles_are_not_sized_where_weights_alone_exceed_the_budget_nor_for_short_rows():
    for settings in (dict(weights=20), dict(row=2048)):
        asked: list[Plan] = []
        with pytest.raises(DoesNotFitError):
            planned(10.4, asked=asked, **settings)
        assert asked and {each.activations.mlp_tiles for each in asked} == {1}


def test_a_number_that_is_asked_for_is_kept_and_recomputes():
    plan, why, asked = planned(100, mlp_tiles=3)
    assert (plan.activations.policy, plan.activations.mlp_tiles) == ("recompute", 3)
    assert why == [choices.tiles(3, plan.mlp_tile, "config")]
    assert {each.activations.mlp_tiles for each in asked} == {3}
    plan, why, asked = planned(100, mlp_tiles=1)
    assert plan.activations.policy == "keep" and why == []
    plan, why, asked = planned(11, mlp_tiles=1)
    assert plan.activations.policy == "offload" and {each.activations.mlp_tiles for each in asked} == {1}


def test_the_leanest_plans_have_tiles_where_they_may():
    for row, tiles in ((ROW, {8}), (32 * 1024, {8}), (2048, {1})):
        drafts = draft_plans(config(), device=GPU, world_size=1, rows=10, max_seq_len=row, attention="sdpa")
        drafts = with_tiles(config().train, drafts) if may_tile(config(), row) else drafts
        assert {draft.activations.mlp_tiles for draft in leanest(drafts)} == tiles


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"mlp_tiles": 4, "activations": "keep"}, "mlp_tiles=4 computes.*train.activations=keep recomputes"),
        (
            {"mlp_tiles": 4, "gradient_checkpointing": False},
            "train.gradient_checkpointing=false recomputes none",
        ),
        ({"mlp_tiles": 65}, "less than or equal to 64"),
        ({"mlp_tiles": 0}, "greater than 0"),
        ({"mlp_tiles": True}, "expected a number or 'auto'"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(train, said):
    with pytest.raises(ValueError, match=said):
        config(**train)


def test_a_mixture_of_experts_is_refused_only_if_tiles_are_asked_for():
    machine, facts = what_if("RTX 4090", 1), DataFacts.full_rows(ROW, 0)
    mixture = Architecture.of(small_config("qwen3_moe", WIDE, max_position_embeddings=ROW))
    drafts, _ = allowed_plans(Request(config(), mixture, facts, machine, 1))
    assert {draft.activations.mlp_tiles for draft in drafts} == {1}
    with pytest.raises(ConfigError, match="train.mlp_tiles=4: the layers of qwen3_moe have no MLP.*=auto"):
        allowed_plans(Request(config(mlp_tiles=4), mixture, facts, machine, 1))


@pytest.mark.thorough
def test_a_run_gets_tiles_where_the_traced_steps_fit_with_them_alone():
    """Rows of 8,192 tokens on a GPU whose budget is between what they take with tiles and without."""
    wide = Architecture.of(
        small_config("llama", WIDE | {"inner": 4096, "layers": 2}, max_position_embeddings=ROW)
    )
    machine, facts = what_if("RTX 4090", 1), DataFacts.full_rows(ROW, 0)

    def plan(budget: int | None = None, **train) -> Plan:
        run = config(activations="recompute", batch_size=1, **train)
        return fastest_plan(Request(run, wide, facts, machine, 1, budget_bytes=budget), explain=False)

    whole, tiled = plan(mlp_tiles=1), plan(mlp_tiles=8)
    between = (whole.memory.process_bytes + tiled.memory.process_bytes) // 2
    assert tiled.memory.process_bytes < between < whole.memory.process_bytes
    chosen = plan(between)
    assert chosen.activations.mlp_tiles == 8 and chosen.memory.peak_bytes == tiled.memory.peak_bytes
    said = "MLPs in 8 tiles of 1,024 tokens, since nothing else fits"
    assert any(why.startswith(said) for why in chosen.why)
    assert plan(whole.memory.process_bytes).activations.mlp_tiles == 1
    assert whole.step_seconds < tiled.step_seconds

"""The longest row: the search closes on the last length that fits, and real steps bear it out."""

import pytest
from transformers import LlamaConfig

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import what_if
from sft_play.planning import context
from sft_play.planning.context import GRAIN, longest_multiple, longest_row, longest_rows
from sft_play.planning.facts import DataFacts
from sft_play.planning.run import plan_run
from sft_play.sizing.architecture import Architecture

GIB = 2**30


def architecture(positions: int | None = 65_536) -> Architecture:
    return Architecture.of(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=positions,
        )  # fmt: skip
    )


def config(**train) -> RunConfig:
    tree = {"model": {"name": "org/tiny"}, "data": {"train_path": "rows.jsonl"}, "train": train}
    return RunConfig.model_validate(tree | {"parallel": {"memory_gib": 2, "offload": "none"}})


@pytest.mark.parametrize("budget", [2 * GRAIN, 5_000, 99_999, 700_001, 10**6])
@pytest.mark.parametrize("shape", ["line", "square", "steps", "noise"])
def test_the_search_ends_at_the_last_multiple_that_fits(budget, shape):
    asked = []

    def use(tokens: int) -> float:
        asked.append(tokens)
        needed = {
            "line": tokens,
            "square": tokens**2 // 10**5 + tokens,
            "steps": tokens // 5000 * 5000 + GRAIN,
            "noise": tokens + 7919 * tokens % 3000,
        }
        return needed[shape] / budget

    found = longest_multiple(use, 10**7)
    assert found is None or found % GRAIN == 0
    assert found is None or use(found) <= 1
    assert use((found or 0) + GRAIN) > 1
    assert len(set(asked)) <= (5 if shape == "line" else 24), asked


@pytest.mark.parametrize(
    ("gpu", "away"), [("RTX 4090", True), ("H100 80GB", True), ("A100 80GB", True), ("B200", False)]
)
def test_activations_may_be_in_ram_only_where_the_link_is_known_as_in_a_plan(gpu, away):
    machine, facts = what_if(gpu, 1), DataFacts.full_rows(GRAIN, 0)
    for asked, expected in (({}, away), ({"activations": "offload"}, True)):
        drafts = context.drafts_of(config(**asked), architecture(), facts, machine, 1)
        assert any(draft.offloads_activations for draft in drafts) == expected


def test_what_the_model_allows_is_the_limit_where_memory_is_left():
    assert longest_multiple(lambda tokens: 0.5, 40_961) == 40_961


@pytest.mark.parametrize("most", [3, 10**6])
@pytest.mark.parametrize("use", [lambda tokens: 2.0, lambda tokens: 2.0 + tokens / 10**6])
def test_there_is_no_length_where_the_shortest_row_does_not_fit(most, use):
    assert longest_multiple(use, most) is None


def test_the_longest_row_fits_and_the_next_multiple_does_not():
    """By the plans that a run of such rows gets."""
    machine, run = what_if("RTX 4090"), config(batch_size=1, gradient_checkpointing=True)
    found = longest_row(run, architecture(10**6), machine, 1, None)
    assert found["limit"] == "memory" and found["longest"] == found["row_tokens"] > 10 * GRAIN
    assert found["process_bytes"] <= found["budget_bytes"]

    def micro_batch(tokens: int) -> int:
        facts = DataFacts.full_rows(tokens, 0)
        return plan_run(run, architecture(10**6), facts, machine, 1).micro_batch_size

    assert micro_batch(found["longest"]) == 1
    with pytest.raises(Exception, match="does not fit"):
        micro_batch(found["longest"] + GRAIN)


def test_positions_are_the_limit_and_an_asked_length_has_its_own_speed():
    found = longest_row(config(), architecture(4096), what_if("RTX 4090"), 1, 1000)
    assert (found["longest"], found["limit"]) == (4096, "positions")
    assert found["fits"] and found["row_tokens"] == 1000 and found["tokens_per_second"] > 0


def test_a_length_that_does_not_fit_has_no_plan():
    found = longest_row(config(), architecture(10**6), what_if("RTX 4090"), 1, 999_999)
    assert found["fits"] is False and found["longest"] < 999_999 and "engine" not in found


def test_rows_are_listed_by_method_and_number_and_a_method_that_is_refused_says_why(monkeypatch):
    def answer(run, _, machine, processes, asked):
        if run.tuning.mode == "qlora":
            raise ConfigError("fused experts")
        in_ram = run.parallel.offload == "ram"
        return {"longest": 5 * GRAIN * processes * (1 + in_ram), "limit": "memory"}

    monkeypatch.setattr(context, "longest_row", answer)
    run = config().model_copy(update={"parallel": RunConfig.model_fields["parallel"].default})
    steps = []
    rows = longest_rows(
        run, architecture(), lambda count: what_if("L4", count), (1, 2), ("lora", "qlora"), None, steps.append
    )
    assert [(row["mode"], row["processes"], row["offload"], row["longest"]) for row in rows] == [
        ("lora", 1, "none", 5120), ("lora", 1, "ram", 10240), ("lora", 2, "none", 10240), ("lora", 2, "ram", 20480),
        ("qlora", 1, "none", None), ("qlora", 2, "none", None),
    ]  # fmt: skip
    assert rows[4]["problem"] == "fused experts" and len(steps) == 8

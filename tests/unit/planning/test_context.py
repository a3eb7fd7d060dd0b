"""The longest row: the search closes on the last length that fits, and real steps bear it out."""

import pytest
from transformers import LlamaConfig

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import what_if
from sft_play.planning.allowed import candidates
from sft_play.planning.answers import context
from sft_play.planning.answers.context import GRAIN, LongestRow, longest_multiple, longest_row, longest_rows
from sft_play.planning.planner import fastest_plan
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.estimate.estimator import shared_traces
from sft_play.sizing.facts.architecture import Architecture

GIB = 2**30


def architecture(positions: int | None = 65_536, vocab_size: int = 256) -> Architecture:
    return Architecture.of(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocab_size,
            max_position_embeddings=positions,
        )  # fmt: skip
    )


def config(**train) -> RunConfig:
    tree = {"model": {"name": "org/tiny"}, "data": {"train_path": "rows.jsonl"}, "train": train}
    return RunConfig.model_validate(tree | {"parallel": {"memory_gib": 2, "offload": "none"}})


def request(run: RunConfig, model: Architecture, processes: int = 1) -> Request:
    facts = DataFacts.full_rows(GRAIN, 0)  # of the length that is tried
    return Request(run, model, facts, what_if("RTX 4090", processes), processes)


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
    ("gpu", "away"),
    [("RTX 4090", True), ("H100 80GB", True), ("A100 80GB", True), ("B200", True), ("RTX 4500 Ada", False)],
)
def test_activations_may_be_in_ram_only_where_seconds_are_known_as_in_a_plan(gpu, away):
    machine, facts = what_if(gpu, 1), DataFacts.full_rows(GRAIN, 0)
    for asked, expected in (({}, away), ({"activations": "offload"}, True)):
        drafts = candidates(Request(config(**asked), architecture(), facts, machine, 1))
        assert any(draft.offloads_activations for draft in drafts) == expected


@pytest.mark.parametrize("first", [1, 30_000, 100_000, 699_999, 10**6, 10**8])
@pytest.mark.parametrize("budget", [100_000, 10**7])
def test_a_search_that_begins_elsewhere_ends_at_the_same_length(first, budget):
    asked = []

    def use(tokens: int) -> float:
        asked.append(tokens)
        return (20_000 + tokens) / budget

    assert longest_multiple(use, 700_001, first=first) == (700_001 if budget == 10**7 else 78 * GRAIN)
    assert len(set(asked)) <= 6 and min(asked) > 0, asked


def test_what_the_model_allows_is_the_limit_where_memory_is_left():
    assert longest_multiple(lambda tokens: 0.5, 40_961) == 40_961


@pytest.mark.parametrize("most", [3, 10**6])
@pytest.mark.parametrize("use", [lambda tokens: 2.0, lambda tokens: 2.0 + tokens / 10**6])
def test_there_is_no_length_where_the_shortest_row_does_not_fit(most, use):
    assert longest_multiple(use, most) is None


@pytest.mark.thorough
def test_the_longest_row_fits_and_the_next_multiple_does_not():
    """By the plans that a run of such rows gets."""
    asked = request(config(batch_size=1, gradient_checkpointing=True), architecture(10**6))
    found = longest_row(asked, None)
    assert found.limit == "memory" and found.longest == found.plan.rows.max_seq_len > 10 * GRAIN
    assert found.plan.memory.fits

    def micro_batch(tokens: int) -> int:
        rows = asked.changed(facts=DataFacts.full_rows(tokens, 0))
        return fastest_plan(rows, explain=False).batch.micro

    assert micro_batch(found.longest) == 1
    with pytest.raises(Exception, match="does not fit"):
        micro_batch(found.longest + GRAIN)


def test_a_model_that_is_too_large_without_any_row_is_not_traced(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))  # in which no earlier test has traced it
    traces = shared_traces(large := architecture(10**6, vocab_size=2**24))  # two matrices of 2 GiB
    run = config(batch_size=1, gradient_checkpointing=True)
    assert longest_row(request(run, large), 4096).fits is False
    assert traces.count == 0


@pytest.mark.thorough
def test_positions_are_the_limit_and_an_asked_length_has_its_own_speed():
    found = longest_row(request(config(), architecture(4096)), 1000)
    assert (found.longest, found.limit) == (4096, "positions")
    assert found.fits and found.plan.rows.max_seq_len == 1000 and found.tokens_per_second > 0


@pytest.mark.slow
def test_a_length_that_does_not_fit_has_no_plan():
    found = longest_row(request(config(), architecture(10**6)), 999_999)
    assert found.fits is False and found.longest < 999_999 and found.plan is None


def divided(run, model, processes: int, asked=None):
    """The row without groups, and the one with them."""
    on_gpus, tried = request(run, model, processes), context.Tried()
    whole = longest_row(on_gpus, asked, tried=tried)
    return whole, context.longest_row_in_groups(on_gpus, asked, whole=whole, tried=tried)


def on_ddp(memory_gib: float, **train):
    run = config(effective_batch_size=4, gradient_checkpointing=True, **train)
    return run.changed({"parallel.memory_gib": memory_gib, "parallel.engine": "ddp"})


@pytest.mark.slow
def test_groups_reach_farther_and_the_next_multiple_does_not_fit():
    run, model = on_ddp(1.7), architecture(10**6)
    whole, found = divided(run, model, 4)
    assert (whole.sequence_ranks, found.sequence_ranks) == (1, 4)  # of 4 heads
    assert found.limit == "memory" and found.longest > 2 * whole.longest > 0
    assert found.plan.memory.fits and found.tokens_per_second > 0
    for tokens, fits in ((found.longest, True), (found.longest + GRAIN, False)):
        rows = request(run, model, 4).in_groups_of(4).changed(facts=DataFacts.full_rows(tokens, 0))
        assert (context._use(rows, context.Tried()) <= 1) == fits


@pytest.fixture()
def _linear(monkeypatch):
    """Memory that each token of a process takes, and nothing that has to be traced."""

    def use(request, tried):
        return 0.2 + request.facts.longest_row / request.config.parallel.sequence_ranks / 100_000

    monkeypatch.setattr(context, "_use", use)
    monkeypatch.setattr(context, "_plan_of", lambda request, tight: request.facts.longest_row)
    monkeypatch.setattr(DataFacts, "tokens_per_second", lambda facts, plan: None)


@pytest.mark.parametrize(
    ("positions", "asked", "reached", "limit", "ranks"),
    [
        (10**8, None, 319_488, "memory", 4),
        (320_100, None, 319_488, "memory", 4),
        (319_990, None, 319_990, "positions", 4),
        (160_001, None, 160_001, "positions", 4),
        (159_999, None, 159_999, "positions", 2),  # the smallest that reach all positions
        (10**8, 90_000, 319_488, "memory", 4),
    ],
)
def test_the_smallest_groups_that_reach_as_far_are_named(_linear, positions, asked, reached, limit, ranks):
    whole, found = divided(on_ddp(1.7), architecture(positions), 4, asked)
    assert whole.longest == 79_872
    assert (found.longest, found.limit, found.sequence_ranks) == (reached, limit, ranks)
    assert found.fits == (True if asked else None)
    assert found.plan == (asked or reached)


def test_tokens_are_not_divided_for_nothing(_linear):
    """Where rows are long enough, where the config has decided it, and on one GPU."""
    run, model = on_ddp(1.7), architecture(10**8)
    assert divided(run, model, 4)[1] is not None
    assert divided(run, architecture(4096), 4)[1] is None
    assert divided(run, model, 4, 4096)[1] is None
    assert divided(run.changed({"parallel.sequence_parallel_size": 1}), model, 4)[1] is None
    assert divided(run, model, 1)[1] is None


def test_what_cannot_be_divided_has_no_such_row():
    run = on_ddp(1.7, padding_free=False)
    whole = LongestRow(GRAIN, "memory", 1, None, None, None)
    asked = request(run, architecture(10**6), 4)
    assert context.longest_row_in_groups(asked, None, whole=whole, tried=context.Tried()) is None


def test_rows_are_listed_by_method_and_number_and_a_method_that_is_refused_says_why(monkeypatch):
    def answer(request, asked, **search):
        if request.config.tuning.mode == "qlora":
            raise ConfigError("fused experts")
        in_ram = request.config.parallel.offload == "ram"
        longest = 5 * GRAIN * request.processes * (1 + in_ram)
        return LongestRow(longest, "memory", 1, None, None, None)

    monkeypatch.setattr(context, "longest_row", answer)
    run = config().changed({"parallel.offload": "auto"})
    requests = [request(run, architecture(), count) for count in (1, 2)]
    searches = list(longest_rows(requests, ("lora", "qlora")))
    rows = [row for found in searches for row in found]
    assert [(row["mode"], row["processes"], row["offload"], row["longest"]) for row in rows] == [
        ("lora", 1, "none", 5120), ("lora", 1, "ram", 10240), ("lora", 2, "none", 10240), ("lora", 2, "ram", 20480),
        ("qlora", 1, "none", None), ("qlora", 2, "none", None),
    ]  # fmt: skip
    assert rows[4]["problem"] == "fused experts" and len(searches) == 8

"""parallel.sequence_parallel_size: what is refused before anything loads, and what a plan makes of it."""

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import GraniteMoeHybridConfig, LlamaConfig, Qwen3NextConfig

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpus import Machine
from sft_play.machine.host import Host
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.speed.clock import sent_bytes, sequence_messages
from sft_play.reasons.choices import effective_batch
from sft_play.sizing.estimate.estimator import shared_traces
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import StepSpec
from tests.plans import plan_with

LLAMA = dict(
    hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, vocab_size=64,
)  # fmt: skip
CPU = Machine(
    gpus=(),
    note="",
    host=Host(
        cpu_model=None,
        cpu_cores=2,
        cpu_bf16=None,
        ram_total_bytes=None,
        ram_free_bytes=None,
        ram_limited=False,
    ),
)
LENGTHS = np.array([40, 24, 33, 8] * 4)
FACTS = DataFacts(LENGTHS, LENGTHS - 1, 40, float(LENGTHS.mean()), float((LENGTHS**2).mean()), seed=0)


def run(size: int, **sections) -> RunConfig:
    settings = {"model": {"name": "a model"}, "data": {"train_path": "rows"}, **sections}
    settings["parallel"] = {"sequence_parallel_size": size, "engine": "ddp"}
    settings.setdefault("train", {"effective_batch_size": 8, "grad_accum": 2})
    return RunConfig.model_validate(settings)


def plans(config: RunConfig, architecture=None, processes: int = 6, machines: int = 1):
    model = Architecture.of(architecture or LlamaConfig(**LLAMA))
    return allowed_plans(Request(config, model, FACTS, CPU, processes, machines))[0]


@pytest.mark.parametrize(
    ("config", "architecture", "processes", "said"),
    [
        (run(4), LLAMA, 8, "does not divide the 6 attention heads of llama; sizes that do: 1, 2, 3, 6"),
        (run(3), LLAMA, 4, "does not divide the 4 processes of a machine; allowed: 1, 2, 4"),
        (run(2), LLAMA, 1, "does not divide the 1 process of a machine"),
        (
            run(2),
            LLAMA | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            2,
            "scales its positions by the longest one that it sees (rope type dynamic)",
        ),
        (run(2, model={"name": "a", "attention": "sdpa"}), LLAMA, 2, "sdpa attention does not support row"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(config, architecture, processes, said):
    with pytest.raises(ConfigError) as error:
        plans(config, LlamaConfig(**architecture), processes)
    assert said in str(error.value) and "parallel.sequence_parallel_size=" in str(error.value)


@pytest.mark.parametrize("architecture", [Qwen3NextConfig(), GraniteMoeHybridConfig()])
def test_layers_that_carry_a_state_from_token_to_token_are_refused(architecture):
    with pytest.raises(ConfigError, match="divides rows that are joined end to end, but"):
        plans(run(2), architecture, 2)


@pytest.mark.parametrize(
    "train", [{"neftune_noise_alpha": 5}, {"router_aux_loss_coef": 0.01}, {"padding_free": False}]
)
def test_what_needs_whole_rows_is_refused_with_the_config(train):
    with pytest.raises(ValidationError, match=f"divides the tokens of a row, but .*{next(iter(train))}"):
        run(2, train=train)


def test_the_effective_batch_stays_and_a_group_counts_once():
    whole, divided = plans(run(1), processes=2)[0], plans(run(3), processes=6)[0]
    assert divided.sharing.sequence_ranks == 3 and divided.sharing.data_ranks == 2
    same = plan_with(divided, world_size=2, sequence_ranks=1)
    assert whole == same  # rows, micro-batches, steps and rate
    assert effective_batch(divided) == (
        "effective batch 8 sequences = micro-batch 2 x accumulation 2 x 2 groups of 3 processes"
    )


def test_a_process_has_its_part_of_each_batch():
    whole, divided = plans(run(1), processes=2)[0], plans(run(3), processes=6)[0]
    before, after = FACTS.batches_of(whole, 96), FACTS.batches_of(divided, 96)
    assert before.train
    for one, part in zip(before.train, after.train, strict=True):
        assert part.tokens == -(-one.tokens // 3) and part.supervised == min(one.supervised, part.tokens)
        assert sum(part.lengths) == 3 * part.tokens and part.lengths[: len(one.lengths)] == one.lengths


def test_attention_exchanges_queries_keys_values_and_outputs_in_both_directions():
    config, plan = run(2), plans(run(2), processes=2)[0]
    tokens, layers, head_dim = 20, 2, 16
    spec = StepSpec.of(config, plan)
    work = shared_traces(LlamaConfig(**LLAMA)).work(spec).at(tokens)
    messages = sequence_messages(work, plan)
    # 6 heads of queries and of outputs, 2 of keys and of values, of so many tokens, in fp32
    each = (6 + 2 + 2 + 6) * tokens * head_dim * 4
    passes = 2 if plan.activations.policy == "keep" else 3
    assert sum(one.tensor_bytes * one.times for one in messages) == passes * layers * each * 2  # accumulation
    assert sent_bytes(messages, 2) == passes * layers * each

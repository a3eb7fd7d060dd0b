from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, LlamaConfig

from sft_play.errors import ConfigError, LaunchError
from sft_play.model.attention import varlen
from sft_play.model.layers.loss_head import add_loss_head, autocast_of
from sft_play.train.verify import (
    check_causal,
    check_head,
    check_in_force,
    check_isolation,
    verify,
)
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
CPU = torch.device("cpu")


def build():
    varlen.register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation=varlen.NAME)


def test_packed_rows_that_are_kept_apart_pass():
    model = build()
    check_isolation(model, PLAN, CPU)
    assert model.training


def test_an_architecture_that_loses_the_lengths_on_the_way_is_refused():
    model = build()
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, _inner=inner, sequence_lengths=None, **kwargs: _inner(
            *args, **kwargs
        )
    with pytest.raises(
        ConfigError, match="attention leaks between joined rows; set train.padding_free=false"
    ):
        check_isolation(model, PLAN, CPU)


def test_a_model_that_sees_later_tokens_is_refused():
    check_causal(build(), CPU)
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
        initializer_range=0.3,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="BertLMHeadModel sees the tokens it has to predict"):
        check_causal(BertLMHeadModel(config), CPU)


def test_a_head_that_does_more_than_the_loss_knows_is_refused():
    model = build()
    add_loss_head(model)
    check_head(model, CPU)
    model.lm_head.register_forward_hook(lambda module, inputs, out: 3 * out)
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits"):
        check_head(model, CPU)


def test_a_head_in_fp32_on_a_model_in_16_bits_passes_under_the_autocast_of_the_plan():
    """So modules_to_save are until DeepSpeed casts them; accelerate has no autocast beside it."""
    model = build().bfloat16()
    model.lm_head.float()
    add_loss_head(model)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot compute its logits here"):
        check_head(model, CPU)
    with autocast_of("bf16", "cpu"):
        check_head(model, CPU)


@pytest.mark.parametrize(
    ("processes", "started", "plan", "said"),
    [
        (
            1,
            DistributedType.NO,
            plan_with(PLAN, engine="ddp", world_size=2),
            "2 processes were requested, but 1 started",
        ),
        (
            2,
            DistributedType.DEEPSPEED,
            plan_with(PLAN, engine="ddp", world_size=2),
            "override parallel.engine=deepspeed_z2",
        ),
        (
            2,
            DistributedType.MULTI_GPU,
            plan_with(PLAN, engine="deepspeed_z2", world_size=2),
            "override parallel.engine=ddp",
        ),
    ],
)
def test_what_was_started_must_be_what_was_planned(processes, started, plan, said):
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=processes, distributed_type=started))
    with pytest.raises(LaunchError, match=said):
        verify(trainer, plan)


@pytest.fixture
def started():
    """A trainer's arguments and a real accelerator, made with these settings."""

    def start(steps=PLAN.batch.accumulation, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        args = SimpleNamespace(gradient_accumulation_steps=steps)
        return SimpleNamespace(accelerator=Accelerator(cpu=True, **settings), args=args)

    yield start
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    [
        ({"mixed_precision": "bf16"}, {}, "mixed precision is bf16, but no was planned"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed precision is bf16, but no was planned"),
        ({"dynamo_backend": "inductor"}, {}, "torch.compile is INDUCTOR, but NO was planned"),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "torch.compile is INDUCTOR, but NO was planned"),
        ({"gradient_accumulation_steps": 4}, {}, "gradient accumulation is 8, but 2 was planned"),
        (
            {},
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "gradient accumulation is 8, but 2 was planned",
        ),
        ({"steps": 1}, {}, "gradient accumulation is 1, but 2 was planned"),
    ],
)
def test_what_the_libraries_made_of_their_settings_must_be_what_was_planned(
    started, monkeypatch, settings, environment, said
):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    check_in_force(started(), PLAN)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"^{said}: the environment, or a config file") as caught:
        check_in_force(started(**settings), PLAN)
    assert caught.value.exit_code == 9


def test_a_model_whose_own_code_fails_is_refused_with_what_it_says():
    model = build()
    model.model.norm.register_forward_hook(lambda module, inputs, out: {}["router_logits"])
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM cannot compute its logits here: KeyError: 'router"
    ):
        check_causal(model, CPU)
    assert model.training


def test_memory_that_runs_out_is_no_refusal():
    model = build()

    def runs_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.norm.register_forward_hook(runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        check_causal(model, CPU)

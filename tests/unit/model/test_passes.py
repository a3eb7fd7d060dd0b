"""LoRA layers compute what PEFT's do."""

import contextlib
import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.small_models import TALL, small_config
from sft_play.config.schema import LoraSettings
from sft_play.model.adapters import passes
from sft_play.model.adapters.attach import attach_adapter
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.upstream.patching import patched
from tests.rounding import assert_same_norm, assert_same_values, step_terms, summed

SHAPE = TALL | {"layers": 2, "vocabulary": 100}


def one_step(
    base,
    *,
    autocast: bool = False,
    checkpointing: bool = False,
    dropout: float = 0.0,
    stock: bool,
    alpha: float = 12,
):
    """Loss and gradients of a step, as PEFT computes them or as we do."""
    torch.manual_seed(0)
    with patched(passes, "replace_forwards", lambda *_, **__: None) if stock else contextlib.nullcontext():
        lora = LoraSettings(r=4, alpha=alpha, dropout=dropout)
        model = attach_adapter(copy.deepcopy(base), lora, autocast=autocast)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    ids = torch.randint(0, 100, (2, 9))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 2 * 2 * 7
    return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # Qwen2's layers have biases
@pytest.mark.parametrize("dropout", [0.0, 0.1])  # with dropout the adapter has an input of its own
@pytest.mark.parametrize(("autocast", "checkpointing"), [(False, False), (False, True), (True, False)])
def test_a_step_is_that_of_peft(family, autocast, checkpointing, dropout):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(small_config(family, SHAPE))
    how = {"autocast": autocast, "checkpointing": checkpointing, "dropout": dropout}

    (loss, theirs), (our_loss, ours) = (one_step(base, stock=stock, **how) for stock in (True, False))

    terms = step_terms(base, tokens=2 * 9)  # those of the adapters run beside the base's
    near = 0.05 if autocast else summed(terms)  # bf16 has three digits, and PEFT rounds twice more
    assert_same_values([float(our_loss)], [float(loss)], near)
    assert_same_norm(ours, theirs, near)


def test_gradients_of_a_scale_that_is_wrong_by_a_hundredth_are_far_above_rounding():
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(small_config("llama", SHAPE))
    (_, theirs), (_, ours) = (
        one_step(base, stock=stock, alpha=alpha) for stock, alpha in ((True, 12), (False, 12.12))
    )
    near = summed(step_terms(base, tokens=2 * 9))
    assert (ours - theirs).norm() > 100 * near * theirs.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_without_a_bias_writes_its_output_once(dropout):
    config = LoraConfig(target_modules=["0"], lora_dropout=dropout)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 500, bias=False)), config)
    written = {}
    for name in ("PEFT", "ours"):
        if name == "ours":
            passes.replace_forwards(model, autocast=False)
        with AllocationRecorder() as recorder:
            model(torch.randn(1, 100, 8))
        written[name] = recorder.sizes.count(4 * 100 * 500)
    assert written == {"PEFT": 4, "ours": 1}


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_an_input_is_written_once(bias):
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(500, 8, bias=bias)), LoraConfig(target_modules=["0"])
    )
    written = {}
    for name in ("PEFT", "ours"):
        if name == "ours":
            passes.replace_forwards(model, autocast=False)
        with AllocationRecorder() as recorder:
            model(torch.randn(1, 100, 500, requires_grad=True)).sum().backward()
        written[name] = recorder.sizes.count(4 * 100 * 500) - 1  # of which one is the input
    assert written == {"PEFT": 3, "ours": 1}


def test_an_adapter_that_is_switched_off_is_not_added():
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(8, 8)),
        LoraConfig(target_modules=["0"], init_lora_weights=False),
    )
    passes.replace_forwards(model, autocast=False)
    x = torch.randn(1, 5, 8)
    base = model.base_model.model[0].base_layer(x)
    assert not torch.equal(model(x), base)
    with model.disable_adapter():
        assert torch.equal(model(x), base)

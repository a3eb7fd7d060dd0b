"""Linear layers of decoder layers multiply in float8 where gradients follow, and are the same layers otherwise."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.small_models import WIDE, small_config
from sft_play.choices.kernels import FLOAT8
from sft_play.errors import ConfigError
from sft_play.model.layers import float8
from tests.packages import needs_torchao

SIZES = WIDE | {
    "hidden": 64,
    "inner": 104,
    "heads": 4,
    "groups": 2,
    "head_dim": 16,
    "vocabulary": 304,
    "layers": 2,
}
SERVED = [f"self_attn.{name}_proj" for name in "koqv"]  # 104 is no multiple of 16
TOKENS = 57  # no multiple of 16


@pytest.fixture
def models():
    """A model, and a copy that multiplies in float8."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("llama", SIZES), dtype=torch.bfloat16)
    converted = copy.deepcopy(model)
    float8.convert_layers(converted)
    return model.train(), converted.train()


def step(model) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some tokens, and the gradients of all weights."""
    ids = torch.randint(5, 300, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), torch.cat([weight.grad.float().flatten() for weight in model.parameters()])


@needs_torchao
def test_fitting_linear_layers_of_decoder_layers_are_converted_and_their_weights_stay(models, tmp_path):
    from torchao.float8.float8_linear import Float8Linear

    model, converted = models
    found = sorted(name for name, module in converted.named_modules() if isinstance(module, Float8Linear))
    assert found == [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in SERVED]
    step(converted)
    converted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


@needs_torchao
def test_a_step_is_near_that_in_bf16_and_not_the_same(models):
    """Seen with three seeds: at most 0.007% of the loss, and 4.1% to 4.3% of the norm of the gradients."""
    (loss, gradients), (near, others) = map(step, models)
    assert 0 < abs(near / loss - 1) < 1e-3
    assert 0.01 < (others - gradients).norm() / gradients.norm() < 0.08


@needs_torchao
def test_passes_without_gradients_are_those_of_the_model_that_is_saved(models):
    ids = torch.arange(5, 5 + TOKENS)[None]
    with torch.no_grad():
        plain, converted = (model(input_ids=ids).logits for model in models)
    assert torch.equal(plain, converted)
    assert not torch.equal(models[1](input_ids=ids).logits, plain)


@needs_torchao
def test_no_token_depends_on_the_values_of_another_one(models):
    """With one scale for a tensor, a large value would take digits from all others."""
    linear = models[1].model.layers[0].self_attn.q_proj
    x = torch.randn(2, TOKENS, 64, dtype=torch.bfloat16)
    x[1, :-1] = x[0, :-1]
    x[1, -1] *= 1e4
    first, second = linear(x)
    assert torch.equal(first[:-1], second[:-1])


@needs_torchao
def test_products_have_the_shapes_that_kernels_of_gpus_ask_for(models, monkeypatch):
    """As PyTorch's ScaledBlas.cpp checks them for CUDA; its kernels for CPUs take other ones too."""
    multiply, shapes = torch._scaled_mm, []

    def checked(a, b, *, scale_a, scale_b, out_dtype, **settings):
        shapes.append((*a.shape, b.shape[1]))
        assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert [scale.dtype for scale in (scale_a, scale_b)] == [torch.float32] * 2
        by_row = ((len(a), 1), (1, b.shape[1]))
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) in (by_row, ((), ()))
        return multiply(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    step(models[1])
    assert len(shapes) == 3 * 2 * len(SERVED)  # forward, and the gradients of inputs and weights
    assert all(inner % 16 == columns % 16 == 0 for _, inner, columns in shapes)
    assert {rows for rows, _, _ in shapes} == {TOKENS, 32, 64}


@pytest.mark.parametrize(
    ("device", "name", "capability", "found"),
    [
        ("cpu", "CPU", None, "the CPU"),
        ("cuda", "A100", (8, 0), r"A100 \(8.0\)"),
        ("cuda", "RTX 5090", (12, 0), r"RTX 5090 \(12.0\)"),
    ],
)
def test_devices_without_such_products_are_named_with_those_that_have_them(device, name, capability, found):
    said = rf"8.9 \(Ada\), 9.0 \(Hopper\) or 10.x .*, but this is {found}; set train.float8=false$"
    with pytest.raises(ConfigError, match=said):
        FLOAT8.require_runnable(device, capability, name=name, here=False)


def test_the_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("sft_play.choices.kernels.find_spec", lambda name: None)
    monkeypatch.setattr("sft_play.choices.kernels.install_command", "install {}".format)
    for capability in ((8, 9), (9, 0), (10, 3), None):
        FLOAT8.require_runnable("cuda", capability, here=False)
        with pytest.raises(ConfigError, match="torchao, .* run `install float8`, or set train.float8=false$"):
            FLOAT8.require_runnable("cuda", capability, here=True)

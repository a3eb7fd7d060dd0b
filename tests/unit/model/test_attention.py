import itertools
from inspect import signature

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from sft_play.errors import ConfigError
from sft_play.model.attention import varlen
from sft_play.upstream.torch import without_cudnn_attention
from tests.rounding import assert_same_tensor, forward_terms, step_terms, summed

SHAPE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    head_dim=8,
    max_position_embeddings=128,
)
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral, window 7": MistralConfig(**SHAPE, sliding_window=7),
    "gemma": GemmaConfig(**SHAPE),
    "gpt-oss, sinks, window 7": GptOssConfig(
        **SHAPE, sliding_window=7, num_local_experts=2, num_experts_per_tok=1
    ),
}


def build(config, implementation: str):
    varlen.register()
    torch.manual_seed(0)
    name = varlen.library_name(implementation)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.uniform_(-1, 3)
    return model


def test_a_mask_that_a_layer_computes_is_not_ignored():
    model = build(DogeConfig(**SHAPE), varlen.NAME)
    with pytest.raises(ConfigError, match="DogeAttention computes a mask of its own"):
        model(input_ids=torch.randint(3, 64, (1, 9)))


@pytest.mark.parametrize("name", CONFIGS)
def test_right_padded_rows_need_no_mask(name):
    ours, eager = build(CONFIGS[name], varlen.NAME), build(CONFIGS[name], "eager")
    ids = torch.randint(3, 64, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    positions = torch.arange(20).expand(2, -1)
    with torch.no_grad():
        a = ours(input_ids=ids, position_ids=positions).logits
        b = eager(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    assert_same_tensor(a[mask.bool()], b[mask.bool()], summed(forward_terms(eager, tokens=20)))


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_does_not_leak_between_packed_sequences(name):
    model = build(CONFIGS[name], varlen.NAME)
    lengths = [11, 5, 9]
    rows = [torch.randint(3, 64, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(rows, 1), position_ids=positions, sequence_lengths=lengths).logits
        alone = torch.cat([model(input_ids=row).logits for row in rows], 1)
    assert_same_tensor(packed, alone, summed(forward_terms(model, tokens=sum(lengths))))


def test_packed_gradients_equal_those_of_the_rows_alone():
    model = build(CONFIGS["llama"], varlen.NAME)
    lengths = [6, 10]
    rows = [torch.randint(3, 64, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model(input_ids=torch.cat(rows, 1), position_ids=positions, sequence_lengths=lengths).logits.pow(
        2
    ).sum().backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(model(input_ids=row).logits.pow(2).sum() for row in rows).backward()
    for one, two in zip(packed, (p.grad for p in model.parameters()), strict=True):
        assert_same_tensor(one, two, summed(step_terms(model, tokens=sum(lengths))))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
@pytest.mark.parametrize("lengths", [None, [7, 13]])
def test_repeated_heads_give_what_grouped_ones_give(monkeypatch, capability, lengths):
    """As on a GPU without a kernel for groups: in fp32 that is every GPU."""
    torch.manual_seed(0)
    shapes = (2, 4, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def attend():
        out, _ = varlen.varlen_sdpa(None, *inputs, None, sequence_lengths=lengths)
        return out, torch.autograd.grad(out.pow(2).sum(), inputs)

    out, gradients = attend()
    calls = []
    kernel = varlen.scaled_dot_product_attention
    monkeypatch.setattr(varlen, "device_capability", lambda device: capability)
    monkeypatch.setattr(
        varlen,
        "scaled_dot_product_attention",
        lambda *args, **options: (
            calls.append((args[1].shape[1], options["enable_gqa"])) or kernel(*args, **options)
        ),
    )
    again, gradients_again = attend()
    assert set(calls) == {(4, False)}
    for ours, theirs in zip((again, *gradients_again), (out, *gradients), strict=True):
        assert_same_tensor(
            ours, theirs, summed(3 * (8 + 20))
        )  # heads of 8, 20 tokens; forward and twice back


def test_flash_attention_takes_groups_in_16_bit_and_under_autocast(monkeypatch):
    query = torch.empty(1, 4, 8, 16)
    monkeypatch.setattr(varlen, "device_capability", lambda device: (8, 0))
    assert varlen._supports_groups(query.bfloat16(), 0.0) and not varlen._supports_groups(query, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen._supports_groups(query, 0.0)
        monkeypatch.setattr(varlen, "device_capability", lambda device: (7, 5))
        assert not varlen._supports_groups(query, 0.0)


def test_the_kernel_of_cudnn_is_off():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
    varlen.register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def kernel_for_joined_sequences(query, key, value, offsets, key_offsets, longest, longest_key, **options):
    """What PyTorch documents of varlen_attn, which has no CPU kernel: (W, 0) is causal, with W tokens before."""
    call = signature(varlen_attn).bind(
        query, key, value, offsets, key_offsets, longest, longest_key, **options
    )
    call.apply_defaults()
    assert call.arguments.get("enable_gqa", True)  # torch 2.11 has no such flag
    assert torch.equal(offsets, key_offsets) and longest == longest_key
    before, after = options["window_size"]
    assert after == 0 and longest == offsets.diff().max()
    outs = []
    for start, stop in itertools.pairwise(offsets.tolist()):
        q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        window = None if before == -1 else before + 1
        outs.append(varlen._attend(q, k, v, window, dropout_p=0.0, scale=options["scale"])[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_call_for_joined_sequences_gives_what_a_call_for_each_does(monkeypatch, window, scale):
    torch.manual_seed(0)
    shapes = (1, 4, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    options = dict(scaling=scale, sliding_window=window, sequence_lengths=[7, 12, 1])

    def attend():
        out, _ = varlen.varlen_sdpa(None, *inputs, None, **options)
        return out, torch.autograd.grad(out.float().pow(2).sum(), inputs)

    out, gradients = attend()
    calls = []

    def kernel(*args, **settings):
        calls.append(settings)
        return kernel_for_joined_sequences(*args, **settings)

    varlen.offsets_of.cache_clear()
    monkeypatch.setattr(varlen, "device_capability", lambda device: (9, 0) if not calls else None)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    again, gradients_again = attend()
    assert len(calls) == 1 and again.shape == out.shape == (1, 20, 4, 8)
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(gradients, gradients_again)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "dropout", "supported"),
    [
        ((8, 0), "bfloat16", 128, 0.0, True),
        ((12, 0), "float16", 64, 0.0, True),
        ((7, 5), "float16", 64, 0.0, False),  # no flash kernel
        ((9, 0), "float32", 64, 0.0, False),
        ((9, 0), "bfloat16", 64, 0.1, False),  # the call does not drop out
        ((9, 0), "bfloat16", 84, 0.0, False),  # nor does it pad heads
        ((8, 9), "bfloat16", 208, 0.0, False),  # too little shared memory
    ],
)
def test_one_call_serves_joined_sequences_where_flash_runs(capability, dtype, head_dim, dropout, supported):
    assert varlen.JOINED.takes(capability, dtype, head_dim, dropout=dropout) == supported

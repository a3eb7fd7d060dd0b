import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen3Config

from sft_play import attention

SHAPE = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    head_dim=8, max_position_embeddings=128,
)  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral, window 7": MistralConfig(**SHAPE, sliding_window=7),
    "gemma": GemmaConfig(**SHAPE),
}


def build(config, implementation: str):
    attention.register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_right_padded_rows_need_no_mask(name):
    ours, eager = build(CONFIGS[name], attention.NAME), build(CONFIGS[name], "eager")
    ids = torch.randint(3, 64, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    positions = torch.arange(20).expand(2, -1)
    with torch.no_grad():
        a = ours(input_ids=ids, position_ids=positions).logits
        b = eager(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(a[mask.bool()], b[mask.bool()], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_do_not_see_each_other(name):
    model = build(CONFIGS[name], attention.NAME)
    lengths = [11, 5, 9]
    rows = [torch.randint(3, 64, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(rows, 1), position_ids=positions, sequence_lengths=lengths).logits
        alone = torch.cat([model(input_ids=row).logits for row in rows], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_packed_gradients_equal_those_of_the_rows_alone():
    model = build(CONFIGS["llama"], attention.NAME)
    lengths = [6, 10]
    rows = [torch.randint(3, 64, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model(input_ids=torch.cat(rows, 1), position_ids=positions, sequence_lengths=lengths).logits.pow(2).sum().backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(model(input_ids=row).logits.pow(2).sum() for row in rows).backward()
    for one, two in zip(packed, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)

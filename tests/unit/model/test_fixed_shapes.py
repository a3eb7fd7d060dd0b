"""Layers computed with fixed shapes give what transformers' own code gives."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.model.fixed_shapes import fix_shapes

WORDS, ROWS, TOKENS = 96, 3, 40
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
OWN_SIZES = {
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "longcat_flash": {
        "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 3, "q_lora_rank": 16, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
        "indexer_compress_ratio": 4, "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip


@pytest.fixture(params=OWN_SIZES)
def models(request: pytest.FixtureRequest):
    """A model as transformers computes it, and the same one with fixed shapes."""
    torch.manual_seed(0)
    sizes = OWN_SIZES[request.param]
    config = AutoConfig.for_model(request.param, **(sizes if "d_model" in sizes else SIZES | sizes))
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(theirs)
    fix_shapes(ours)
    assert any("forward" in vars(module) for module in ours.modules())
    return theirs, ours


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits_and_gradients_are_those_of_transformers(models, padding):
    ids = torch.randint(0, WORDS, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    if padding:
        lengths = torch.tensor([[TOKENS], [TOKENS - 3], [9]])
        mask = (torch.arange(TOKENS) < lengths).long()
        mask = mask.flip(1) if padding == "left" else mask
    both = [model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in models]
    torch.testing.assert_close(both[1], both[0])
    for logits in both:
        logits.square().mean().backward()
    for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_text_is_continued_as_by_transformers(models):
    prompts = torch.randint(0, WORDS, (2, 13))
    mask = torch.ones_like(prompts)
    mask[0, :5] = 0
    both = [
        model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for model in models
    ]
    assert torch.equal(*both)

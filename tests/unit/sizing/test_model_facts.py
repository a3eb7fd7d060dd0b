"""How much of a base is really 4-bit."""

import pytest
from transformers import DbrxConfig, LlamaConfig, MixtralConfig

from sft_play.errors import ConfigError
from sft_play.model.architecture.families import FAMILIES, Family
from sft_play.model.architecture.shape import empty_model
from sft_play.sizing.facts.model_facts import model_facts, module_facts, require_packable
from sft_play.units import format_bytes

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)  # fmt: skip


def packable(config):
    return require_packable(model_facts(config), module_facts(config))


def test_weights_are_counted_by_how_they_are_kept():
    attention = 2 * 64 * 64 + 2 * 64 * 32
    dense = module_facts(LlamaConfig(**SIZES))
    assert dense.packed == 2 * (attention + 3 * 64 * 96) and dense.experts == 0
    sparse = module_facts(MixtralConfig(**SIZES, num_local_experts=4))
    assert sparse.packed == 2 * attention and sparse.experts == 2 * 4 * 3 * 64 * 96
    assert dense.weights - dense.packed == 2 * 100 * 64 + 5 * 64  # embedding, head, norms


def test_the_plan_says_how_much_of_the_base_is_4_bit():
    modules = module_facts(LlamaConfig(**SIZES))
    sizes = f"{format_bytes(modules.four_bit_bytes)} in all, {format_bytes(modules.bytes(0))} in 16 bit"
    said = packable(LlamaConfig(**SIZES))
    assert said == f"82% of the weights of the base are 4-bit ({sizes})"
    assert modules.four_bit_bytes < 0.5 * modules.bytes(0)


def test_qlora_of_fused_experts_is_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"79% of the weights of MixtralForCausalLM are fused .*tuning.mode=lora"
    ):
        packable(MixtralConfig(**SIZES, num_local_experts=4))


def test_qlora_is_refused_where_all_experts_are_one_matrix():
    """DBRX keeps each weight of its experts as [experts * rows, columns]."""
    sizes = dict(d_model=64, n_heads=4, n_layers=2, vocab_size=100, max_seq_len=64)
    experts = {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4}
    config = DbrxConfig(**sizes, attn_config={"kv_n_heads": 2, "rope_theta": 1e4}, ffn_config=experts)
    with pytest.raises(ConfigError, match="of the weights of DbrxForCausalLM are fused experts"):
        packable(config)


def test_qlora_is_refused_where_weights_are_clamped(monkeypatch):
    monkeypatch.setitem(FAMILIES, "llama", Family(clamps_weights=True))
    with pytest.raises(ConfigError, match="llama clamps weights"):
        packable(LlamaConfig(**SIZES))


def test_weights_are_padded_to_rows_that_processes_divide():
    facts = module_facts(LlamaConfig(**SIZES))
    assert [facts.padded_share(processes) for processes in (1, 2)] == [1, 1]
    weights = list(empty_model(LlamaConfig(**SIZES)).parameters())
    padded = sum(-(-len(weight) // 40) * 40 * weight[0].numel() for weight in weights)
    assert facts.padded_share(40) == padded / sum(weight.numel() for weight in weights) > 1

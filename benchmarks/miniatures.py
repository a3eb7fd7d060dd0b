"""A small config of any causal language model that transformers knows, from the defaults of its class."""

import re
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

HIDDEN, HEADS, GROUPS, HEAD_DIM, INNER, VOCABULARY, POSITIONS = 64, 4, 2, 16, 128, 320, 512
MOST = 64  # of any other number above SMALL: a width that nobody has heard of
SMALL = 128
SPREAD = 0.15  # of the random weights: with so few channels, tokens would hardly see each other with less
FEWEST_LAYERS = 2
LEFT_OUT = ("id2label", "label2id", "per_layer_config")
# Multimodal models that people fine-tune on text, besides those that are in the mapping of causal models.
MULTIMODAL = (
    "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llava", "llava_next", "mistral3", "ovis2", "paligemma",
    "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip

# The first pattern that matches the whole name of a setting gives its value.
SIZES: tuple[tuple[str, int], ...] = (
    (r"\w*vocab(ulary)?_size\w*", VOCABULARY),
    (r"hidden_size|n_embd|d_model|dim|embedding_size|word_embed_proj_dim|model_dim|hidden_dim", HIDDEN),
    (r"\w*(num_key_value_heads|kv_heads)|num_query_groups", GROUPS),
    (r"linear_num_key_heads", GROUPS),
    (r"\w*attention_heads|n_heads?|num_heads|linear_num_value_heads|\w*num_attention_heads", HEADS),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_n_groups|n_groups|n_group|topk_group|ngroups|mamba_ngroups", 1),
    (r"\w*head_dim|\w*d_head|attention_head_size", HEAD_DIM),
    (r"(num_|n_)(local_|routed_)?experts|moe_num_experts|ffn_moe_num_experts", 4),
    (r"\w*shared_experts", 1),
    (r"num_experts_per_tok(en)?|\w*moe_topk|moe_k|top_k|moe_top_k", 2),
    (r"first_k_dense_replace|moe_layer_freq|decoder_sparse_step|moe_layer_start_index", 1),
    (r"\w*(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size)|n_inner|d_ff", INNER),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|\w*max_sequence_length", POSITIONS),
    (r"\w*lora_rank", 16),
    (r"\w*sliding_window|\w*window_size|attention_chunk_size", 32),
    (r"\w*(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_blocks)", FEWEST_LAYERS),
)

MLA = {"num_key_value_heads": HEADS}  # multi-head latent attention: all heads have keys and values
# What a config is refused without.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": HIDDEN, "num_hidden_layers": FEWEST_LAYERS,
            "vocab_size": VOCABULARY, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
    },
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}  # time, height, width
# What some architectures need besides, also as a part of others; their defaults leave it out, or sizes depend
# on each other.
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "axk2": MLA,
    "bailing_hybrid": MLA | {"num_expert_group": 2},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": GROUPS, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "dots3_note_text": MLA | {
        "use_dsa": True, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 2 * HEAD_DIM,
        "swa_qk_nope_head_dim": HEAD_DIM, "swa_v_head_dim": HEAD_DIM,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "intermediate_size": INNER, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 2 * HEAD_DIM}}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 2 * HEAD_DIM}}},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "gptj": {"rotary_dim": 8},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "kimi_linear": MLA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": MLA | {"qk_head_dim": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": MLA,
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": GROUPS},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen3_vl_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 32, "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM, "num_key_value_heads": HEADS,
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "hybrid_layer_ids": [1], "mamba_headdim": HEAD_DIM, "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def architectures() -> dict[str, str]:
    """The class of each `model_type` that `AutoModelForCausalLM` can build, and of multimodal ones."""
    multimodal = {name: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in MULTIMODAL}
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | multimodal


def miniature(model_type: str) -> PretrainedConfig:
    """A small config of an architecture, with one layer of each kind that it has, and at least two."""
    needed = NEEDED.get(model_type, {})
    tree = _shrunk(AutoConfig.for_model(model_type, **needed).to_dict()) | needed
    return AutoConfig.for_model(**tree | {"model_type": model_type})


def _shrunk(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config, or of a part of one, with small sizes."""
    count = next((tree[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if tree.get(name)), 0)
    kept = _layers_to_keep(tree, count)
    small: dict[str, Any] = {}
    for name, value in tree.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, list) and count > FEWEST_LAYERS and len(value) == count:
            small[name] = [value[layer] for layer in kept]
        else:
            small[name] = _small(name, value)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(small.get(name), int):
            small[name] = len(kept)
    return small | CHANGES.get(tree.get("model_type", ""), {})


def _layers_to_keep(tree: dict[str, Any], count: int) -> list[int]:
    """The first layer of each kind, in order; two if all are alike."""
    lists = [value for value in tree.values() if isinstance(value, list) and len(value) == count]
    lists = [] if count <= FEWEST_LAYERS else [values for values in lists if values != list(range(count))]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(str([values[layer] for values in lists]), layer)
    kept = sorted(kinds.values())
    return kept if len(kept) >= FEWEST_LAYERS else list(range(FEWEST_LAYERS))


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _shrunk(value)
    if name == "initializer_range":
        return SPREAD
    if name.endswith("token_id") or name.endswith("token_index"):
        return min(value, VOCABULARY - 1) if isinstance(value, int) else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    return MOST if value > SMALL else value

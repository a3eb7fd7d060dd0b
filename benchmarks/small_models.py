"""Small configs of the architectures that sizing is tested on; their models train on a CPU in a second."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

NAMES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "gpt_neox",
    "gpt2",
    "mixtral",
    "qwen3_moe",
)

# Two geometries without a common ratio; `groups` is the number of key and value heads.
WIDE = dict(hidden=256, inner=704, heads=8, groups=2, head_dim=32, vocabulary=4000, layers=4)
TALL = dict(hidden=160, inner=576, heads=5, groups=5, head_dim=32, vocabulary=1000, layers=7)


def small_config(name: str, geometry: dict[str, int], **changes: Any) -> PretrainedConfig:
    """A config of the architecture `name` with this geometry.

    Args:
        name: `model_type` of the architecture.
        geometry: WIDE, TALL or another dict with the same keys.
        changes: further config values.
    """
    g = geometry
    values: dict[str, Any] = dict(
        hidden_size=g["hidden"],
        intermediate_size=g["inner"],
        num_hidden_layers=g["layers"],
        num_attention_heads=g["heads"],
        vocab_size=g["vocabulary"],
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if name == "gpt2":
        values = dict(
            n_embd=g["hidden"],
            n_inner=g["inner"],
            n_layer=g["layers"],
            n_head=g["heads"],
            vocab_size=g["vocabulary"],
            n_positions=4096,
            **{name: values[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
    elif name != "gpt_neox":
        values["num_key_value_heads"] = g["groups"]
    if name in ("qwen3", "gemma3_text", "qwen3_moe"):
        values["head_dim"] = g["head_dim"] + 32  # in these, heads x head_dim is not hidden_size
    if name == "mixtral":
        values |= dict(num_experts_per_tok=2, num_local_experts=4)
    elif name == "qwen3_moe":
        values |= dict(num_experts_per_tok=2, num_experts=4, moe_intermediate_size=g["inner"] // 2)
    return AutoConfig.for_model(name, **(values | changes))

"""Architectures that llama.cpp runs as transformers does, and what a GGUF file says about them.

Facts from llama.cpp's converter and model loader (ggml-org/llama.cpp, conversion/ and src/, read 2026-11-22).
What llama.cpp would take from its own tables instead of the file is compared here, and refused if it differs.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from sft_play.errors import ConfigError
from sft_play.spelling import make, var

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROPE_TYPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class Gguf:
    """How llama.cpp runs a family of models; a new one is a row of FAMILIES."""

    name: str  # in GGUF
    activation: str = "silu"
    rope_types: tuple[str, ...] = ROPE_TYPES
    attention_bias: bool = True  # whether it knows one
    rotates_neighbours: bool = False  # channels (2i, 2i + 1), where transformers rotates (i, i + half)
    norm_offset: int = 0  # of norms, whose weights transformers keeps without it
    period: int = 0  # one layer of so many attends to the whole text, the others to a window
    scaled_by_width: int = 0  # so many layers scale attention by the width per head, not by its size


LLAMA = Gguf("llama", rope_types=(*ROPE_TYPES, "llama3"), rotates_neighbours=True)
GEMMA = Gguf("gemma", activation="gelu_pytorch_tanh", norm_offset=1)
FAMILIES = {  # by model_type of transformers
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Gguf("qwen2"),
    "qwen3": Gguf("qwen3", attention_bias=False),
    "gemma2": replace(GEMMA, name="gemma2", period=2, scaled_by_width=46),
    "gemma3_text": replace(GEMMA, name="gemma3", period=6, scaled_by_width=62),
}
# of yarn, for which llama.cpp's file has no key or none that means the same
YARN_SETTINGS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def gguf_family(config: PretrainedConfig) -> Gguf:
    """The family of an architecture in GGUF, e.g. that of Llama also for Mistral.

    Raises:
        ConfigError: llama.cpp does not have it, or would compute something else.
    """
    text = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise ConfigError(
            f"{var(FORMAT='gguf')}: models of type {text.model_type} cannot be exported, only those of type "
            f"{', '.join(FAMILIES)}. Run `{make('merge')}`, and llama.cpp's convert_hf_to_gguf.py on its "
            "folder"
        )
    difference = _difference(family, text)
    if difference:
        raise ConfigError(
            f"{var(FORMAT='gguf')}: llama.cpp would not compute what was trained ({text.model_type}): "
            f"{difference}. Run `{make('merge')}`: its folder works in transformers and vLLM"
        )
    return family


def _difference(family: Gguf, text: PretrainedConfig) -> str | None:
    """What llama.cpp would do differently; None if nothing."""
    kinds = {rope.get("rope_type", "default") for rope in rope_settings(text).values()}
    unknown = kinds.difference(family.rope_types)
    activation = getattr(text, "hidden_activation", None) or text.hidden_act
    if unknown:
        return f"it does not know rope_type {', '.join(sorted(unknown))}"
    if problem := _yarn_difference(family, text):
        return problem
    if activation != family.activation:
        return f"it does not know the activation {activation} here"
    if not family.attention_bias and text.attention_bias:
        return "it knows no attention_bias here"
    return _window_difference(family, text) if family.period else None


def _yarn_difference(family: Gguf, text: PretrainedConfig) -> str | None:
    yarn = [rope for rope in rope_settings(text).values() if rope.get("rope_type") == "yarn"]
    if yarn and family.period:
        return "it applies rope_type yarn to layers with a window, too"
    own = [key for rope in yarn for key in YARN_SETTINGS if rope.get(key) is not None]
    return f"it computes {own[0]} of rope_type yarn by itself" if own else None


def _window_difference(family: Gguf, text: PretrainedConfig) -> str | None:
    period = family.period
    pattern = [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(text.num_hidden_layers)
    ]
    per_head = text.hidden_size / text.num_attention_heads
    scale = per_head if text.num_hidden_layers == family.scaled_by_width else text.head_dim
    if list(text.layer_types) != pattern:
        return f"there, layers {period}, {2 * period}, ... have full attention"
    if text.query_pre_attn_scalar != scale:
        return f"it scales attention by {scale:g}, not by query_pre_attn_scalar={text.query_pre_attn_scalar}"
    return None


def rope_settings(text: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """The settings of rotary positions by kind of layer ("full_attention", maybe "sliding_attention")."""
    found = text.rope_parameters or {}
    return found if "full_attention" in found else {"full_attention": found}


def head_size(text: PretrainedConfig) -> int:
    """Channels of an attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def describe(writer: "GGUFWriter", text: PretrainedConfig) -> None:
    """Writes the sizes of a model into a GGUF writer."""
    writer.add_vocab_size(text.vocab_size)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_key_length(head_size(text))
    writer.add_value_length(head_size(text))
    writer.add_rope_dimension_count(head_size(text))
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    _describe_rope(writer, text)
    if FAMILIES[text.model_type].period:
        writer.add_sliding_window(text.sliding_window)
        if text.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(text.attn_logit_softcapping)
        if text.final_logit_softcapping:
            writer.add_final_logit_softcapping(text.final_logit_softcapping)


def _describe_rope(writer: "GGUFWriter", text: PretrainedConfig) -> None:
    from gguf import RopeScalingType

    settings = rope_settings(text)
    rope = settings["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in settings:
        writer.add_rope_freq_base_swa(settings["sliding_attention"]["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

"""Norms and rotary embeddings as transformers computes them, in place of our own passes (`layer_forward`)."""

from collections.abc import Callable
from typing import Any

from transformers.models.llama import modeling_llama

from sft_play.model import layer_forward

norm_forward = modeling_llama.LlamaRMSNorm.forward
rotated = modeling_llama.apply_rotary_pos_emb
forward_for = layer_forward.forward_for
STAND_INS: dict[str, Callable[..., Any]] = {}  # a trace computes them as they are

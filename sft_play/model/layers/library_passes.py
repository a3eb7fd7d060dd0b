"""Norms and rotary embeddings as transformers computes them, in place of our own passes (`own_passes`)."""

from collections.abc import Callable
from typing import Any

from transformers.models.llama import modeling_llama

from sft_play.model.layers import own_passes

norm_forward = modeling_llama.LlamaRMSNorm.forward
rotated = modeling_llama.apply_rotary_pos_emb
forward_for = own_passes.forward_for
STAND_INS: dict[str, Callable[..., Any]] = {}  # a trace computes them as they are

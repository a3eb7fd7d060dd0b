"""Layers whose shapes depend on the data in transformers, computed with the same values and fixed shapes.

Some experts run in a loop, one after another, and what it keeps depends on how many tokens each of them gets;
Qwen4-Exp's indexer runs a loop over tokens. So the memory of a step would be known only afterwards, and a GPU
would wait in each turn.
"""

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _grouped_linear, grouped_mm_experts_forward


def fix_shapes(model: torch.nn.Module) -> None:
    """Computes the experts of JetMoE, DBRX and LongCat Flash by grouped products, and an index at once."""
    for module in model.modules():
        forward = FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)  # type: ignore[assignment]


def _by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the choices of tokens by expert.

    Args:
        chosen: index of an expert, [tokens, choices].
        experts: their number.

    Returns:
        Indices into the flattened choices, [tokens * choices], and where each expert's part of them ends,
        [experts].
    """
    sorted_experts, order = chosen.flatten().sort()
    numbers = torch.arange(experts, device=chosen.device)
    return order, torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


def _jetmoe_gating(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As JetMoeTopKGating, but where each expert's part ends stays on the device, in place of its size."""
    logits = self.layer(hidden_states).float()
    best, chosen = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(best, dim=1).type_as(hidden_states).flatten()
    order, ends = _by_expert(chosen, self.num_experts)
    return order, order // self.top_k, gates[order], ends, logits


def _jetmoe_experts(self: Any, inputs: Tensor, ends: Tensor) -> Tensor:
    return _grouped_linear(inputs, self.weight, ends)


def _dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    hidden = hidden_states.reshape(-1, self.hidden_size)
    gate, up, down = (
        weight.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
        for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    )
    order, ends = _by_expert(top_k_index, self.num_experts)
    token = order // top_k_index.shape[-1]
    inputs = hidden[token]
    inner = self.mlp.activation_fn(_grouped_linear(inputs, gate, ends)) * _grouped_linear(inputs, up, ends)
    outputs = _grouped_linear(inner, down, ends, is_transposed=True)
    weighted = outputs * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype)).view_as(hidden_states)


def _longcat_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts with the highest numbers have no weights and return what they get."""
    with_weights: Any = SimpleNamespace(
        num_experts=self.num_routed_experts,
        gate_up_proj=self.gate_up_proj[: self.num_routed_experts],
        down_proj=self.down_proj,
        act_fn=self.act_fn,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=self.zero_expert_num > 0,  # as those of other ranks, the others count as zero
        _apply_gate=lambda both: _gated(self.act_fn, both),
    )
    computed = grouped_mm_experts_forward(with_weights, hidden_states, top_k_index, top_k_weights)
    passed_on = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(-1, keepdim=True)
    return computed + (hidden_states * passed_on).to(computed.dtype)


def _gated(activation: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up


@torch.no_grad()
def _qwen4_indexer(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, past_key_values: Any
) -> Tensor:
    """Which keys each query attends to: the blocks with the best scores, and what follows its last block.

    A query's blocks divide the keys that it sees. These are one run that starts at the row's first key that
    is no padding, so that all queries share the blocks and differ in how many of them are complete.

    Args:
        self: the indexer.
        hidden_states: [batch, queries, width].
        position_embeddings: cosines and sines of all keys, [batch, keys, head size] each.
        attention_mask: [batch, 1, queries, keys].
        past_key_values: the cache while text is generated.

    Returns:
        [batch, 1, queries, keys], true where a query attends.
    """
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    batch, queries, _ = hidden_states.shape
    cos, sin = position_embeddings
    query, keys = self.index_qk_proj(hidden_states).split(
        [self.index_n_heads * self.index_head_dim, self.index_head_dim], dim=-1
    )
    query = self.q_layernorm(query.view(batch, queries, self.index_n_heads, self.index_head_dim))
    query = apply_rotary_pos_emb(query, cos=cos[:, -queries:], sin=sin[:, -queries:], unsqueeze_dim=2)
    if past_key_values is not None:
        keys = past_key_values.update_indexer(keys, self.layer_idx)

    visible = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
    total, block = visible.shape[-1], self.compress_ratio
    blocks = total // block
    if blocks == 0:
        return visible[:, None]
    start = visible[:, -1].int().argmax(-1, keepdim=True)
    members = (start + torch.arange(blocks * block, device=keys.device)).clamp(max=total - 1)
    pooled = _rows(keys, members).view(batch, blocks, block, -1).float().mean(dim=2).to(keys.dtype)
    first = members[:, ::block]
    pooled = apply_rotary_pos_emb(
        self.k_layernorm(pooled)[:, :, None], cos=_rows(cos, first), sin=_rows(sin, first), unsqueeze_dim=2
    ).squeeze(2)
    scores = torch.einsum("bqhd,bnd->bqhn", query.float(), pooled.float()).relu().sum(2)
    return _best_blocks(scores, visible, start, block, self.block_topk)[:, None]


def _best_blocks(scores: Tensor, visible: Tensor, start: Tensor, block: int, most: int) -> Tensor:
    """The keys of the complete blocks with the best scores, and those after the last complete block.

    Args:
        scores: of blocks that may be incomplete, [batch, queries, blocks].
        visible: which keys a query sees, [batch, queries, keys].
        start: the key at which the blocks start, [batch, 1].
        block: keys of a block.
        most: blocks to choose.

    Returns:
        [batch, queries, keys].
    """
    blocks, seen = scores.shape[-1], visible.sum(-1, keepdim=True)
    complete = seen // block
    scores = scores.masked_fill(torch.arange(blocks, device=scores.device) >= complete, -torch.inf)
    best = scores.topk(min(most, blocks))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
    place = (torch.arange(visible.shape[-1], device=scores.device) - start)[:, None]
    block_of = (place // block).clamp(0, blocks - 1).expand_as(visible)
    after_blocks = (place >= complete * block) & (place < seen)
    return (chosen.gather(-1, block_of) & (place >= 0)) | after_blocks


def _rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """Rows of [batch, rows, columns] by the indices of each batch, [batch, n]."""
    return tensor.gather(1, indices[:, :, None].expand(-1, -1, tensor.shape[-1]))


FORWARDS: dict[str, Callable[..., Any]] = {
    "JetMoeTopKGating": _jetmoe_gating,
    "JetMoeParallelExperts": _jetmoe_experts,
    "DbrxExperts": _dbrx_experts,
    "LongcatFlashExperts": _longcat_experts,
    "Qwen4ExpTextQSAIndexer": _qwen4_indexer,
}

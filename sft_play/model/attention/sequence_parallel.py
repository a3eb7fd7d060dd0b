"""Sequence parallelism as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509).

The ranks of a group have the same micro-batch, of joined rows, and each computes with its part of the tokens:
embedding, norms, projections, MLP and loss see nothing but single tokens. Attention needs whole sequences.
There, an all-to-all exchanges tokens for heads: each rank gets its part of the heads for all tokens, so the
boundaries of joined rows, sliding windows and sinks work as they do without it. Another one brings the
outputs back.

    rank 0: tokens 0-3, all heads              tokens 0-7, heads 0-1              tokens 0-3, all heads
    rank 1: tokens 4-7, all heads  -exchange-> tokens 0-7, heads 2-3  -exchange-> tokens 4-7, all heads
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.nn.functional import pad

from sft_play.errors import ConfigError
from sft_play.model.collators import Batch, Collator
from sft_play.parts import IGNORED

KEY = "sequence_group"  # of a divided batch, which the model hands on to attention


@dataclass(frozen=True)
class Part:
    """This process's place in its group; `group` is a process group of torch."""

    rank: int  # within the group
    ranks: int
    group: Any


def part_of_group(ranks: int, timeout_s: float) -> Part | None:
    """This process's place among so many neighbours; all processes call it. None for groups of one."""
    if ranks == 1:
        return None
    known = _PARTS.setdefault(distributed.group.WORLD, {})
    if (ranks, timeout_s) not in known:
        group, _ = distributed.new_subgroups(ranks, timeout=timedelta(seconds=timeout_s))
        known[ranks, timeout_s] = Part(distributed.get_rank(group), ranks, group)
    return known[ranks, timeout_s]


# Of each world as long as it lives: a group is a set of connections, and a run may begin several sessions.
# One process that plans in between, in worlds of its own, must not forget what the others remember.
_PARTS: WeakKeyDictionary[Any, dict[tuple[int, float], Part]] = WeakKeyDictionary()


def sequence_parallel_micro_batches(collate: Collator, part: Part, pad_id: int) -> Collator:
    """The part of a joined micro-batch that a rank computes with, [1, tokens / ranks].

    Labels are shifted before tokens are divided, since the next token of the last one is on the next rank.
    Where the tokens cannot be divided, a sequence of padding without labels is joined to the others.
    """

    def divided(rows: Sequence[dict[str, Any]]) -> Batch:
        return divide(collate(rows), part, pad_id)

    return divided


def divide(batch: Batch, part: Part, pad_id: int) -> Batch:
    """A rank's part of a batch of joined rows, as `sequence_parallel_micro_batches` has it."""
    lengths = list(batch["sequence_lengths"])
    missing = -sum(lengths) % part.ranks
    shifted = pad(batch["labels"][:, 1:], (0, 1 + missing), value=IGNORED)
    ids = pad(batch["input_ids"], (0, missing), value=pad_id)
    positions = torch.cat([batch["position_ids"], torch.arange(missing)[None]], dim=1)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(part.ranks, dim=1)[part.rank].clone()  # and the others are freed

    return {
        "input_ids": own(ids),
        "labels": None,  # the trainer counts those that are shifted, if there are labels at all
        "shift_labels": own(shifted),
        "position_ids": own(positions),
        "sequence_lengths": lengths + ([missing] if missing else []),  # of all ranks
        KEY: part.group,
    }


class _AllToAll(torch.autograd.Function):
    """Sends element i of [ranks, ...] to rank i, and puts what rank i sent in its place."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


def tokens_for_heads(tensor: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """[1, heads, own tokens, head_dim] of each rank -> [1, own heads, tokens, head_dim]."""
    ranks, (_, heads, own, size) = group.size(), tensor.shape
    sent = tensor[0].transpose(0, 1).reshape(own, ranks, heads // ranks, size).transpose(0, 1)
    received = _AllToAll.apply(sent.contiguous(), group)
    return received.reshape(1, ranks * own, heads // ranks, size).transpose(1, 2)


def heads_for_tokens(tensor: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """[1, tokens, own heads, head_dim] of each rank -> [1, own tokens, heads, head_dim]."""
    ranks, (_, tokens, heads, size) = group.size(), tensor.shape
    sent = tensor.reshape(ranks, tokens // ranks, heads, size)
    received = _AllToAll.apply(sent.contiguous(), group)
    return received.transpose(0, 1).reshape(1, tokens // ranks, ranks * heads, size)


def repeated_heads(heads: int, key_heads: int, ranks: int) -> int:
    """How often each key and value head is repeated, so that so many ranks have as many of them each.

    Raises:
        ConfigError: the heads of the query cannot be divided among the ranks.
    """
    if heads % ranks:
        raise ConfigError(f"attention with {heads} heads cannot be divided among {ranks} ranks")
    groups = heads // key_heads
    return next(times for times in range(1, groups + 1) if groups % times == key_heads * times % ranks == 0)


def attend_in_parallel(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Any,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a rank's tokens to all tokens of its group.

    Args:
        attend: attention over whole sequences for some of the heads, from query, key, value and their sinks.
        query: [1, heads, own tokens, head_dim].
        key: [1, key_value_heads, own tokens, head_dim].
        value: as the key.
        group: the ranks that divide the tokens.
        sinks: [heads] or None.

    Returns:
        [1, own tokens, heads, head_dim].
    """
    times = repeated_heads(query.shape[1], key.shape[1], group.size())
    if times > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    if sinks is not None:
        sinks = sinks.chunk(group.size())[distributed.get_rank(group)]
    out = attend(*(tokens_for_heads(tensor, group) for tensor in (query, key, value)), sinks)
    return heads_for_tokens(out, group)

"""NEFTune (Jain et al. 2023, arXiv 2310.05914): noise on the embeddings of the tokens while training.

transformers has it too, but draws the noise of a micro-batch at once and scales it by the length of the
micro-batch, so what is learned would depend on how a step is cut. Here the noise of a row follows from its
tokens, the step and the seed: it is the same in any micro-batch, on any process, and in a resumed run.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft_play.data.tokens import IGNORED

SPREAD = -1640531527  # 2^32 / golden ratio as a signed number; it is odd, so its multiples all differ
MIXERS = ((16, -2048144789), (13, -1028477387))  # of MurmurHash3's finalizer: shift, factor


def add_noise(model: Any, alpha: float, seed: int = 0) -> None:
    """Makes a causal language model add noise to its input embeddings in training mode.

    A row of L tokens with hidden size d gets values that are uniform within alpha / sqrt(L * d) of 0. What
    comes after the last token with loss, as padding does, does not change the loss, and does not count. The
    model's attribute `noise_step` is the step to learn from.
    """
    seen: list[dict[str, Any]] = []  # the batch of this forward pass

    def see_batch(_: Any, args: Any, batch: dict[str, Any]) -> None:
        seen[:] = [batch]

    def with_noise(module: Any, _: Any, embedded: Tensor) -> Tensor:
        batch = seen.pop() if seen else None
        if batch is None or not module.training:
            return embedded
        hidden = embedded.shape[-1]
        keys, lengths = _keys(batch, seed + model.noise_step * SPREAD)
        columns = torch.arange(hidden, dtype=torch.int32, device=keys.device)
        noise = _mixed(keys[:, None] + columns * SPREAD).float()  # within 2^31 of 0
        noise *= (alpha / (lengths * hidden).sqrt() / 2**31)[:, None]
        return embedded + noise.view_as(embedded).to(embedded.dtype)

    model.noise_step = 0
    model.register_forward_pre_hook(see_batch, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(with_noise)


def _keys(batch: dict[str, Any], salt: int) -> tuple[Tensor, Tensor]:
    """For each token of a batch, what its noise is made from and the length of its row, both [tokens]."""
    ids, labels = batch["input_ids"].flatten(), batch.get("labels")
    sizes = _row_sizes(batch).to(ids.device)
    numbers = torch.arange(len(sizes), device=ids.device)
    row = numbers.repeat_interleave(sizes, output_size=len(ids))
    place = torch.arange(len(ids), device=ids.device) - (sizes.cumsum(0) - sizes)[row]
    lengths = sizes
    if labels is not None:
        ends = torch.where(labels.flatten() == IGNORED, 0, place + 1)
        lengths = torch.ones_like(sizes).scatter_reduce(0, row, ends, "amax")
    place_keys = place.int() * SPREAD
    words = _mixed(ids.int() * SPREAD ^ _mixed(place_keys.clone()))
    words *= place < lengths[row]
    rows = torch.zeros_like(sizes, dtype=torch.int32).index_add(0, row, words)
    rows = _mixed(rows ^ (salt % 2**32 - 2**31))
    return _mixed(rows[row] + place_keys), lengths[row]


def _row_sizes(batch: dict[str, Any]) -> Tensor:
    """Tokens of each joined row, or of each padded one with its padding, [rows]."""
    if "sequence_lengths" in batch:
        return torch.from_numpy(np.asarray(batch["sequence_lengths"], dtype=np.int64))
    if "cu_seq_lens_q" in batch:
        return batch["cu_seq_lens_q"].diff().long()
    rows, tokens = batch["input_ids"].shape
    return torch.full((rows,), tokens)


def _mixed(values: Tensor) -> Tensor:
    """Overwrites 32-bit integers of any shape with pseudorandom ones, each made from the one in its place."""
    for shift, factor in MIXERS:
        values ^= (values >> shift) & (2 ** (32 - shift) - 1)  # a shift that fills with zeros
        values *= factor
    values ^= (values >> 16) & 0xFFFF
    return values

"""NEFTune (Jain et al. 2023, arXiv 2310.05914): noise on the embeddings of the tokens while training.

transformers has it too, but scales the noise by the length of the micro-batch. Here that is the length of all
rows together if they are joined, so the noise would depend on how a step is cut.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


def add_noise(model: Any, alpha: float) -> None:
    """Makes a causal language model add noise to its input embeddings in training mode.

    A sequence of L tokens with hidden size d gets values that are uniform within alpha / sqrt(L * d) of 0,
    from the process's random numbers, as those of dropout are. Padded rows count as long as the longest one.

    Args:
        model: with or without an adapter around it.
        alpha: strength of the noise.
    """
    lengths: list[Tensor] = []  # of the sequences that are joined in the batch of this forward pass

    def see_batch(_: Any, args: Any, batch: dict[str, Any]) -> None:
        lengths[:] = _joined_lengths(batch)

    model.register_forward_pre_hook(see_batch, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(partial(_with_noise, alpha, lengths))


def _joined_lengths(batch: dict[str, Any]) -> list[Tensor]:
    """The lengths of the joined sequences, [sequences]; an empty list for padded rows."""
    if "sequence_lengths" in batch:
        return [torch.from_numpy(np.asarray(batch["sequence_lengths"], dtype=np.int64))]
    return [batch["cu_seq_lens_q"].diff()] if "cu_seq_lens_q" in batch else []


def _with_noise(alpha: float, lengths: list[Tensor], module: Any, args: Any, embedded: Tensor) -> Tensor:
    """The embeddings, [rows, tokens, hidden], with noise."""
    if not module.training:
        return embedded
    rows, tokens, hidden = embedded.shape
    noise = torch.empty_like(embedded).uniform_(-1, 1)
    if lengths:
        of_token = lengths[0].repeat_interleave(lengths[0], output_size=tokens)
        noise *= (alpha / (of_token * hidden).sqrt()).to(embedded)[:, None]
    else:
        noise *= alpha / (tokens * hidden) ** 0.5
    return embedded + noise

"""Tokenized rows -> the tensors of a micro-batch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sft_play.data.batching import PAD_TO_MULTIPLE_OF
from sft_play.parts import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, Any]
Collator = Callable[[Sequence[dict[str, Any]]], Batch]


def padded_micro_batches(rows: "Dataset", pad_id: int) -> Collator:
    """Pads the rows of a micro-batch, which lists them by index, on the right to the same length.

    It is that of the longest, rounded up to PAD_TO_MULTIPLE_OF. input_ids, labels and position_ids are [rows,
    tokens]; there is no mask (model/attention/varlen.py).
    """
    table = rows.with_format("arrow")  # its values need not become Python's numbers

    def collate(batches: Sequence[dict[str, Any]]) -> Batch:
        taken = table[batches[0]["rows"]]
        lengths = taken["length"].to_numpy().tolist()
        batch = {}
        for name, value in (("input_ids", pad_id), ("labels", IGNORED)):
            parts = _flat_tensor(taken[name]).split(lengths)
            wide = pad_sequence(list(parts), batch_first=True, padding_value=value)
            batch[name] = pad(wide, (0, -wide.shape[1] % PAD_TO_MULTIPLE_OF), value=value)
        tokens = batch["labels"].shape[1]
        return batch | {"position_ids": torch.arange(tokens).expand(len(lengths), -1).contiguous()}

    return collate


def _flat_tensor(column: Any) -> torch.Tensor:
    """All values of an Arrow column of lists, one after the other: [values]."""
    return torch.from_numpy(column.combine_chunks().flatten().to_numpy().astype(np.int64))


def joined_micro_batches(rows: "Dataset", boundaries: str | None) -> Collator:
    """Joins the rows of a micro-batch into one sequence of [1, tokens], without padding.

    position_ids restart with each row, and attention gets the boundaries of the rows as it takes them: as
    tensors of cumulative lengths ("offsets") or as plain lengths. The first label of each row is already
    -100, so no row predicts the first token of the next one.

    Example: rows of 3 and 2 tokens give position_ids [[0, 1, 2, 0, 1]] and sequence_lengths [3, 2].
    """
    table = rows.with_format("arrow")

    def collate(batches: Sequence[dict[str, Any]]) -> Batch:
        taken = table[batches[0]["rows"]]
        lengths = taken["length"].to_numpy()
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        batch: Batch = {name: _flat_tensor(taken[name])[None] for name in ("input_ids", "labels")}
        batch["position_ids"] = torch.from_numpy(np.arange(len(starts)) - starts)[None]
        return batch | (
            flash_boundaries(lengths) if boundaries == "offsets" else {"sequence_lengths": lengths.tolist()}
        )

    return collate


def flash_boundaries(lengths: np.ndarray) -> Batch:
    """The boundaries of sequences of these lengths, [n], as the FlashAttention kernels expect them."""
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

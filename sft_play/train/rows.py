"""Tokenised rows -> the data set that the trainer walks through in order, and the collators that make batches of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sft_play.data.batching import FILLER, padded_rows, schedule
from sft_play.data.packing import pack
from sft_play.sizing.planner import Plan

IGNORED = -100


@dataclass(frozen=True)
class TrainingRows:
    """The rows of the whole run in the order of learning, and how much each optimizer step learns from."""

    dataset: Dataset
    tokens_per_step: list[int]  # padding not counted
    supervised_per_step: list[int]


def pack_rows(dataset: Dataset, capacity: int) -> Dataset:
    """Joins rows into sequences of at most `capacity` tokens; `sequence_lengths` keeps where each row ends.

    Tokens are not copied one by one: the columns' flat values stay, only the offsets of the list arrays change.
    """
    groups = pack(dataset["length"], capacity)
    table = dataset.select([row for group in groups for row in group]).with_format("arrow")[:]
    rows_ends = np.cumsum([0] + [len(group) for group in groups])
    lengths = table["length"].to_numpy()
    token_ends = np.concatenate([[0], np.cumsum(lengths)])[rows_ends].astype(np.int32)

    def regroup(values: pa.Array, ends: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)

    def flat(name: str) -> pa.Array:
        return table[name].combine_chunks().flatten()

    return Dataset(
        pa.table(
            {
                "input_ids": regroup(flat("input_ids"), token_ends),
                "labels": regroup(flat("labels"), token_ends),
                "length": pa.array(np.diff(token_ends), pa.int64()),
                "sequence_lengths": regroup(pa.array(lengths, pa.int32()), rows_ends.astype(np.int32)),
            }
        )
    )


def with_filler(dataset: Dataset, pad_id: int) -> Dataset:
    """Adds one last row that no loss sees; FILLER in a schedule stands for it."""
    row: dict[str, list] = {"input_ids": [[pad_id]], "labels": [[IGNORED]], "length": [1]}
    if "sequence_lengths" in dataset.column_names:
        row["sequence_lengths"] = [[1]]
    return concatenate_datasets([dataset, Dataset.from_dict(row, features=dataset.features)])


def count_supervised(dataset: Dataset) -> np.ndarray:
    """Supervised tokens of each row."""
    column = dataset.with_format("arrow")[:]["labels"].combine_chunks()
    learned = np.concatenate([[0], np.cumsum(column.flatten().to_numpy() != IGNORED)])
    ends = np.cumsum([0, *column.value_lengths().to_pylist()])
    return np.diff(learned[ends])


def training_rows(dataset: Dataset, plan: Plan, *, seed: int, group_by_length: bool, pad_id: int) -> TrainingRows:
    """All rows of the run in the order in which they are learned: `plan.total_steps` x `plan.rows_per_step`."""
    rows = pack_rows(dataset, plan.max_seq_len) if plan.packing else dataset.select_columns(["input_ids", "labels", "length"])
    lengths = list(rows["length"])
    order = schedule(lengths, plan.rows_per_step, plan.total_steps, seed, group_by_length and not plan.packing)
    indices = np.array(order)
    real = indices != FILLER
    tokens = np.where(real, np.array([*lengths, 0])[indices], 0).reshape(plan.total_steps, -1).sum(axis=1)
    supervised = np.where(real, np.append(count_supervised(rows), 0)[indices], 0).reshape(plan.total_steps, -1).sum(axis=1)
    indices[~real] = len(rows)
    return TrainingRows(with_filler(rows, pad_id).select(indices), tokens.tolist(), supervised.tolist())


def evaluation_rows(dataset: Dataset, multiple: int, pad_id: int) -> Dataset:
    """All rows, filled up to a multiple of the rows that all processes score at once: no row is scored twice."""
    rows = dataset.select_columns(["input_ids", "labels", "length"])
    order = np.array(padded_rows(len(rows), multiple))
    order[order == FILLER] = len(rows)
    return with_filler(rows, pad_id).select(order)


Collator = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def padded_collator(pad_id: int, multiple: int = 8) -> Collator:
    """Rows padded on the right to the longest of the batch, rounded up to `multiple` tokens; no mask (see attention.py).

    input_ids, labels and position_ids are [rows, tokens].
    """

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=pad_id)
        labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORED)
        extra = -ids.shape[1] % multiple
        ids, labels = pad(ids, (0, extra), value=pad_id), pad(labels, (0, extra), value=IGNORED)
        positions = torch.arange(ids.shape[1]).expand(len(rows), -1).contiguous()
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    return collate


def packed_collator(flash: bool) -> Collator:
    """Packed rows joined into one row of [1, tokens]; position_ids start anew in each sequence.

    The first label of each sequence is -100 already, so no sequence predicts the next one's first token. FlashAttention
    (`flash`) takes the boundaries as tensors, the other kernels as plain lengths.
    """

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lengths = [length for row in rows for length in row["sequence_lengths"]]
        batch: dict[str, Any] = {
            "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
            "labels": torch.tensor([[label for row in rows for label in row["labels"]]]),
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        }
        if flash:
            ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            return batch | {
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": max(lengths),
                "max_length_k": max(lengths),
            }
        return batch | {"sequence_lengths": lengths}

    return collate

"""Groups tokenized rows into the micro-batches of the run, in the order in which the trainer reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets

from sft_play.data.batching import FILLER, Share, make_schedule, pack_shares, pack_sums, padded_length
from sft_play.data.store import column_of, count_supervised
from sft_play.job import Job
from sft_play.parts import IGNORED
from sft_play.plan import Plan
from sft_play.planning.candidates.batch import evaluation_batches

COLUMNS = ("input_ids", "labels", "length", "pictures")


@dataclass(frozen=True)
class MicroBatches:
    """Rows and their grouping into micro-batches.

    `dataset` has one element per micro-batch: the indices of its `rows`, its number of `tokens` as the model
    sees it, and its `place` among all.
    """

    rows: Dataset
    dataset: Dataset


@dataclass(frozen=True)
class TrainingRows(MicroBatches):
    """The micro-batches of the whole run, and the tokens of each optimizer step."""

    tokens_per_step: list[int]  # padding not counted
    supervised_per_step: list[int]
    padding_share: float  # of the tokens that the model sees in the whole run


def unpacked(
    values: np.ndarray, offsets: np.ndarray, packs: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Micro-batches of packed sequences as micro-batches of their rows, which are joined anyway.

    `values` are indices of `packs`, or FILLER, [sequences], cut at `offsets`, [micro-batches + 1]; the result
    are those of rows. So no token is copied, and none is held in memory.
    """
    sizes = np.array([len(packs[value]) if value != FILLER else 1 for value in values], dtype=np.int64)
    rows = [packs[value] if value != FILLER else [FILLER] for value in values]
    return np.concatenate(rows), np.concatenate([[0], np.cumsum(sizes)])[offsets]


def columns_of(dataset: Dataset) -> Dataset:
    """The columns of prepared rows that batches are made of."""
    return dataset.select_columns([name for name in COLUMNS if name in dataset.column_names])


def with_filler(dataset: Dataset, pad_id: int) -> Dataset:
    """Appends a row without supervised tokens; FILLER in a schedule stands for it."""
    row: dict[str, list] = {"input_ids": [[pad_id]], "labels": [[IGNORED]], "length": [1], "pictures": [[]]}
    row = {name: row[name] for name in dataset.column_names}
    return concatenate_datasets([dataset, Dataset.from_dict(row, features=dataset.features)])


def training_rows(
    dataset: Dataset,
    plan: Plan,
    *,
    seed: int,
    hidden_size: int,
    pad_id: int,
    shares: Sequence[Share] | None = None,
) -> TrainingRows:
    """All micro-batches of the run in training order: optimizer steps x accumulation x world size.

    The data set has columns input_ids, labels and length; shares say how often each row is seen per epoch,
    None for once.
    """
    rows = columns_of(dataset)
    lengths, supervised = column_of(rows, "length"), count_supervised(rows)
    packs: list[list[int]] = []
    if plan.rows.packing:
        packs, shares = pack_shares(lengths.tolist(), plan.rows.max_seq_len, shares or [Share(len(rows))])
        lengths, supervised = pack_sums(lengths, packs), pack_sums(supervised, packs)
    schedule = make_schedule(
        lengths,
        rows_per_step=plan.rows_per_step,
        accumulation=plan.batch.accumulation,
        data_ranks=plan.sharing.data_ranks,
        total_steps=plan.schedule.total_steps,
        seed=seed,
        hidden_size=hidden_size,
        padding_free=plan.rows.joined,
        shares=shares,
    )
    real = schedule.sums(lengths)
    seen = real if plan.rows.joined else schedule.padded_tokens(lengths)
    batches = schedule.micro_batches()
    batches = unpacked(*batches, packs) if packs else batches
    return TrainingRows(
        with_filler(rows, pad_id),
        _as_dataset(
            *batches, filler=len(rows), tokens=np.maximum(seen.ravel(), 1), copies=plan.sharing.sequence_ranks
        ),
        tokens_per_step=real.sum(axis=1).tolist(),
        supervised_per_step=schedule.sums(supervised).sum(axis=1).tolist(),
        padding_share=1 - float(real.sum() / max(seen.sum(), 1)),
    )


def evaluation_rows(
    dataset: Dataset, plan: Plan, *, pad_id: int, rows_per_batch: int | None = None
) -> MicroBatches:
    """All rows once, in batches of the same number for each process.

    Without `rows_per_batch` (eval.batch_size), they are filled up to the plan's token budget.
    """
    rows = columns_of(dataset)
    lengths = column_of(rows, "length")
    groups = evaluation_batches(lengths, plan, rows_per_batch)
    sizes = [
        int(lengths[group].sum()) if plan.rows.joined else padded_length(lengths[group].max()) * len(group)
        for group in groups
    ]
    missing = -len(groups) % plan.sharing.data_ranks
    groups += [[FILLER]] * missing
    values = np.concatenate(groups)
    offsets = np.cumsum([0, *map(len, groups)])
    tokens = np.array(sizes + [1] * missing)
    batches = _as_dataset(
        values, offsets, filler=len(rows), tokens=tokens, copies=plan.sharing.sequence_ranks
    )
    return MicroBatches(with_filler(rows, pad_id), batches)


def validation_rows(job: Job) -> MicroBatches | None:
    """The batches of a run's evaluations; None if it has no validation rows."""
    if job.data.val is None:
        return None
    asked = job.config.eval.batch_size
    return evaluation_rows(
        job.data.val,
        job.plan,
        pad_id=job.tokenizer.pad_token_id,
        rows_per_batch=None if asked == "auto" else asked,
    )


def _as_dataset(
    values: np.ndarray, offsets: np.ndarray, *, filler: int, tokens: np.ndarray, copies: int
) -> Dataset:
    """Micro-batches from row indices, [rows], cut at offsets, [micro-batches + 1], with their tokens.

    Each is there as often as consecutive processes take the same one.
    """
    numbers = pa.array(np.where(values == FILLER, filler, values), pa.int64())
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), numbers)
    table = pa.table({"rows": lists, "tokens": pa.array(tokens, pa.int64())})
    table = table.take(np.repeat(np.arange(len(table)), copies)) if copies > 1 else table
    return Dataset(table.append_column("place", pa.array(range(len(table)), pa.int64())))

"""Tokenized data paths -> files of training, validation and test rows, with statistics."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sft_play.config.inputs import DataInput
from sft_play.config.schema import RunConfig
from sft_play.data import store
from sft_play.data.raw_text import joined_blocks
from sft_play.data.stats import SPLITS, Histogram, Lengths, Split, SplitsStats, SplitStats, row_counts
from sft_play.data.workers import ANSWER_TRUNCATED, TEXTS, Counts, is_too_long
from sft_play.errors import DataError
from sft_play.parts import IGNORED
from sft_play.spelling import make
from sft_play.units import capitalized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_ROWS_TO_SPLIT = 10
DUPLICATE = "duplicate"
HISTOGRAM_BINS = 30
BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class Part:
    """One data path, tokenized into temporary files and not yet split."""

    given: DataInput
    rows: Path
    conversations: Path
    digests: np.ndarray  # a hash of each conversation, [conversations]
    row_counts: np.ndarray  # rows of each conversation, [conversations]
    counts: Counts
    format: str
    block: int | None = None  # of raw text: tokens of the rows that it is cut into


@dataclass(frozen=True)
class Chosen:
    """The conversations of a part that go into one split."""

    part: Part
    mask: np.ndarray  # bool [conversations]

    @property
    def digests(self) -> np.ndarray:
        """Their hashes."""
        return self.part.digests[self.mask]


def assign(
    digests: Sequence[np.ndarray], fractions: dict[Split, float], seed: int
) -> dict[Split, list[np.ndarray]]:
    """A mask per split and part, bool [conversations].

    Each part gives its own share, of MIN_ROWS_TO_SPLIT or more at least one, and keeps at least one for
    training; duplicates go to the same split, also across parts, so that none leaks.
    """
    unique, ids = np.unique(np.concatenate(digests), return_inverse=True)
    names: tuple[Split, ...] = ("train", *fractions)
    home = np.full(len(unique), -1, np.int8)
    parts = np.split(ids, np.cumsum([len(part) for part in digests])[:-1])
    for number, part in enumerate(parts):
        own = np.unique(part)
        own = np.random.default_rng([seed, number]).permutation(own[home[own] < 0])
        home[own] = 0
        start = 0
        for split, fraction in enumerate(fractions.values(), 1):
            least = int(fraction > 0 and len(own) >= MIN_ROWS_TO_SPLIT)
            count = min(max(round(len(own) * fraction), least), max(len(own) - start - 1, 0))
            home[own[start : start + count]] = split
            start += count
    masks = {}
    for split, name in enumerate(names):
        masks[name] = [home[part] == split for part in parts]
    return masks


def first_of_each(digests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A mask per part, bool [conversations]: those that are no duplicate of an earlier one of any part."""
    joined = np.concatenate(digests)
    first = np.zeros(len(joined), bool)
    first[np.unique(joined, return_index=True)[1]] = True
    return np.split(first, np.cumsum([len(part) for part in digests])[:-1])


def choose(config: RunConfig, parts: Sequence[Part]) -> dict[Split, list[Chosen]]:
    """The conversations of each split; counts the duplicates that are dropped."""
    chosen: dict[Split, list[Chosen]] = {}
    for split in SPLITS:
        own = [part for part in parts if part.given.split == split]
        masks = [np.ones(len(part.digests), bool) for part in own]
        if config.data.dedup and own:
            masks = first_of_each([part.digests for part in own])
        for part, mask in zip(own, masks, strict=True):
            if not mask.all():
                part.counts.dropped[DUPLICATE] += int((~mask).sum())
        chosen[split] = list(map(Chosen, own, masks))
    asked: dict[Split, float] = {"val": config.data.val_fraction, "test": config.data.test_fraction}
    fractions = {split: fraction for split, fraction in asked.items() if not chosen[split]}
    whole = chosen["train"]
    homes = assign([one.part.digests for one in whole], fractions, config.train.seed)
    for split, masks in homes.items():
        chosen[split] = [Chosen(one.part, one.mask & mask) for one, mask in zip(whole, masks, strict=True)]
    return chosen


@dataclass
class _Tally:
    """Counts over the rows of a part in a split."""

    lengths: list[np.ndarray] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    largest: int = 0

    def add(self, batch: pa.RecordBatch, unknown_id: int | None) -> None:
        """Counts a batch of rows, at least one."""
        ids, labels = batch["input_ids"].flatten().to_numpy(), batch["labels"].flatten().to_numpy()
        self.lengths.append(batch["length"].to_numpy().copy())  # a view would keep the whole batch
        self.largest = max(self.largest, int(ids.max()))
        self.counts["rows"] += batch.num_rows
        self.counts["tokens"] += len(ids)
        self.counts["supervised_tokens"] += int((labels != IGNORED).sum())
        self.counts["unknown_tokens"] += int((ids == unknown_id).sum()) if unknown_id is not None else 0
        fits = batch["pictures"].flatten().field("fit")
        self.counts["pictures"] += len(fits)
        self.counts["picture_units"] += int(fits.field("units").to_numpy().sum())
        self.counts["picture_tokens"] += int(fits.field("tokens").to_numpy().sum())
        self.counts["truncated"] += int(batch["truncated"].true_count)
        self.counts["parts"] += int(batch["part"].true_count)


def write_splits(
    config: RunConfig,
    parts: Sequence[Part],
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int | None,
) -> tuple[SplitsStats, dict[Split, list[Chosen]]]:
    """Writes `<split>.arrow` and `<split>.conversations.arrow`, and deletes the part files.

    Returns:
        Statistics by split (None for a missing one) with the largest token id, and what each split holds.

    Raises:
        DataError: a data path has no supervised tokens left.
    """
    chosen = choose(config, parts)
    special = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    unknown_id = None if tokenizer.unk_token_id in special else tokenizer.unk_token_id
    stats: dict[Split, SplitStats | None] = {}
    largest = 0
    # without pictures as before there were any, so that the hash of rows stays, by which a run goes on
    cells = (batch["pictures"].flatten() for part in parts for batch in store.batches(part.rows))
    columns = next((store.ROWS for cell in cells for _ in cell), store.TEXT_ROWS)
    for split in SPLITS:
        held = chosen[split]
        tallies = _write_split(split, held, folder, columns, unknown_id)
        own = held and held[0].part.given.split == split
        for one, tally in zip(held, tallies, strict=True):
            if own and not tally.counts["supervised_tokens"]:
                raise _nothing_left(config, one.part, max_tokens)
        stats[split] = _split_stats(held, tallies) if any(tally.lengths for tally in tallies) else None
        if (found := stats[split]) and own:
            counts = Counts()
            for one in held:
                counts.add(one.part.counts)
            stats[split] = found = {"read": counts.read, **found, "dropped": dict(counts.dropped)}
        if config.data.sources and found:
            found["sources"] = [
                {
                    "path": one.part.given.path,
                    "conversations": int(one.mask.sum()),
                    **row_counts(tally.counts),
                }
                for one, tally in zip(held, tallies, strict=True)
            ]
        largest = max(largest, *(tally.largest for tally in tallies), 0)
    for part in parts:
        part.rows.unlink()
        part.conversations.unlink()
    train = stats["train"]
    assert train  # a path without a supervised token was refused
    return {"train": train, "val": stats["val"], "test": stats["test"], "largest_token_id": largest}, chosen


def _batches(chosen: Chosen) -> Iterator[pa.RecordBatch]:
    """The rows of the chosen conversations; raw text is joined and cut."""
    if not chosen.mask.any():
        return iter(())
    batches = _masked(chosen.part.rows, np.repeat(chosen.mask, chosen.part.row_counts))
    return joined_blocks(batches, chosen.part.block) if chosen.part.block else batches


def _masked(file: Path, mask: np.ndarray) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow file for which `mask`, bool [rows], is True."""
    first = 0
    for batch in store.batches(file):
        yield batch.filter(pa.array(mask[first : first + batch.num_rows], pa.bool_()))
        first += batch.num_rows


def _larger(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least BATCH_TOKENS tokens, without empty ones.

    Opening a file maps the head of each batch, and the kernel some of the pages around it.
    """
    held, tokens = [], 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            tokens += int(batch["length"].to_numpy().sum())
        if tokens >= BATCH_TOKENS:
            yield pa.concat_batches(held)
            held, tokens = [], 0
    if held:
        yield pa.concat_batches(held)


def _write_split(
    split: str, chosen: Sequence[Chosen], folder: Path, columns: pa.Schema, unknown_id: int | None
) -> list[_Tally]:
    """Copies the rows of the chosen conversations into the files of the split, part after part."""
    tallies = []
    file = folder / f"{split}.arrow"
    with store.writing(file, columns) as writer:
        for one in chosen:
            tally = _Tally()
            for batch in _larger(_batches(one)):
                writer.write_batch(batch.select(columns.names))
                tally.add(batch, unknown_id)
            tallies.append(tally)
    if not any(tally.counts["rows"] for tally in tallies):
        file.unlink()
    elif split != "train":
        with store.writing(folder / f"{split}.conversations.arrow", TEXTS) as writer:
            for one in chosen:
                for batch in _masked(one.part.conversations, one.mask):
                    writer.write_batch(batch)
    return tallies


def _split_stats(chosen: Sequence[Chosen], tallies: Sequence[_Tally]) -> SplitStats:
    lengths = np.concatenate([batch for tally in tallies for batch in tally.lengths])
    cuts = np.percentile(lengths, [50, 90, 99, 100], method="higher")
    conversations = sum(int(one.mask.sum()) for one in chosen)
    return {
        "conversations": conversations,
        **row_counts(sum((tally.counts for tally in tallies), Counter[str]())),
        "dropped": {},
        "lengths": Lengths(p50=int(cuts[0]), p90=int(cuts[1]), p99=int(cuts[2]), max=int(cuts[3])),
        "histogram": histogram(lengths),
    }


def histogram(lengths: np.ndarray) -> Histogram:
    """How many rows have how many tokens, from the tokens of rows, [rows], at least one."""
    start, typical = int(lengths.min()), int(np.percentile(lengths, 99, method="higher"))
    width = (typical - start) // HISTOGRAM_BINS + 1
    end = (typical - start) // width + 1
    bins = np.bincount((lengths - start) // width)
    return {"start": start, "width": width, "rows": bins[:end].tolist(), "longer": int(bins[end:].sum())}


def _nothing_left(config: RunConfig, part: Part, max_tokens: int | None) -> DataError:
    dropped = part.counts.dropped
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
    hint = f"Run `{make('process')}` to see the conversations that were read"
    if dropped[ANSWER_TRUNCATED] or any(map(is_too_long, dropped)):
        now, asked = config.data.overlong, config.model.max_seq_len
        way = f"set data.overlong={'truncate or split' if now == 'drop' else 'split'} (it is {now})"
        hint = f"Increase model.max_seq_len (now {asked}), or {way}"
        if asked == "auto":
            hint = f"{capitalized(way)}: rows have at most the {max_tokens:,} tokens that the model supports"
    if part.given.alone:
        hint += f"; to train without these rows, use only the others: {part.given.alone}"
    where = part.given.key if not config.data.sources else f"{part.given.key} ({part.given.path})"
    return DataError(
        f"{where}: 0 supervised tokens: none of the {part.counts.read:,} rows is usable ({reasons}).\n{hint}"
    )

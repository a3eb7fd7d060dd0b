"""Tokenized data paths -> training, validation and test rows, with statistics and warnings."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sft_play.config.schema import RunConfig
from sft_play.data import store
from sft_play.data.chat import IGNORED
from sft_play.data.workers import ANSWER_TRUNCATED, too_long
from sft_play.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "val", "test")
MIN_ROWS_TO_SPLIT = 10
FEW_ROWS = 32
HISTOGRAM_BINS = 30
WARNING_SHARE = 0.1  # share of rows with a problem that is worth a warning

PART_SCHEMA = pa.schema([*store.ROWS, pa.field("owner", pa.int64()), pa.field("truncated", pa.bool_())])


@dataclass(frozen=True)
class Part:
    """One data path, tokenized into temporary files and not yet split."""

    split: str
    rows: Path
    conversations: Path
    digests: list[bytes]
    read: int
    dropped: Counter[str]
    notes: Counter[str]


def assign(digests: list[bytes], fractions: dict[str, float], seed: int) -> dict[str, np.ndarray]:
    """A mask per split, bool [conversations]; duplicates go to the same split, so that no split leaks."""
    unique = list(dict.fromkeys(digests))
    random.Random(f"split/{seed}").shuffle(unique)
    split_of = dict.fromkeys(unique, "train")
    start = 0
    for split, fraction in fractions.items():
        count = max(round(len(unique) * fraction), 1) if fraction and len(unique) >= MIN_ROWS_TO_SPLIT else 0
        split_of |= dict.fromkeys(unique[start : start + count], split)
        start += count
    splits = np.array([split_of[digest] for digest in digests], dtype=object)
    return {split: splits == split for split in ("train", *fractions)}


def write_splits(
    config: RunConfig,
    parts: list[Part],
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int | None,
) -> dict[str, Any]:
    """Writes `<split>.arrow` and `<split>.conversations.arrow`, deletes the part files, returns statistics.

    Args:
        config: of the run.
        parts: the data paths of the config.
        folder: where to write.
        tokenizer: of the model.
        max_tokens: the longest row, for the error message.

    Raises:
        DataError: a data path has no supervised tokens left.
        ConfigError: the tokenizer does not know the text.
    """
    own = {part.split: part for part in parts}
    fractions = {"val": config.data.val_fraction, "test": config.data.test_fraction}
    fractions = {split: fraction for split, fraction in fractions.items() if split not in own}
    chosen = assign(own["train"].digests, fractions, config.train.seed)
    stats: dict[str, Any] = {}
    digests: dict[str, list[bytes]] = {}
    for split in SPLITS:
        part = own.get(split, own["train"])
        mask = chosen.get(split, np.ones(len(part.digests), bool))
        stats[split] = _write_split(split, part, mask, folder, tokenizer)
        if split in own:
            stats[split] = {"read": part.read, **stats[split], "dropped": dict(part.dropped)}
            if not stats[split]["rows"]:
                raise _nothing_left(config, part, max_tokens)
        elif not stats[split]["rows"]:
            stats[split] = None
        digests[split] = list(compress(part.digests, mask))
    stats["largest_token_id"] = max(stats[split].pop("largest") for split in SPLITS if stats[split])
    stats["warnings"] = _warnings(config, stats, parts, digests)
    for part in parts:
        part.rows.unlink()
        part.conversations.unlink()
    return stats


def _write_split(
    split: str, part: Part, chosen: np.ndarray, folder: Path, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """Copies the rows of the chosen conversations, [n], into the files of the split; returns statistics."""
    special = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    unknown_id = None if tokenizer.unk_token_id in special else tokenizer.unk_token_id
    lengths: list[np.ndarray] = []
    counts: Counter[str] = Counter()
    largest = 0
    file = folder / f"{split}.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, store.ROWS) as writer:
        for batch in store.batches(part.rows):
            batch = batch.filter(pa.array(chosen[batch["owner"].to_numpy()], pa.bool_()))
            if not batch.num_rows:
                continue
            writer.write_batch(batch.select(store.ROWS.names))
            ids, labels = batch["input_ids"].flatten().to_numpy(), batch["labels"].flatten().to_numpy()
            lengths.append(batch["length"].to_numpy())
            largest = max(largest, int(ids.max()))
            counts["supervised"] += int((labels != IGNORED).sum())
            counts["unknown"] += int((ids == unknown_id).sum()) if unknown_id is not None else 0
            counts["truncated"] += int(batch["truncated"].true_count)
    if not lengths:
        file.unlink()
    elif split != "train":
        texts = chain.from_iterable(batch["value"].to_pylist() for batch in store.batches(part.conversations))
        store.write_strings(folder / f"{split}.conversations.arrow", list(compress(texts, chosen)))
    all_lengths = np.concatenate(lengths) if lengths else np.zeros(0, int)
    return {
        "conversations": int(chosen.sum()),
        "rows": len(all_lengths),
        "tokens": int(all_lengths.sum()),
        "supervised_tokens": counts["supervised"],
        "unknown_tokens": counts["unknown"],
        "truncated": counts["truncated"],
        "dropped": {},
        "lengths": _percentiles(all_lengths),
        "histogram": histogram(all_lengths),
        "largest": largest,
    }


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Percentiles of the tokens of rows, [rows]."""
    if not len(lengths):
        return {}
    cuts = np.percentile(lengths, [50, 90, 99, 100], method="higher")
    return dict(zip(("p50", "p90", "p99", "max"), map(int, cuts), strict=True))


def histogram(lengths: np.ndarray) -> dict[str, Any]:
    """How many rows have how many tokens, from the tokens of rows, [rows].

    Returns:
        `rows` counts bins of `width` tokens, from `start` tokens up to the 99th percentile; `longer` counts
        the rest, so that one long row does not widen all bins.
    """
    if not len(lengths):
        return {}
    start, typical = int(lengths.min()), int(np.percentile(lengths, 99, method="higher"))
    width = (typical - start) // HISTOGRAM_BINS + 1
    end = (typical - start) // width + 1
    bins = np.bincount((lengths - start) // width)
    return {"start": start, "width": width, "rows": bins[:end].tolist(), "longer": int(bins[end:].sum())}


def _nothing_left(config: RunConfig, part: Part, max_tokens: int | None) -> DataError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in part.dropped.most_common())
    hint = "Run `make process` to see the conversations that were read"
    if part.dropped[ANSWER_TRUNCATED] or part.dropped[too_long(max_tokens)]:
        hint = (
            f"Increase model.max_seq_len (now {config.model.max_seq_len}, which allows {max_tokens} tokens)"
        )
    return DataError(
        f"data.{part.split}_path: 0 supervised tokens: none of the {part.read} rows is usable ({reasons}).\n"
        f"{hint}"
    )


def _warnings(
    config: RunConfig, stats: dict[str, Any], parts: list[Part], digests: dict[str, list[bytes]]
) -> list[str]:
    """Warnings about what is allowed but probably not intended.

    Raises:
        ConfigError: the tokenizer knows none of the text.
    """
    found = []
    train = stats["train"]
    if train["unknown_tokens"] >= 0.9 * train["tokens"]:
        raise ConfigError(
            f"model.name: the tokenizer of '{config.model.name}' knows none of the text: "
            f"{train['unknown_tokens']} of {train['tokens']} tokens are its unknown token. Check that it "
            "belongs to this model and supports this language"
        )
    if train["unknown_tokens"] >= 0.01 * train["tokens"]:
        share = train["unknown_tokens"] / train["tokens"]
        found.append(f"{share:.0%} of the training tokens are unknown to the tokenizer")
    if train["rows"] < FEW_ROWS:
        plural = "s" if train["rows"] > 1 else ""
        found.append(f"only {train['rows']} training row{plural}: the model will overfit")
    known = set(digests["train"])
    for split in ("val", "test"):
        common = sum(digest in known for digest in digests[split])
        if stats[split] and common:
            found.append(
                f"{common} of {len(digests[split])} {split} conversations are also in the training data"
            )
    repeated = len(digests["train"]) - len(known)
    if repeated >= WARNING_SHARE * len(digests["train"]):
        found.append(
            f"{repeated} of {len(digests['train'])} training conversations are duplicates; "
            "set data.dedup=true to drop them"
        )
    if train["rows"] > train["conversations"]:
        found.append(
            f"the chat template rewrites earlier turns, so {train['conversations']} conversations became "
            f"{train['rows']} rows, which render each turn as at inference time; set data.supervise=last to "
            "keep one row per conversation"
        )
    for part in parts:
        lost = sum(part.dropped.values())
        if lost >= WARNING_SHARE * part.read:
            found.append(f"{lost} of {part.read} rows of data.{part.split}_path were dropped")
        nulls = {what: count for what, count in part.notes.items() if "null" in what}
        found += [f"data.{part.split}_path: {count} {what}" for what, count in nulls.items()]
    return found

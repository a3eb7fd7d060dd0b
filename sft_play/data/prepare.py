"""The data of a run, tokenised once into a cache before any process group exists: read, convert, render, tokenise, split."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sft_play.config.schema import RunConfig
from sft_play.data import store
from sft_play.data.chat import Chat, make_chat
from sft_play.data.formats import Conversation, convert, detect_format
from sft_play.data.reading import Row, Source, fingerprint, open_source, read_rows
from sft_play.data.splits import PART_SCHEMA, SPLITS, Part, write_splits
from sft_play.data.template import check_template, use_template
from sft_play.data.workers import Chunk, Job, conversation_from_json, encode_all, worker_count
from sft_play.errors import ConfigError, DataError
from sft_play.runlog import cache_dir, console

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 1  # raised when the same input would give other tokens
SANE_LENGTH = 10_000_000  # tokenizers without a limit report 1e30


@dataclass(frozen=True)
class PreparedData:
    """Token rows by split, and what was counted on the way.

    A row has input_ids, labels (-100: not learned; always so for the first) and length. A conversation is one row, or
    several where the chat template rewrites earlier turns (see chat.py).
    """

    train: "Dataset"
    val: "Dataset | None"
    test: "Dataset | None"
    max_seq_len: int
    """model.max_seq_len, or for "auto" the longest row of all splits."""
    stats: dict[str, Any]
    """train, val, test (None if there is none): read, conversations, rows, tokens, supervised_tokens, truncated, dropped
    {reason: rows}, lengths {p50, p90, p99, max}. Besides: warnings, chat_template, largest_token_id, seconds."""
    cache_path: Path

    def conversations(self, split: str) -> list[Conversation]:
        """The conversations of val or test, to generate answers for; rows of plain text have none."""
        file = self.cache_path / f"{split}.conversations.arrow"
        if not file.exists():
            return []
        return [conversation_from_json(text) for batch in store.batches(file) for text in batch["value"].to_pylist() if text]


def prepare(
    config: RunConfig, tokenizer: "PreTrainedTokenizerBase", *, model_limit: int | None = None, progress: bool = True
) -> PreparedData:
    """Tokenises the data of a run, or finds it in the cache; several processes may call this at once, one does the work.

    The tokenizer's chat template is set to the one that data.chat_template asks for.

    Args:
        config: of the run.
        tokenizer: of the model.
        model_limit: the longest sequence that the model was made for, if it says so.
        progress: show a bar while it takes time.

    Raises:
        DataError: the data cannot be read, or nothing in it can be learned.
        ConfigError: the chat template or the length limit cannot be used.
        StorageError: the cache cannot be written.
    """
    origin = use_template(tokenizer, config.data.chat_template)
    max_tokens = length_limit(config, tokenizer, model_limit)
    chat = make_chat(tokenizer, config.data.supervise, max_tokens)
    paths = {"train": config.data.train_path, "val": config.data.val_path, "test": config.data.test_path}
    sources = {split: open_source(path, split) for split, path in paths.items() if path is not None}
    prints = {split: fingerprint(source) for split, source in sources.items()}
    key = _cache_key(config, tokenizer, max_tokens, {split: digest for split, (digest, _) in prints.items()})
    folder = cache_dir() / "data" / key
    with store.building(folder, tell=progress) as temporary:
        if temporary is not None:
            started = time.perf_counter()
            parts = []
            for split, source in sources.items():
                job = _job(config, source, chat, origin)
                with _bar(f"Tokenising {split}", prints[split][1], show=progress) as advance:
                    parts.append(_encode(config, source, split, job, temporary, advance))
            stats = write_splits(config, parts, temporary, tokenizer, max_tokens)
            stats |= {"chat_template": origin, "seconds": round(time.perf_counter() - started, 2)}
            store.finish(temporary, {"stats": stats})
    return _load(config, folder)


def length_limit(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", model_limit: int | None) -> int | None:
    """The longest row in tokens: what the config says, else what the model, else what the tokenizer allows.

    Raises:
        ConfigError: the config asks for more than the model can.
    """
    asked = config.model.max_seq_len
    if asked == "auto":
        return model_limit or (tokenizer.model_max_length if tokenizer.model_max_length < SANE_LENGTH else None)
    if model_limit is not None and asked > model_limit:
        raise ConfigError(
            f"model.max_seq_len={asked} is more than the {model_limit} positions that '{config.model.name}' was made for. "
            f"Set it to at most {model_limit}, or to auto"
        )
    return asked


def _cache_key(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None, prints: dict[str, str]) -> str:
    data = config.data
    fractions = {"val": data.val_fraction, "test": data.test_fraction}
    held_out = {split: fraction for split, fraction in fractions.items() if split not in prints and fraction}
    settings = ("format", "system_prompt", "supervise", "overlong", "dedup", "limit")
    return store.content_key(
        {
            "version": CODE_VERSION,
            "files": prints,
            "tokenizer": store.tokenizer_digest(tokenizer),
            "max_tokens": max_tokens,
            "held_out": [held_out, config.train.seed] if held_out else None,
            **{name: getattr(data, name) for name in settings},
        }
    )


def _job(config: RunConfig, source: Source, chat: Chat, origin: str) -> Job:
    """Settles the format from the first row, and tries the chat template on the first conversation."""
    rows = read_rows(source, config.data.limit)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{source.path} has no rows")
    name = detect_format(first) if config.data.format == "auto" else config.data.format
    job = Job(chat, name, config.data.system_prompt, config.data.overlong)
    for row in chain([first], rows):
        conversation = convert(row, name, job.system_prompt)
        if isinstance(conversation, Conversation):
            if conversation.messages:
                check_template(chat.tokenizer, conversation, origin)
            break
    return job


@contextmanager
def _bar(description: str, total: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    if not show or not console().is_terminal:
        yield lambda rows: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(description, total=total)
        yield lambda rows: bar.advance(task, rows)


def _encode(config: RunConfig, source: Source, split: str, job: Job, folder: Path, advance: Callable[[int], None]) -> Part:
    """Tokenises one path into temporary files, leaving out repeated conversations if data.dedup says so."""
    rows_file, said_file = folder / f"{split}.part", folder / f"{split}.said"
    notes: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    digests: list[bytes] = []
    seen: set[bytes] = set()
    read = 0
    size = sum(file.stat().st_size for file in source.files) or 200 * len(source.hub or ())
    rows: Iterator[Row] = read_rows(source, config.data.limit, notes)
    said_schema = pa.schema({"value": pa.large_string()})
    with (
        pa.OSFile(str(rows_file), "wb") as rows_sink,
        pa.OSFile(str(said_file), "wb") as said_sink,
        pa.ipc.new_stream(rows_sink, PART_SCHEMA) as rows_writer,
        pa.ipc.new_stream(said_sink, said_schema) as said_writer,
    ):
        for chunk in encode_all(job, rows, worker_count(config.data.num_workers, size)):
            keep = np.ones(len(chunk.digests), bool)
            for index, digest in enumerate(chunk.digests):
                keep[index] = not (config.data.dedup and digest in seen)
                seen.add(digest)
            rows_writer.write_batch(_part_batch(chunk, keep, first_owner=len(digests)))
            said = [text for text, kept in zip(chunk.conversations, keep, strict=True) if kept]
            said_writer.write_batch(pa.record_batch([pa.array(said, pa.large_string())], schema=said_schema))
            digests += [digest for digest, kept in zip(chunk.digests, keep, strict=True) if kept]
            dropped += chunk.dropped + Counter(duplicate=int((~keep).sum()))
            read += chunk.rows_read
            advance(chunk.rows_read)
    return Part(split, rows_file, said_file, digests, read, dropped, notes)


def _part_batch(chunk: Chunk, keep: np.ndarray, first_owner: int) -> pa.RecordBatch:
    numbers = first_owner + np.cumsum(keep) - 1  # conversations are numbered on without the dropped ones
    columns = [
        store.token_lists(chunk.input_ids, chunk.lengths),
        store.token_lists(chunk.labels, chunk.lengths),
        pa.array(chunk.lengths),
        pa.array(numbers[chunk.owners], pa.int64()),
        pa.array(chunk.truncated),
    ]
    return pa.record_batch(columns, schema=PART_SCHEMA).filter(pa.array(keep[chunk.owners], pa.bool_()))


def _load(config: RunConfig, folder: Path) -> PreparedData:
    stats = store.read_meta(folder)["stats"]
    longest = max(stats[split]["lengths"]["max"] for split in SPLITS if stats[split])
    asked = config.model.max_seq_len
    rows = {split: store.open_rows(folder / f"{split}.arrow") for split in SPLITS}
    assert rows["train"] is not None  # `_nothing_left` was raised otherwise
    return PreparedData(rows["train"], rows["val"], rows["test"], longest if asked == "auto" else asked, stats, folder)

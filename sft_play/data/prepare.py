"""Prepares the data of a run: read, convert, render, tokenize and split.

This happens once, before any process group exists; the result is cached on disk.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
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
from sft_play.data.workers import Chunk, EncodingTask, conversation_from_json, encode_all, worker_count
from sft_play.errors import ConfigError, DataError
from sft_play.fingerprints import installed_versions, sources_digest
from sft_play.runlog import cache_dir, console

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SOURCES, PACKAGES = Path(__file__).parent, ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")
MAX_PLAUSIBLE_LENGTH = 10_000_000  # tokenizers without a limit report 1e30


@dataclass(frozen=True)
class PreparedData:
    """Tokenized rows by split, and their statistics.

    A row has input_ids, labels (-100: no loss; always so for the first token) and length. A conversation is
    one row, or several if the chat template rewrites earlier turns (see chat.py).
    """

    train: "Dataset"
    val: "Dataset | None"
    test: "Dataset | None"
    max_seq_len: int
    """model.max_seq_len; for "auto" the length of the longest row of all splits."""
    stats: dict[str, Any]
    """train, val and test, None for a missing split: read, conversations, rows, tokens, supervised_tokens,
    truncated, dropped {reason: rows}, lengths {p50, p90, p99, max}, histogram {start, width, rows, longer};
    and warnings, chat_template, largest_token_id, seconds."""
    cache_path: Path

    def digests(self) -> dict[str, str]:
        """Split -> hash of its rows; {} if they are not from the cache."""
        return store.row_digests(self.cache_path, SPLITS)

    def conversations(self, split: str) -> list[Conversation]:
        """The conversations of val or test, for generated answers; plain text has none."""
        file = self.cache_path / f"{split}.conversations.arrow"
        if not file.exists():
            return []
        texts = chain.from_iterable(batch["value"].to_pylist() for batch in store.batches(file))
        return [conversation_from_json(text) for text in texts if text]


def prepare(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model_limit: int | None = None,
    progress: bool = True,
    hashes: bool = True,
) -> PreparedData:
    """Tokenizes the data of a run or loads it from the cache; of concurrent callers only one does the work.

    Sets the tokenizer's chat template as data.chat_template asks.

    Args:
        config: of the run.
        tokenizer: of the model.
        model_limit: the longest sequence that the model supports, if known.
        progress: show a progress bar.
        hashes: check the content of the cache for damage, not only the sizes of its files.

    Raises:
        DataError: the data cannot be read, or has no supervised tokens.
        ConfigError: the chat template or the length limit cannot be used.
        StorageError: the cache cannot be written.
    """
    origin = use_template(tokenizer, config.data.chat_template)
    max_tokens = length_limit(config, tokenizer, model_limit)
    chat = make_chat(
        tokenizer, config.data.supervise, max_tokens, learn_tool_calls=config.data.learn_tool_calls
    )
    paths = {"train": config.data.train_path, "val": config.data.val_path, "test": config.data.test_path}
    sources = {split: open_source(path, split) for split, path in paths.items() if path is not None}
    fingerprints = {split: fingerprint(source) for split, source in sources.items()}
    digests = {split: digest for split, (digest, _) in fingerprints.items()}
    key = _cache_key(config, tokenizer, max_tokens, digests)
    folder = cache_dir() / "data" / key
    with store.building(folder, announce=progress, hashes=hashes) as temporary:
        if temporary is not None:
            started = time.perf_counter()
            parts = []
            for split, source in sources.items():
                task = _task(config, source, chat, origin)
                with _bar(f"Tokenizing {split}", fingerprints[split][1], show=progress) as advance:
                    parts.append(_encode(config, source, split, task, temporary, advance))
            stats = write_splits(config, parts, temporary, tokenizer, max_tokens)
            stats |= {"chat_template": origin, "seconds": round(time.perf_counter() - started, 2)}
            store.finish(temporary, {"stats": stats})
    return _load(config, folder)


def length_limit(
    config: RunConfig, tokenizer: "PreTrainedTokenizerBase", model_limit: int | None
) -> int | None:
    """The length limit in tokens: of the config, else the model, else the tokenizer; None for no limit.

    Raises:
        ConfigError: the config asks for more than the model supports.
    """
    asked = config.model.max_seq_len
    if asked == "auto":
        is_limited = tokenizer.model_max_length < MAX_PLAUSIBLE_LENGTH
        return model_limit or (tokenizer.model_max_length if is_limited else None)
    if model_limit is not None and asked > model_limit:
        raise ConfigError(
            f"model.max_seq_len={asked} exceeds the {model_limit} positions that '{config.model.name}' "
            f"supports. Set it to at most {model_limit}, or to auto"
        )
    return asked


def _cache_key(
    config: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int | None,
    fingerprints: dict[str, str],
) -> str:
    data = config.data
    fractions = {"val": data.val_fraction, "test": data.test_fraction}
    held_out = {
        split: fraction for split, fraction in fractions.items() if split not in fingerprints and fraction
    }
    settings = ("format", "system_prompt", "supervise", "learn_tool_calls", "overlong", "dedup", "limit")
    return store.content_key(
        {
            "code": [sources_digest(SOURCES), installed_versions(PACKAGES)],
            "files": fingerprints,
            "tokenizer": store.tokenizer_digest(tokenizer),
            "max_tokens": max_tokens,
            "held_out": [held_out, config.train.seed] if held_out else None,
            **{name: getattr(data, name) for name in settings},
        }
    )


def _task(config: RunConfig, source: Source, chat: Chat, origin: str) -> EncodingTask:
    """Detects the format from the first row and tries the chat template on the first conversation."""
    rows = read_rows(source, config.data.limit)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{source.path} has no rows")
    name = detect_format(first) if config.data.format == "auto" else config.data.format
    task = EncodingTask(chat, name, config.data.system_prompt, config.data.overlong)
    for row in chain([first], rows):
        conversation = convert(row, name, task.system_prompt)
        if isinstance(conversation, Conversation):
            if conversation.messages:
                check_template(chat.tokenizer, conversation, origin)
            break
    return task


@contextmanager
def _bar(description: str, total: int | None, *, show: bool) -> Iterator[Callable[[int], None]]:
    if not show or not console().is_terminal:
        yield lambda rows: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console(), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(description, total=total)
        yield lambda rows: bar.advance(task, rows)


def _encode(
    config: RunConfig,
    source: Source,
    split: str,
    task: EncodingTask,
    folder: Path,
    advance: Callable[[int], None],
) -> Part:
    """Tokenizes one path into temporary files; drops repeated conversations if data.dedup is set."""
    rows_file, conversations_file = folder / f"{split}.part", folder / f"{split}.conversations.part"
    notes: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    digests: list[bytes] = []
    seen: set[bytes] = set()
    read = 0
    size = sum(file.stat().st_size for file in source.files) or 200 * len(source.hub or ())
    rows: Iterator[Row] = read_rows(source, config.data.limit, notes)
    conversations_schema = pa.schema({"value": pa.large_string()})
    with (
        pa.OSFile(str(rows_file), "wb") as rows_sink,
        pa.OSFile(str(conversations_file), "wb") as conversations_sink,
        pa.ipc.new_stream(rows_sink, PART_SCHEMA) as rows_writer,
        pa.ipc.new_stream(conversations_sink, conversations_schema) as conversations_writer,
    ):
        for chunk in encode_all(task, rows, worker_count(config.data.num_workers, size)):
            keep = np.ones(len(chunk.digests), bool)
            for index, digest in enumerate(chunk.digests):
                keep[index] = not (config.data.dedup and digest in seen)
                seen.add(digest)
            rows_writer.write_batch(_part_batch(chunk, keep, first_owner=len(digests)))
            texts = pa.array(compress(chunk.conversations, keep), pa.large_string())
            conversations_writer.write_batch(pa.record_batch([texts], schema=conversations_schema))
            digests += compress(chunk.digests, keep)
            dropped += chunk.dropped + Counter(duplicate=int((~keep).sum()))
            read += chunk.rows_read
            advance(chunk.rows_read)
    return Part(split, rows_file, conversations_file, digests, read, dropped, notes)


def _part_batch(chunk: Chunk, keep: np.ndarray, first_owner: int) -> pa.RecordBatch:
    """The rows of the conversations that are kept; `keep` is [conversations]."""
    numbers = first_owner + np.cumsum(keep) - 1  # dropped conversations get no number
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
    assert rows["train"] is not None  # `write_splits` raises DataError otherwise
    return PreparedData(
        rows["train"], rows["val"], rows["test"], longest if asked == "auto" else asked, stats, folder
    )

"""Raw rows -> token arrays, chunk by chunk and in order, in this process or in several."""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

from sft_play.data.chat import IGNORED, Chat, Tokens, encode
from sft_play.data.formats import FORMATS, Conversation, convert
from sft_play.data.raw_text import encode_sections, in_sections
from sft_play.data.reading import Row
from sft_play.data.unused import unused_keys
from sft_play.errors import DataError, LaunchError
from sft_play.machine.host import usable_cores
from sft_play.machine.process import die_with_parent

CHUNK_ROWS = 256
MAX_WORKERS = 8
SMALL_BYTES = 2 << 20  # below this, starting processes costs more than they save

# `json.dumps` makes an encoder at each call
_to_json = json.JSONEncoder(ensure_ascii=False).encode
_to_sorted_json = json.JSONEncoder(sort_keys=True).encode

NO_ANSWER = "no answer to train on"
ANSWER_TRUNCATED = "no answer left after truncation"


@dataclass(frozen=True)
class EncodingTask:
    """Settings for encoding rows; sent to each worker."""

    chat: Chat
    format: str
    system_prompt: str | None
    overlong: str
    raw_text: bool = False
    """Whether rows are documents, which are joined and cut later."""


@dataclass
class Chunk:
    """Encoded rows: token arrays are concatenated, [total tokens]; `lengths` and `truncated` are [rows]."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    """Index of the conversation that each row belongs to, [rows]."""
    truncated: np.ndarray
    conversations: list[str] = field(default_factory=list)
    """As JSON; "" for plain text, which has no answers to generate."""
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """One hash per conversation, to find duplicates, [conversations]."""
    dropped: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    """How many rows have a key that is not read, by key."""
    notes: Counter[str] = field(default_factory=Counter)
    """As of `encode`."""
    rows_read: int = 0


def too_long(max_tokens: int | None) -> str:
    """The reason for dropping a row that is longer than the limit."""
    return f"longer than {max_tokens} tokens"


def encode_chunk(task: EncodingTask, rows: list[Row]) -> Chunk:
    """Converts and tokenizes rows, and applies the length limit.

    Raises:
        DataError: a row is invalid; names the first one.
    """
    dropped: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    conversations: list[Conversation] = []
    for row in rows:
        converted = convert(row, task.format, task.system_prompt)
        unused.update(unused_keys(row.data, task.format, FORMATS[task.format][0]))
        if isinstance(converted, str):
            dropped[converted] += 1
        else:
            conversations += in_sections(converted) if task.raw_text else [converted]
    encoded_rows = (
        [[row] for row in encode_sections(task.chat, conversations)]
        if task.raw_text
        else encode(task.chat, conversations, notes)
    )
    kept: list[Conversation] = []
    tokens: list[Tokens] = []
    owners: list[int] = []
    truncated: list[bool] = []
    for conversation, encoded in zip(conversations, encoded_rows, strict=True):
        fitted = [_fit(task, row, conversation, dropped) for row in encoded]
        fitting = [row for row in fitted if row is not None]
        if not encoded:
            dropped[NO_ANSWER] += 1
        if fitting:
            owners += [len(kept)] * len(fitting)
            kept.append(conversation)
        for row_tokens, was_cut in fitting:
            tokens.append(row_tokens)
            truncated.append(was_cut)
    input_ids = [row.input_ids for row in tokens]
    labels = [row.labels for row in tokens]
    empty = np.zeros(0, np.int32)
    return Chunk(
        input_ids=np.concatenate([empty, *input_ids]),
        labels=np.concatenate([empty, *labels]),
        lengths=np.array([len(ids) for ids in input_ids], np.int32),
        owners=np.array(owners, np.int64),
        truncated=np.array(truncated, bool),
        conversations=list(map(conversation_to_json, kept)),
        digests=np.frombuffer(b"".join(map(_digest, kept)), np.uint64),
        dropped=dropped,
        unused=unused,
        notes=notes,
        rows_read=len(rows),
    )


def _fit(
    task: EncodingTask, row: Tokens, conversation: Conversation, dropped: Counter[str]
) -> tuple[Tokens, bool] | None:
    """The row within the length limit, and whether it was truncated; None if it is dropped."""
    limit = None if task.raw_text else task.chat.max_tokens
    if limit is None or len(row.input_ids) <= limit:
        if (row.labels == IGNORED).all():
            dropped[NO_ANSWER] += 1
            return None
        return row, False
    if task.overlong == "error":
        raise DataError(
            f"{conversation.source}: the row is longer than {limit} tokens. "
            "Increase model.max_seq_len, or set data.overlong to drop or truncate"
        )
    if task.overlong == "drop":
        dropped[too_long(limit)] += 1
        return None
    cut = Tokens(row.input_ids[:limit], row.labels[:limit])
    if (cut.labels == IGNORED).all():
        dropped[ANSWER_TRUNCATED] += 1
        return None
    return cut, True


def conversation_to_json(conversation: Conversation) -> str:
    """A conversation as JSON for the cache; "" for plain text."""
    if conversation.text is not None:
        return ""
    return _to_json(
        {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "source": conversation.source,
            "context": conversation.context,
            "untrained": conversation.untrained,
        }
    )


def conversation_from_json(text: str) -> Conversation:
    """The inverse of `conversation_to_json`."""
    data = json.loads(text)
    return Conversation(
        **{**data, "messages": tuple(data["messages"]), "untrained": tuple(data["untrained"])}
    )


def _digest(conversation: Conversation) -> bytes:
    content = _to_sorted_json(
        [conversation.messages, conversation.text, conversation.tools, conversation.untrained]
    )
    return hashlib.blake2b(content.encode(), digest_size=8).digest()


def worker_count(setting: int | str, size_bytes: int) -> int:
    """The number of tokenizing processes; "auto" is the usable CPU cores up to MAX_WORKERS, or 1."""
    if isinstance(setting, int):
        return setting
    if size_bytes < SMALL_BYTES:
        return 1
    return min(usable_cores(), MAX_WORKERS)


def encode_all(task: EncodingTask, rows: Iterable[Row], workers: int) -> Iterator[Chunk]:
    """Yields chunks in the order of `rows`, which are read lazily.

    Raises:
        DataError: a row is invalid; names the first one.
        LaunchError: a worker process was killed.
    """
    iterator = iter(rows)
    chunks = iter(lambda: list(itertools.islice(iterator, CHUNK_ROWS)), [])
    if workers == 1:
        yield from (encode_chunk(task, chunk) for chunk in chunks)
        return
    gc.freeze()  # or a worker's garbage collector writes to, and so copies, all memory that it shares with us
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(task, os.getpid()),
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 2 * workers:  # bounds memory use
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise LaunchError(
            "a tokenizing process was killed (out of memory?). Use fewer processes: data.num_workers=1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


_task: EncodingTask | None = None


def _start_worker(task: EncodingTask, parent: int) -> None:
    global _task
    _task = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parent's threads do not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent shuts the pool down
    die_with_parent(parent)


def _work(rows: list[Row]) -> Chunk:
    assert _task is not None
    return encode_chunk(_task, rows)

"""Raw rows -> token arrays, chunk by chunk and in order, in this process or in several."""

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from sft_play.data import store
from sft_play.data.chat import Chat
from sft_play.data.control_tokens import IN_TEXTS
from sft_play.data.raw_text import in_sections
from sft_play.data.splitting import split_rows
from sft_play.data.tokens import Tokens, encode, tokenize_text
from sft_play.errors import DataError, LaunchError
from sft_play.machine.host import usable_cores
from sft_play.machine.process import die_with_parent
from sft_play.parts import IGNORED
from sft_play.rows.formats import FORMATS, Conversation, convert
from sft_play.rows.json_files import Row
from sft_play.rows.unused import has_null_parts, has_placeholder, unused_keys
from sft_play.upstream.python import stop_feeding
from sft_play.vision.expansion import cut_before
from sft_play.vision.gallery import Gallery
from sft_play.vision.types import picture_lists

CHUNK_ROWS, CHUNK_CHARACTERS = 256, 1 << 20  # that are encoded together: at most, and until there are so many
MAX_WORKERS = 8
SMALL_BYTES = 2 << 20  # below this, starting processes costs more than they save

PART_ROWS = pa.schema([*store.ROWS, pa.field("truncated", pa.bool_()), pa.field("part", pa.bool_())])
TEXTS = pa.schema({"value": pa.large_string()})

# `json.dumps` makes an encoder at each call; what was read from a file is not circular
_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_to_sorted_json = json.JSONEncoder(sort_keys=True, check_circular=False).encode

NO_ANSWER = "no answer to train on"
TOO_LONG = "longer than"
ANSWER_TRUNCATED = "no answer left after truncation"
IN_PART = ", in part"  # of a conversation that is rendered to several rows: not all of them are dropped
WITH_PLACEHOLDER = "with <image>, <video> or <audio> in the text"
WITH_NULLS = "with null in a tool or in the arguments of a call, which is left out"


@dataclass(frozen=True)
class EncodingTask:
    """Settings for encoding rows; sent to each worker."""

    chat: Chat
    format: str
    system_prompt: str | None
    overlong: str
    gallery: Gallery = Gallery()
    block: int | None = None  # of raw text: tokens of the rows into which documents are joined and cut later


@dataclass
class Counts:
    """What became of raw rows."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason; each raw row once
    unused: Counter[str] = field(default_factory=Counter)  # how many rows have a key that is not read, by key
    notes: Counter[str] = field(default_factory=Counter)
    """As of `read_rows` and `encode`, and rows WITH_PLACEHOLDER, WITH_NULLS or IN_TEXTS."""
    first: dict[str, str] = field(default_factory=dict)
    """Of some notes, the first row: "rows.jsonl:3: '</s>'"."""
    bad: list[str] = field(default_factory=list)
    """What is wrong with rows that are not used; of all chunks together, it is in a file."""

    def add(self, other: "Counts") -> None:
        """Counts those of further rows."""
        self.read += other.read
        self.dropped.update(other.dropped)
        self.unused.update(other.unused)
        self.notes.update(other.notes)
        self.first = {**other.first, **self.first}


@dataclass(frozen=True)
class Chunk:
    """Encoded rows, as Arrow files hold them, and their conversations."""

    rows: pa.RecordBatch
    conversations: pa.RecordBatch  # as JSON; "" for plain text, which has no answers to generate
    digests: np.ndarray  # a hash of each conversation, to find duplicates, [conversations]
    row_counts: np.ndarray  # rows of each conversation, [conversations]
    counts: Counts


def too_long(max_tokens: int) -> str:
    """The reason for dropping a row that is longer than the limit."""
    return f"{TOO_LONG} {max_tokens:,} tokens"


def is_too_long(reason: str) -> bool:
    """Whether a row was dropped for its length."""
    return reason.startswith(TOO_LONG)


def encode_chunk(task: EncodingTask, rows: list[Row]) -> Chunk:
    """Converts and tokenizes rows, and applies the length limit."""
    counts = Counts(read=len(rows))
    conversations: list[Conversation] = []
    for row in rows:
        with _counted_if_bad(counts):
            conversations += _converted(task, row, counts)
    encoded_rows = _encoded(task, conversations, counts)
    kept: list[Conversation] = []
    tokens: list[Tokens] = []
    row_counts: list[int] = []
    for conversation, encoded in encoded_rows:
        fitting: list[Tokens] = []
        with _counted_if_bad(counts):
            fitting = _fitting(task, conversation, encoded, counts)
        if fitting:
            kept.append(conversation)
            tokens += fitting
            row_counts.append(len(fitting))
    texts = pa.array(map(conversation_to_json, kept), pa.large_string())
    return Chunk(
        _as_batch(tokens),
        pa.record_batch([texts], schema=TEXTS),
        np.frombuffer(b"".join(map(_digest, kept)), np.uint64),
        np.array(row_counts, np.int64),
        counts,
    )


@contextmanager
def _counted_if_bad(counts: Counts) -> Iterator[None]:
    """Counts a row that turns out not to be valid in the block, which ends there."""
    try:
        yield
    except DataError as error:
        counts.bad.append(str(error))


def _converted(task: EncodingTask, row: Row, counts: Counts) -> Sequence[Conversation]:
    """What is learned of a row: nothing, a conversation, or the sections of a text."""
    converted, known = convert(row, task.format, task.system_prompt), FORMATS[task.format]
    counts.notes[WITH_NULLS] += has_null_parts(row.data, known.keys)
    counts.unused.update(unused_keys(row.data, known.keys, known.others))
    if isinstance(converted, str):
        counts.dropped[converted] += 1
        return []
    converted = task.gallery.located(converted, row.file)
    _look_for_control_tokens(task, converted, counts)
    counts.notes[WITH_PLACEHOLDER] += has_placeholder(converted.messages)
    return list(in_sections(converted)) if task.block else [converted]


def _encoded(
    task: EncodingTask, conversations: Sequence[Conversation], counts: Counts
) -> list[tuple[Conversation, list[Tokens]]]:
    """Each conversation that can be rendered, and its rows; together they take a third of the time."""
    if task.block:
        return [(section, [tokenize_text(task.chat, section)]) for section in conversations]
    try:
        return list(zip(conversations, encode(task.chat, conversations, counts.notes), strict=True))
    except DataError as error:
        if len(conversations) > 1:
            return [pair for row in conversations for pair in _encoded(task, [row], counts)]
        counts.bad.append(str(error))
        return []


def _fitting(
    task: EncodingTask, conversation: Conversation, rows: list[Tokens], counts: Counts
) -> list[Tokens]:
    """The rows of a conversation within the length limit."""
    if task.overlong == "split" and _is_longer(task, rows):
        rows = split_rows(task.chat, conversation)
    if not rows:
        counts.dropped[NO_ANSWER] += 1
    dropped: Counter[str] = Counter()
    fitted = [_fit(task, row, conversation, dropped) for row in rows]
    kept = [row for row in fitted if row is not None]
    counts.dropped.update([f"{reason}{IN_PART if kept else ''}" for reason in dropped])
    return kept


def _look_for_control_tokens(task: EncodingTask, row: Conversation, counts: Counts) -> None:
    """Counts a row with control tokens IN_TEXTS that are kept, or raises a DataError if they are refused."""
    controls = task.chat.controls
    if controls is None or controls.escapes:
        return
    controls.require_none(row)
    if token := controls.first_in(row):
        counts.notes[IN_TEXTS] += 1
        counts.first.setdefault(IN_TEXTS, f"{row.source}: {token!r}")


def _as_batch(rows: Sequence[Tokens]) -> pa.RecordBatch:
    ids = [row.input_ids for row in rows]
    labels = [row.labels for row in rows]
    truncated = pa.array([row.truncated for row in rows], pa.bool_())
    parts = pa.array([row.part for row in rows], pa.bool_())
    lengths = pa.array(map(len, ids), pa.int32())
    pictures = picture_lists(row.pictures for row in rows)
    columns = [store.token_lists(ids), store.token_lists(labels), lengths, pictures, truncated, parts]
    return pa.record_batch(columns, schema=PART_ROWS)


def _is_longer(task: EncodingTask, rows: Sequence[Tokens]) -> bool:
    """Whether a row is longer than the limit."""
    limit = task.chat.max_tokens
    return limit is not None and any(len(row.input_ids) > limit for row in rows)


def _fit(task: EncodingTask, row: Tokens, conversation: Conversation, dropped: Counter[str]) -> Tokens | None:
    """The row within the length limit; None if it is dropped."""
    limit = task.chat.max_tokens
    if limit is None or len(row.input_ids) <= limit:
        if not _has_answer(row):
            dropped[NO_ANSWER] += 1
            return None
        return row
    if task.overlong == "error":
        raise DataError(
            f"{conversation.source}: the row is longer than {limit:,} tokens. "
            "Increase model.max_seq_len, or set data.overlong to split, truncate or drop"
        )
    if task.overlong in ("drop", "split"):  # what has pictures is not split within an exchange
        dropped[too_long(limit)] += 1
        return None
    end, pictures = cut_before(task.chat.recipe, row.input_ids, row.pictures, limit)
    cut = Tokens(row.input_ids[:end], row.labels[:end], truncated=True, pictures=pictures)
    if not _has_answer(cut):
        dropped[ANSWER_TRUNCATED] += 1
        return None
    return cut


def _has_answer(row: Tokens) -> bool:
    """Whether any token carries loss."""
    if len(row.labels) and row.labels[-1] != IGNORED:  # as in most rows
        return True
    return bool((row.labels != IGNORED).any())


def conversation_to_json(conversation: Conversation) -> str:
    """A conversation as JSON for the cache; "" for plain text."""
    return "" if conversation.text is not None else _to_json(vars(conversation))


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


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows that are encoded together, which bounds the memory of long ones."""
    while chunk := list(itertools.islice(rows, 1)):
        size = _characters(chunk[0].data)
        while len(chunk) < CHUNK_ROWS and size < CHUNK_CHARACTERS and (row := next(rows, None)):
            chunk.append(row)
            size += _characters(row.data)
        yield chunk


def _characters(value: object) -> int:
    """How much text is in a value of JSON."""
    if isinstance(value, str | bytes):  # the bytes of pictures
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def encode_all(task: EncodingTask, rows: Iterable[Row], workers: int) -> Iterator[Chunk]:
    """Yields chunks in the order of `rows`, which are read lazily.

    Raises:
        DataError: a file cannot be read.
        LaunchError: a worker process was killed.
    """
    chunks = _chunks(iter(rows))
    if workers == 1:
        yield from (encode_chunk(task, chunk) for chunk in chunks)
    else:
        yield from _encode_in_workers(task, chunks, workers)


def _encode_in_workers(task: EncodingTask, chunks: Iterator[list[Row]], workers: int) -> Iterator[Chunk]:
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
        stop_feeding(pool)
        raise LaunchError(
            "a tokenizing process was killed (out of memory?). Use fewer processes: data.num_workers=1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_task: EncodingTask | None = None


def _start_worker(task: EncodingTask, parent: int) -> None:
    global _task
    _task = task
    gc.freeze()  # the collector would write to, and so copy, all that is shared with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parent's threads do not survive the fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent shuts the pool down
    die_with_parent(parent)


def _work(rows: list[Row]) -> Chunk:
    assert _task is not None
    return encode_chunk(_task, rows)

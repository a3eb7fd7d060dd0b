"""Raw rows -> token arrays, a chunk at a time, in this process or in several; the results come in the order of the rows."""

import contextlib
import ctypes
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
from sft_play.data.formats import Conversation, convert
from sft_play.data.reading import Row
from sft_play.errors import DataError, LaunchError

CHUNK_ROWS = 256
MAX_WORKERS = 8
SMALL_BYTES = 2 << 20  # below this, starting processes costs more than they save
PR_SET_PDEATHSIG = 1

NOTHING_LEARNED = "no answer to learn"
CUT_AWAY = "no answer left after truncation"


@dataclass(frozen=True)
class Job:
    """What happens to each row."""

    chat: Chat
    format: str
    system_prompt: str | None
    overlong: str


@dataclass
class Chunk:
    """The result for some rows: tokens of all kept conversations one after the other, and what was left out."""

    input_ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    """For each token row, which of the chunk's conversations it belongs to."""
    truncated: np.ndarray
    conversations: list[str] = field(default_factory=list)
    """As JSON; "" for plain text, from which nothing is generated."""
    digests: list[bytes] = field(default_factory=list)
    """Equal for equal conversations."""
    dropped: Counter[str] = field(default_factory=Counter)
    rows_read: int = 0


def too_long(max_tokens: int | None) -> str:
    """Why a row was left out, with the limit."""
    return f"longer than {max_tokens} tokens"


def encode_chunk(job: Job, rows: list[Row]) -> Chunk:
    """Converts, tokenises and fits rows to the length limit.

    Raises:
        DataError: names the first row that is wrong.
    """
    dropped: Counter[str] = Counter()
    conversations: list[Conversation] = []
    for row in rows:
        converted = convert(row, job.format, job.system_prompt)
        if isinstance(converted, str):
            dropped[converted] += 1
        else:
            conversations.append(converted)
    kept: list[Conversation] = []
    tokens: list[Tokens] = []
    owners: list[int] = []
    truncated: list[bool] = []
    for conversation, encoded in zip(conversations, encode(job.chat, conversations), strict=True):
        fitting = [row for row in (_fit(job, row, conversation, dropped) for row in encoded) if row is not None]
        if not encoded:
            dropped[NOTHING_LEARNED] += 1
        if fitting:
            owners += [len(kept)] * len(fitting)
            kept.append(conversation)
            tokens += [row for row, _ in fitting]
            truncated += [was_cut for _, was_cut in fitting]
    return Chunk(
        input_ids=np.concatenate([row.input_ids for row in tokens] or [np.zeros(0, np.int32)]),
        labels=np.concatenate([row.labels for row in tokens] or [np.zeros(0, np.int32)]),
        lengths=np.array([len(row.input_ids) for row in tokens], np.int32),
        owners=np.array(owners, np.int64),
        truncated=np.array(truncated, bool),
        conversations=[conversation_to_json(row) for row in kept],
        digests=[_digest(row) for row in kept],
        dropped=dropped,
        rows_read=len(rows),
    )


def _fit(job: Job, row: Tokens, conversation: Conversation, dropped: Counter[str]) -> tuple[Tokens, bool] | None:
    """The row within the length limit and whether it was cut; None if it is dropped."""
    limit = job.chat.max_tokens
    if limit is None or len(row.input_ids) <= limit:
        if (row.labels == IGNORED).all():
            dropped[NOTHING_LEARNED] += 1
            return None
        return row, False
    if job.overlong == "error":
        raise DataError(
            f"{conversation.source}: the row has more than the {limit} tokens that are allowed. "
            "Raise model.max_seq_len, or set data.overlong to drop or truncate"
        )
    if job.overlong == "drop":
        dropped[too_long(limit)] += 1
        return None
    cut = Tokens(row.input_ids[:limit], row.labels[:limit])
    if (cut.labels == IGNORED).all():
        dropped[CUT_AWAY] += 1
        return None
    return cut, True


def conversation_to_json(conversation: Conversation) -> str:
    """For the cache; see `conversation_from_json`."""
    if conversation.text is not None:
        return ""
    return json.dumps(
        {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "source": conversation.source,
            "context": conversation.context,
        },
        ensure_ascii=False,
    )


def conversation_from_json(text: str) -> Conversation:
    """What `conversation_to_json` was given."""
    data = json.loads(text)
    return Conversation(tuple(data["messages"]), tools=data["tools"], source=data["source"], context=data["context"])


def _digest(conversation: Conversation) -> bytes:
    content = json.dumps([conversation.messages, conversation.text, conversation.tools], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def worker_count(setting: int | str, size_bytes: int) -> int:
    """Processes that tokenise: as many as asked, or for "auto" the cores that this process may use, one for small data."""
    if isinstance(setting, int):
        return setting
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if size_bytes < SMALL_BYTES else min(cores, MAX_WORKERS)


def encode_all(job: Job, rows: Iterable[Row], workers: int) -> Iterator[Chunk]:
    """Chunks in the order of `rows`, which are read as they are needed.

    Raises:
        DataError: names the first row that is wrong.
        LaunchError: a worker process was killed.
    """
    iterator = iter(rows)
    chunks = iter(lambda: list(itertools.islice(iterator, CHUNK_ROWS)), [])
    if workers == 1:
        yield from (encode_chunk(job, chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(job, os.getpid())
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 2 * workers:  # bounds what is in memory at once
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise LaunchError(
            "a process that tokenises was killed (by the system for want of memory?). "
            "Fewer take less memory: data.num_workers=1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_job: Job | None = None


def _start_worker(job: Job, parent: int) -> None:
    global _job
    _job = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the parent do not exist here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    with contextlib.suppress(OSError, AttributeError):  # Linux: do not outlive a parent that is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(rows: list[Row]) -> Chunk:
    assert _job is not None
    return encode_chunk(_job, rows)

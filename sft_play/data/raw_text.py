"""Raw text: documents, with loss on every token, joined with the end-of-text token and cut to equal length.

Long documents are read and tokenized in sections, which bounds memory; they are also what is held out and
what is compared to find duplicates. Joining comes last, once the rows of each split are known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sft_play.data.reading import sections
from sft_play.data.store import token_lists
from sft_play.parts import IGNORED
from sft_play.rows.formats import Conversation
from sft_play.vision.types import picture_lists


def in_sections(document: Conversation) -> list[Conversation]:
    """The document, cut into sections if it is long."""
    found = list(sections([str(document.text)]))
    return [
        replace(document, text=text, begins=document.begins and not number, ends=document.ends and last)
        for number, (text, last) in enumerate(found)
    ]


def joined_blocks(batches: Iterable[pa.RecordBatch], length: int) -> Iterator[pa.RecordBatch]:
    """Joins rows end to end and cuts them into rows of `length` tokens; the last one may be shorter."""
    held = np.zeros(0, np.int32)
    for batch in batches:
        held = np.concatenate([held, batch["input_ids"].flatten().to_numpy()])
        whole = len(held) // length * length
        if whole:
            yield _rows_of(held[:whole].reshape(-1, length))
            held = held[whole:]
    if len(held) > 1:  # a single token has nothing to be predicted from
        yield _rows_of(held[None])


def _rows_of(ids: np.ndarray) -> pa.RecordBatch:
    """Rows of token ids, [rows, tokens], with loss on all but the first token."""
    labels = ids.copy()
    labels[:, 0] = IGNORED
    columns = {
        "input_ids": token_lists(list(ids)),
        "labels": token_lists(list(labels)),
        "length": pa.array(np.full(len(ids), ids.shape[1], np.int32)),
        "pictures": picture_lists([()] * len(ids)),
        "truncated": pa.array(np.zeros(len(ids), bool)),
        "part": pa.array(np.zeros(len(ids), bool)),
    }
    return pa.record_batch(columns)

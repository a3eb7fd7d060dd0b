"""What a plan needs to know about the rows is counted right, wherever they lie."""

import errno
import os

import pytest
from datasets import Dataset, concatenate_datasets

from sft_play.data.store import build, count_supervised, supervised_spans
from sft_play.errors import StorageError
from tests.conftest import token_rows


def test_supervised_tokens_are_counted_row_by_row():
    rows = token_rows(60)
    learned = [sum(label != -100 for label in row["labels"]) for row in rows]
    data = Dataset.from_list(rows)
    assert count_supervised(data).tolist() == learned
    assert count_supervised(data.select([5, 3, 40, 3])).tolist() == [learned[row] for row in (5, 3, 40, 3)]
    both = concatenate_datasets([data, data.select(range(7, 50))])  # two chunks, one not from its start
    assert count_supervised(both).tolist() == learned + learned[7:50]


def test_supervised_tokens_begin_and_end_somewhere_in_their_row():
    labels = [[-100, 5, 5, -100], [-100, -100], [-100, 5, -100, 5, -100], [-100, 5]]
    rows = [{"input_ids": each, "labels": each, "length": len(each)} for each in labels]
    assert supervised_spans(Dataset.from_list(rows)).tolist() == [[2, 1, 3], [0, 0, 0], [2, 1, 4], [1, 1, 2]]


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "Free some space there"), (errno.EROFS, "Make it writable")]
)
def test_the_advice_fits_why_the_cache_cannot_be_written(tmp_path, number, advice):
    def make(_folder):
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=f"\n{advice}, or set another location: SFT_PLAY_CACHE=<folder>$"):
        build(tmp_path / "data" / "key", make)

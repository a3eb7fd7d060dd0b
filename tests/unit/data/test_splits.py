import numpy as np
import pytest

from sft_play.data.splits import HISTOGRAM_BINS, histogram


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([7], {"start": 7, "width": 1, "rows": [1], "longer": 0}),
        ([5, 5, 8], {"start": 5, "width": 1, "rows": [2, 0, 0, 1], "longer": 0}),
    ],
)
def test_a_bin_counts_the_rows_with_its_tokens(lengths, expected):
    assert histogram(np.array(lengths, int)) == expected


def test_one_long_row_does_not_widen_the_bins():
    lengths = np.array([*range(100, 400), 100_000])
    found = histogram(lengths)
    assert found["longer"] >= 1 and found["width"] == 10 and len(found["rows"]) <= HISTOGRAM_BINS + 1
    assert sum(found["rows"]) + found["longer"] == len(lengths)

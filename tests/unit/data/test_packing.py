import random

import pytest

from sft_play.data.batching import pack


def test_example_of_the_docstring():
    assert pack([5, 3, 3, 2], 8) == [[0, 1], [2, 3]]


def test_each_row_is_in_one_group_and_no_group_overflows():
    rng = random.Random(0)
    lengths = [rng.randint(1, 512) for _ in range(3000)]
    groups = pack(lengths, 512)
    assert sorted(row for group in groups for row in group) == list(range(3000))
    filled = [sum(lengths[row] for row in group) for group in groups]
    assert max(filled) <= 512
    assert sum(filled) / (512 * len(groups)) > 0.97


def test_a_row_longer_than_the_capacity_is_an_error():
    with pytest.raises(ValueError, match="row 1 has 9 tokens"):
        pack([3, 9], 8)

import pytest
import torch
from datasets import Dataset
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from sft_play.errors import ConfigError
from sft_play.model.attention.sequence_parallel import (
    KEY,
    Part,
    part_of_group,
    repeated_heads,
    sequence_parallel_micro_batches,
)
from sft_play.model.collators import joined_micro_batches
from sft_play.parts import IGNORED
from sft_play.sizing.trace.sharded import silent_group

ROWS = Dataset.from_list(
    [
        {"input_ids": [5, 6, 7, 8], "labels": [IGNORED, IGNORED, 7, 8], "length": 4},
        {"input_ids": [9, 10, 11], "labels": [IGNORED, 10, 11], "length": 3},
    ]
)


def parts(ranks: int) -> list[dict]:
    collate = joined_micro_batches(ROWS, "lengths")
    return [
        sequence_parallel_micro_batches(collate, Part(rank, ranks, None), pad_id=0)([{"rows": [0, 1]}])
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "missing"), [(2, 1), (4, 1), (7, 0)])
def test_the_parts_of_a_micro_batch_are_all_of_it_and_padding_of_its_own(ranks, missing):
    found = parts(ranks)
    assert len({part["input_ids"].shape for part in found}) == 1

    def joined(name: str) -> list[int]:
        return torch.cat([part[name] for part in found], dim=1)[0].tolist()

    assert joined("input_ids") == [5, 6, 7, 8, 9, 10, 11] + [0] * missing
    assert joined("position_ids") == [0, 1, 2, 3, 0, 1, 2] + [0] * missing
    # each token's next one, also where that is on the next rank; none from one row to the next
    assert joined("shift_labels") == [IGNORED, 7, 8, IGNORED, 10, 11, IGNORED] + [IGNORED] * missing
    for part in found:
        assert part["sequence_lengths"] == [4, 3] + [missing] * (missing > 0)
        assert part["labels"] is None and KEY in part


def test_a_part_holds_no_more_memory_than_its_own():
    for part in parts(2):
        assert part["input_ids"].untyped_storage().nbytes() == 4 * 8


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "times"),
    [(8, 8, 4, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (24, 6, 4, 2), (12, 3, 4, 4)],
)
def test_key_and_value_heads_are_repeated_until_each_rank_has_as_many(heads, key_heads, ranks, times):
    assert repeated_heads(heads, key_heads, ranks) == times
    # the heads of a rank's query then find the same key heads as in the whole
    groups = heads // key_heads // times
    for rank in range(ranks):
        own = range(rank * heads // ranks, (rank + 1) * heads // ranks)
        first = rank * key_heads * times // ranks
        assert [(first + at // groups) // times for at in range(len(own))] == [
            head // (heads // key_heads) for head in own
        ]


def test_heads_that_ranks_cannot_divide_are_an_error():
    with pytest.raises(ConfigError, match="6 heads cannot be divided among 4 ranks"):
        repeated_heads(6, 2, 4)


@pytest.fixture()
def _world():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


def test_a_process_that_traces_other_steps_keeps_its_group(_world):
    """Or it would wait for the others, which have theirs, to make a new one."""
    part = part_of_group(2, 600)
    for _ in range(6):
        with silent_group(2):
            assert part_of_group(2, 600).group is not part.group
    assert part_of_group(2, 600) is part

"""Pictures of later micro-batches are decoded before they are asked for, once, and fail when they are due."""

from threading import Event

import numpy as np
import pytest
from datasets import Dataset

from sft_play.errors import DataError
from sft_play.vision.ahead import AHEAD, PicturesAhead
from sft_play.vision.types import Fit, Picture, picture_lists

FIT = Fit(8, 8, 1, 1, 1, 1)
PICTURES = [Picture(f"{row}.png", 1, 8, 8, FIT) for row in range(12)]


class Decoder:
    """Remembers what it was asked for; a picture named "bad" cannot be decoded."""

    def __init__(self) -> None:
        self.events = {picture.path: Event() for picture in PICTURES}
        self.asked: list[str] = []

    def __call__(self, picture):
        self.asked.append(picture.path)
        self.events[picture.path].set()
        if picture.path == "8.png":
            raise DataError("8.png cannot be used")
        return np.full((1, 2), int(picture.path.removesuffix(".png")))


def ahead(decode, ranks):
    rows = Dataset.from_dict({"length": [1] * 12}).add_column(
        "pictures", picture_lists([[p] for p in PICTURES])
    )
    order = Dataset.from_dict({"rows": [[row] for row in range(12)], "place": range(12)})
    return PicturesAhead(decode, rows, order, ranks=ranks, threads=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_those_of_the_next_micro_batches_of_this_rank_are_begun_once(ranks):
    decode = Decoder()
    decoded = ahead(decode, ranks)
    for place in range(0, 8, ranks):
        assert [pixels[0, 0] for pixels in decoded([PICTURES[place]], place)] == [place]
        for later in range(1, AHEAD + 1):
            assert decode.events[f"{place + later * ranks}.png"].wait(10)
    assert len(decode.asked) == len(set(decode.asked))
    assert {int(name.removesuffix(".png")) % ranks for name in decode.asked} == {0}


def test_a_micro_batch_that_is_not_of_the_run_lets_nothing_begin():
    decode = Decoder()
    assert len(ahead(decode, 1)([PICTURES[3]], None)) == 1 and decode.asked == ["3.png"]


def test_a_picture_that_cannot_be_decoded_is_an_error_when_its_micro_batch_is_due():
    decode = Decoder()
    decoded = ahead(decode, 1)
    decoded([PICTURES[6]], 6)
    assert decode.events["8.png"].wait(10)
    decoded([PICTURES[7]], 7)
    with pytest.raises(DataError, match="8.png cannot be used"):
        decoded([PICTURES[8]], 8)


def test_a_picture_that_a_micro_batch_has_twice_is_decoded_once():
    decode = Decoder()
    found = ahead(decode, 1)([PICTURES[11], PICTURES[11]], 11)
    assert len(found) == 2 and decode.asked == ["11.png"]

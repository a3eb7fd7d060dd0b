"""Rows that are described, not here: their lengths are drawn as asked, always the same ones."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.planning.rows.described_rows import DescribedRows, Lengths, described_facts, described_rows
from sft_play.planning.rows.facts import UNSEEN_ROWS, UNSEEN_SEQ_LEN
from sft_play.vision.described import DescribedPicture
from sft_play.vision.looks import Look
from sft_play.vision.types import Fit


def config(overlong: str = "drop", packing: bool = False, **model) -> RunConfig:
    tree = {"model": {"name": "m", **model}, "data": {"train_path": "x", "overlong": overlong}}
    return RunConfig.model_validate(tree | {"train": {"packing": packing}})


def test_median_and_95th_percentile_are_those_that_were_asked_for():
    lengths = Lengths(1500, 6000).draw(100_000, seed=0)
    assert np.median(lengths) == pytest.approx(1500, rel=0.02)
    assert np.percentile(lengths, 95) == pytest.approx(6000, rel=0.02)
    assert (lengths == Lengths(1500, 6000).draw(100_000, seed=0)).all()
    assert (lengths != Lengths(1500, 6000).draw(100_000, seed=1)).any()


def test_a_median_alone_is_spread_as_gsm8k_is_and_one_length_is_one_length():
    assert described_rows(5000, 1500, None) == DescribedRows(5000, Lengths(1500, 2700))
    assert described_rows(5000, None, "lognormal:100:100").lengths.draw(50, 0).tolist() == [100] * 50
    assert described_rows(None, None, None) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((None, 1500, None), "need ROWS, their number"),
        ((5, None, None), "ROWS=5 needs either TOKENS"),
        ((5, 7, "lognormal:1:2"), "ROWS=5 needs either TOKENS"),
        ((5, None, "normal:1:2"), "LENGTHS=normal:1:2: expected lognormal:median:p95"),
        ((5, None, "lognormal:9"), "expected lognormal:median:p95"),
        ((5, None, "lognormal:9:x"), "expected lognormal:median:p95"),
        ((5, None, "lognormal:9:8"), "2 <= median <= p95"),
        ((5, None, "lognormal:1:8"), "2 <= median <= p95"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_an_example(asked, said):
    with pytest.raises(ConfigError, match=said) as raised:
        described_rows(*asked)
    assert "ROWS=5000" in str(raised.value) and "\n" not in str(raised.value)


ASKED = DescribedRows(1000, Lengths(1000, 5000))


def test_rows_above_the_limit_are_treated_as_data_overlong_says():
    drawn = ASKED.lengths.draw(1000, 0)
    above = int((drawn > 2000).sum())
    assert 0 < above < 500
    left, longer = described_facts(ASKED, config(), 2000)
    assert longer == above and left.rows == 1000 - above and left.longest_row <= 2000
    cut, longer = described_facts(ASKED, config("truncate"), 2000)
    assert longer == above and cut.rows == 1000 and cut.longest_row == 2000
    assert described_facts(ASKED, config(max_seq_len=500), 2000)[0].longest_row == 500
    with pytest.raises(ConfigError, match="are longer than 2,000 tokens, which data.overlong=error"):
        described_facts(ASKED, config("error"), 2000)
    with pytest.raises(ConfigError, match="all 1,000 rows are longer than 2 tokens"):
        described_facts(ASKED, config(), 2)


PICTURE = DescribedPicture(Fit(384, 512, 24, 32, 768, 192), 194, Look("patches", (1536,), 9, 1, 2, 48))


def test_images_are_added_to_the_text_of_each_row():
    asked = described_rows(1000, 100, None, 2, "512x384")
    assert asked == DescribedRows(1000, Lengths(100, 180), 2, ((384, 512),))
    texts, _ = described_facts(replace(asked, images=0, sizes=()), config(), None)
    facts, longer = described_facts(asked, config(), None, PICTURE)
    assert (facts.lengths == texts.lengths + 2 * 194).all() and longer == 0
    assert (facts.supervised == texts.supervised).all()
    assert facts.pictures.exist and not texts.pictures.exist
    assert facts.pictures.of([0, 999]) == (PICTURE.fit,) * 4
    assert facts.pictures.units(1000).tolist() == [2 * 768] * 1000


def test_rows_with_images_that_are_too_long_are_left_out_whatever_becomes_of_texts():
    asked = described_rows(1000, 100, None, 1, "512x384")
    facts, longer = described_facts(asked, config("truncate"), 300, PICTURE)
    assert 0 < longer < 1000 and facts.rows == 1000 - longer == len(facts.pictures.units(facts.rows))
    with pytest.raises(ConfigError, match=r"all 1,000 rows are longer than 190 tokens.*image_max_pixels"):
        described_facts(asked, config("truncate"), 190, PICTURE)


def test_images_alone_are_those_of_the_rows_that_are_assumed_without_data():
    assert described_rows(None, None, None, 3, "8 x 9") == DescribedRows(
        UNSEEN_ROWS, Lengths(UNSEEN_SEQ_LEN, UNSEEN_SEQ_LEN), 3, ((9, 8),)
    )


@pytest.mark.parametrize(
    ("images", "pixels", "said"),
    [
        (2, None, "belong together: e.g. IMAGES=2 PIXELS=1024x768"),
        (None, "9x9", "belong together"),
        (2, "9", "PIXELS=9: expected width x height, e.g. PIXELS=1024x768"),
        (2, "9x", "expected width x height"),
        (2, "0x9", "expected width x height"),
        (2, "123456x9", "expected width x height"),
    ],
)
def test_images_without_a_size_are_refused(images, pixels, said):
    with pytest.raises(ConfigError, match=said):
        described_rows(5, 7, None, images, pixels)


def test_packed_rows_fill_sequences():
    facts, _ = described_facts(ASKED, config(packing=True, max_seq_len=4096), None)
    assert facts.seen and facts.longest_row == 4096 and facts.rows < 500
    drawn = ASKED.lengths.draw(1000, 0)
    assert facts.lengths.sum() == drawn[drawn <= 4096].sum()

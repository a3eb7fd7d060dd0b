"""Training rows that are not here: their number, lengths and images, as a person knows them."""

import math
from dataclasses import dataclass, replace

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.length import MAX_UNSTATED
from sft_play.errors import ConfigError
from sft_play.planning.rows.facts import UNSEEN_ROWS, UNSEEN_SEQ_LEN, DataFacts, RowSizes
from sft_play.spelling import var
from sft_play.vision.described import NO_PICTURE, DescribedPicture, pictures_asked
from sft_play.vision.fits import same_fits

DEFAULT_SPREAD = 1.8  # the 95th percentile over the median, as of the rows of GSM8K
NORMAL_P95 = 1.6448536269514722  # the 95th percentile of the standard normal distribution


@dataclass(frozen=True)
class Lengths:
    """How the lengths of rows are spread: lognormal, in tokens."""

    median: int
    p95: int

    def draw(self, rows: int, seed: int) -> np.ndarray:
        """The lengths of so many rows, [rows]; the same for the same seed."""
        sigma = math.log(self.p95 / self.median) / NORMAL_P95
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), sigma, rows)
        return np.maximum(2, np.rint(np.minimum(drawn, MAX_UNSTATED))).astype(np.int64)


@dataclass(frozen=True)
class DescribedRows:
    """Rows as they are asked for."""

    rows: int
    lengths: Lengths  # of their texts
    images: int = 0  # of each row
    sizes: tuple[tuple[int, int], ...] = ()  # height and width of these, in pixels, if there are any


def _example() -> str:
    drawn = var(ROWS=5000, LENGTHS="lognormal:1500:6000")
    return f"e.g. {var(ROWS=5000, TOKENS=1500)}, or {drawn} (median and 95th percentile)"


def described_rows(
    rows: int | None,
    tokens: int | None,
    lengths: str | None,
    images: int | None = None,
    pixels: str | None = None,
) -> DescribedRows | None:
    """What was asked for with ROWS, and TOKENS or LENGTHS, and with IMAGES and PIXELS; None if nothing was.

    Images alone are those of as many rows as are assumed without data, whose texts are as long.

    Raises:
        ConfigError: one of them is missing, too much, no distribution or no size.
    """
    number, sizes = pictures_asked(images, pixels)
    if rows is tokens is lengths is None:
        assumed = UNSEEN_ROWS, Lengths(UNSEEN_SEQ_LEN, UNSEEN_SEQ_LEN)
        return next((DescribedRows(*assumed, number, (size,)) for size in sizes), None)
    return replace(_described_texts(rows, tokens, lengths), images=number, sizes=sizes)


def _described_texts(rows: int | None, tokens: int | None, lengths: str | None) -> DescribedRows:
    """Rows without images; errors as of `described_rows`."""
    if rows is None:
        raise ConfigError(
            f"{var(TOKENS=None)} and {var(LENGTHS=None)} describe the length of rows and need "
            f"{var(ROWS=None)}, their number: {_example()}"
        )
    if (tokens is None) == (lengths is None):
        either = f"{var(TOKENS=None)}, their median, or {var(LENGTHS=None)}"
        raise ConfigError(f"{var(ROWS=rows)} needs either {either}: {_example()}")
    if tokens is not None:
        return DescribedRows(rows, Lengths(tokens, round(DEFAULT_SPREAD * tokens)))
    kind, *numbers = str(lengths).split(":")
    if kind != "lognormal" or len(numbers) != 2 or not all(each.isdigit() for each in numbers):
        raise ConfigError(f"{var(LENGTHS=lengths)}: expected lognormal:median:p95 in tokens, {_example()}")
    median, p95 = map(int, numbers)
    if not 2 <= median <= p95 <= MAX_UNSTATED:
        raise ConfigError(
            f"{var(LENGTHS=lengths)}: expected 2 <= median <= p95 <= {MAX_UNSTATED:,} tokens, {_example()}"
        )
    return DescribedRows(rows, Lengths(median, p95))


def described_facts(
    asked: DescribedRows,
    config: RunConfig,
    positions: int | None,
    picture: DescribedPicture = NO_PICTURE,
) -> tuple[DataFacts, int]:
    """The facts of such rows, every token of their texts supervised, and how many are longer than the limit.

    The limit is model.max_seq_len or the model's positions; data.overlong says what becomes of longer rows,
    but those with images, each as `picture`, are left out.

    Raises:
        ConfigError: no row is left, or data.overlong=error and one is longer.
    """
    seen = asked.images * picture.row_tokens
    lengths = asked.lengths.draw(asked.rows, config.train.seed) + seen
    limit = positions if config.model.max_seq_len == "auto" else config.model.max_seq_len
    longer = 0
    if limit is not None:
        longer = int((lengths > limit).sum())
        if longer and config.data.overlong == "error":
            raise ConfigError(
                f"{longer:,} of {asked.rows:,} rows are longer than {limit:,} tokens, which "
                "data.overlong=error refuses; set model.max_seq_len, or data.overlong to drop or truncate"
            )
        lengths = _fitted(lengths, limit, picture.overlong(config.data.overlong))
    if not len(lengths):
        raise ConfigError(
            f"all {asked.rows:,} rows are longer than {limit:,} tokens; set model.max_seq_len or "
            f"{picture.remedy}"
        )
    longest = int(lengths.max()) if config.model.max_seq_len == "auto" else config.model.max_seq_len
    fits, fits_from = same_fits(len(lengths), asked.images, picture.fit)
    supervised = lengths - seen - 1
    sizes = RowSizes(lengths, supervised, None, None, longest, (), fits=fits, fits_from=fits_from)
    return DataFacts.of_sizes(sizes, config, picture.look), longer


def _fitted(lengths: np.ndarray, limit: int, overlong: str) -> np.ndarray:
    if overlong == "drop":
        return lengths[lengths <= limit]
    if overlong == "split":
        counts = -(-lengths // limit)
        rests = lengths - (counts - 1) * limit
        return np.concatenate([np.full(int((counts - 1).sum()), limit), np.maximum(2, rests)])
    return np.minimum(lengths, limit)

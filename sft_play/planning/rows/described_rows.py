"""Training rows that are not here: their number and how their lengths are spread, as a person knows them."""

import math
from dataclasses import dataclass

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.length import MAX_UNSTATED
from sft_play.errors import ConfigError
from sft_play.planning.rows.facts import DataFacts, RowSizes
from sft_play.spelling import var

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
    lengths: Lengths


def _example() -> str:
    drawn = var(ROWS=5000, LENGTHS="lognormal:1500:6000")
    return f"e.g. {var(ROWS=5000, TOKENS=1500)}, or {drawn} (median and 95th percentile)"


def described_rows(rows: int | None, tokens: int | None, lengths: str | None) -> DescribedRows | None:
    """What was asked for with ROWS, and TOKENS or LENGTHS; None if nothing was.

    Raises:
        ConfigError: one of them is missing, too much or no distribution.
    """
    if rows is None and tokens is None and lengths is None:
        return None
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


def described_facts(asked: DescribedRows, config: RunConfig, positions: int | None) -> tuple[DataFacts, int]:
    """The facts of such rows, every token of them supervised, and how many are longer than the limit.

    The limit is model.max_seq_len or the model's positions; data.overlong says what becomes of longer rows.

    Raises:
        ConfigError: no row is left, or data.overlong=error and one is longer.
    """
    lengths = asked.lengths.draw(asked.rows, config.train.seed)
    limit = positions if config.model.max_seq_len == "auto" else config.model.max_seq_len
    longer = 0
    if limit is not None:
        longer = int((lengths > limit).sum())
        if longer and config.data.overlong == "error":
            raise ConfigError(
                f"{longer:,} of {asked.rows:,} rows are longer than {limit:,} tokens, which "
                "data.overlong=error refuses; set model.max_seq_len, or data.overlong to drop or truncate"
            )
        lengths = _fitted(lengths, limit, config.data.overlong)
    if not len(lengths):
        raise ConfigError(
            f"all {asked.rows:,} rows are longer than {limit:,} tokens; set model.max_seq_len or "
            "data.overlong=truncate"
        )
    longest = int(lengths.max()) if config.model.max_seq_len == "auto" else config.model.max_seq_len
    sizes = RowSizes(lengths, lengths - 1, None, None, longest, ())
    return DataFacts.of_sizes(sizes, config), longer


def _fitted(lengths: np.ndarray, limit: int, overlong: str) -> np.ndarray:
    if overlong == "drop":
        return lengths[lengths <= limit]
    if overlong == "split":
        counts = -(-lengths // limit)
        rests = lengths - (counts - 1) * limit
        return np.concatenate([np.full(int((counts - 1).sum()), limit), np.maximum(2, rests)])
    return np.minimum(lengths, limit)

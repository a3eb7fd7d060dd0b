"""The statistics of prepared data, as they are kept beside the rows and written to data.json."""

from collections import Counter
from typing import Literal, NotRequired, TypedDict, cast

from sft_play.data.inventory import InputFiles

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = "train", "val", "test"


class RowCounts(TypedDict):
    """What is counted over rows."""

    rows: int
    tokens: int
    supervised_tokens: int
    unknown_tokens: int
    truncated: int
    parts: int  # rows that are parts of longer ones
    pictures: int
    picture_units: int
    picture_tokens: int


class SourceStats(RowCounts):
    """The rows of one of `data.sources`; how often they are seen follows from the config, for training."""

    path: str
    conversations: int
    weight: NotRequired[float]
    rows_per_epoch: NotRequired[int]
    tokens_per_epoch: NotRequired[int]


class Lengths(TypedDict):
    """Percentiles of the tokens of rows."""

    p50: int
    p90: int
    p99: int
    max: int


class Histogram(TypedDict):
    """How many rows have how many tokens.

    `rows` counts bins of `width` tokens, from `start` tokens up to the 99th percentile; `longer` counts the
    rest, so that one long row does not widen all bins.
    """

    start: int
    width: int
    rows: list[int]
    longer: int


class SplitStats(RowCounts):
    """The rows of a split."""

    read: NotRequired[int]  # rows of its data paths; missing if it is held out of the training rows
    conversations: int
    dropped: dict[str, int]  # reason -> rows
    lengths: Lengths
    histogram: Histogram
    sources: NotRequired[list[SourceStats]]  # with data.sources


class SplitsStats(TypedDict):
    """The rows of all splits; None for one that is missing."""

    train: SplitStats
    val: SplitStats | None
    test: SplitStats | None
    largest_token_id: int


class KeptStats(SplitsStats):
    """What is kept beside the rows."""

    warnings: list[str]
    images: dict[str, object] | None  # what decodes the pictures, if the model takes any
    chat_template: str
    seconds: float
    rendered_as_of: NotRequired[str]  # the day, if the chat template writes one


class DataStats(KeptStats):
    """All of it, with the files of today."""

    inputs: list[InputFiles]
    remarks: dict[str, dict[str, list[str]]]  # on what was not read: path -> remark -> names


def splits_of(stats: SplitsStats) -> dict[Split, SplitStats]:
    """The splits that are there."""
    return {split: found for split in SPLITS if (found := stats[split])}


def row_counts(counted: Counter[str]) -> RowCounts:
    """The counts by their names."""
    return cast(RowCounts, {name: counted[name] for name in RowCounts.__annotations__})

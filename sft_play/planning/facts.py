"""What a plan needs to know about the training rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sft_play.config.schema import RunConfig
from sft_play.data.batching import make_schedule, padded_length
from sft_play.data.chat import IGNORED
from sft_play.data.packing import pack
from sft_play.data.prepare import PreparedData
from sft_play.data.reading import open_source
from sft_play.errors import ConfigError, DataError
from sft_play.model.data import load_data
from sft_play.model.load import position_limit
from sft_play.plan import Plan
from sft_play.planning.batch import BatchSplit, evaluation_batches
from sft_play.runlog import console

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNSEEN_SEQ_LEN = 2048  # length of rows in a plan without data, unless model.max_seq_len is set
UNSEEN_ROWS = 10_000


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know about the training rows.

    With train.packing, the entries of the [rows] arrays are packed sequences.
    """

    lengths: np.ndarray  # tokens
    supervised: np.ndarray  # of these
    longest_row: int  # tokens of the longest row; with packing, the capacity of a sequence
    mean_tokens: float  # of a row before packing
    mean_squared_tokens: float  # also before packing
    seed: int
    eval_lengths: np.ndarray | None = None  # tokens of the validation rows
    eval_rows: int | None = None  # eval.batch_size
    seen: bool = True

    @classmethod
    def of(cls, data: PreparedData, config: RunConfig) -> "DataFacts":
        """The facts of tokenized rows."""
        lengths = np.asarray(data.train["length"])
        supervised = np.array([int(np.sum(np.asarray(row) != IGNORED)) for row in data.train["labels"]])
        longest, mean = int(lengths.max()), float(lengths.mean())
        mean_squared = float((lengths.astype(float) ** 2).mean())
        if config.train.packing:
            groups = pack(lengths.tolist(), data.max_seq_len)
            longest = data.max_seq_len
            lengths, supervised = _sums(lengths, groups), _sums(supervised, groups)
        eval_lengths = None if data.val is None else np.asarray(data.val["length"])
        eval_rows = None if config.eval.batch_size == "auto" else config.eval.batch_size
        return cls(
            lengths, supervised, longest, mean, mean_squared, config.train.seed, eval_lengths, eval_rows
        )

    @classmethod
    def unseen(cls, config: RunConfig, model_config: "PretrainedConfig") -> "DataFacts":
        """Assumptions if there is no data yet: full rows, every token supervised."""
        asked = config.model.max_seq_len
        length = UNSEEN_SEQ_LEN if asked == "auto" else asked
        if asked == "auto":
            length = min(length, position_limit(model_config) or length)
        lengths = np.full(UNSEEN_ROWS, length)
        return cls(lengths, lengths, length, length, length**2, config.train.seed, seen=False)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def tokens_per_process(self, plan: Plan) -> float:
        """Tokens that a process sees in an average step of a plan, padding not counted."""
        return float(self.lengths.mean()) * plan.rows_per_step / plan.world_size

    def largest_micro_batch(
        self, split: BatchSplit, total_steps: int, hidden_size: int, padding_free: bool
    ) -> tuple[int, int]:
        """The most tokens (with padding) and the most supervised tokens of any micro-batch of such a run."""
        if not self.seen:
            return (split.micro * self.longest_row,) * 2
        schedule = make_schedule(
            self.lengths,
            rows_per_step=split.effective,
            bins_per_step=split.bins,
            total_steps=total_steps,
            seed=self.seed,
            hidden_size=hidden_size,
            padding_free=padding_free,
        )
        tokens = schedule.sums(self.lengths) if padding_free else schedule.padded_tokens(self.lengths)
        return int(tokens.max()), int(schedule.sums(self.supervised).max())

    def eval_shape(self, plan: Plan) -> tuple[int, int] | None:
        """Rows, and tokens per row, of the largest evaluation batch; None if there is no evaluation.

        Joined rows count as one.
        """
        if self.eval_lengths is None:
            return None
        sizes = [
            self.eval_lengths[batch] for batch in evaluation_batches(self.eval_lengths, plan, self.eval_rows)
        ]
        if plan.padding_free:
            return 1, int(max(lengths.sum() for lengths in sizes))
        return max(len(lengths) for lengths in sizes), padded_length(int(self.eval_lengths.max()))


def _sums(values: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    """The sum of the values of each group, [groups]."""
    return np.array([int(values[group].sum()) for group in groups])


def data_facts(config: RunConfig, model_config: "PretrainedConfig", *, progress: bool) -> DataFacts:
    """The facts of the tokenized rows, or assumptions if there is no data or no tokenizer yet.

    So config.json alone is enough for a plan.
    """
    try:
        open_source(config.data.train_path, "train")  # before anything is downloaded for nothing
        return DataFacts.of(load_data(config, model_config, progress=progress).rows, config)
    except (ConfigError, DataError) as error:
        console().print(f"  [yellow]planned without data:[/] {str(error).splitlines()[0]}")
        return DataFacts.unseen(config, model_config)


def assumptions(facts: DataFacts) -> list[str]:
    """What a plan assumes about the data."""
    if facts.seen:
        return []
    return [f"no training rows found: planned for rows of {facts.longest_row} tokens, all of them supervised"]

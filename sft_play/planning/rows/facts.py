"""What a plan needs to know about the training rows."""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from sft_play.cache import recall, remember
from sft_play.config.schema import RunConfig
from sft_play.data.batching import (
    Schedule,
    Share,
    make_schedule,
    pack_shares,
    pack_sums,
    padded_length,
    row_weights,
    rows_per_epoch,
)
from sft_play.data.length import require_supported
from sft_play.data.sources import fingerprint, open_inputs
from sft_play.data.template import template_text
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError, DataError
from sft_play.model.weights.files import model_key
from sft_play.plan import Plan
from sft_play.planning.candidates.batch import BatchSplit, evaluation_batches
from sft_play.planning.rows.tokens_of_ranks import most_of_a_rank
from sft_play.sizing.estimate.micro_batches import front
from sft_play.sizing.facts.architecture import AnyArchitecture, Architecture
from sft_play.sizing.step import OWN_TOKEN, TOKEN_BYTES, JoinedRows, MicroBatch, PaddedRows, RunBatches
from sft_play.ui.console import warn
from sft_play.vision.fits import RowFits, fits_of_rows
from sft_play.vision.looks import NO_LOOK, Look

if TYPE_CHECKING:
    from sft_play.data.prepare import PreparedData

UNSEEN_SEQ_LEN = 2048  # length of rows in a plan without data, unless model.max_seq_len is set
UNSEEN_ROWS = 10_000
SIZES = "sizes and spans of rows"  # the question how long the rows are


@dataclass(frozen=True)
class RowSizes:
    """The sizes of tokenized rows, [rows]."""

    lengths: np.ndarray  # tokens
    supervised: np.ndarray  # of these
    eval_lengths: np.ndarray | None  # of the validation rows
    eval_supervised: np.ndarray | None
    max_seq_len: int
    shares: tuple[Share, ...]
    spans: np.ndarray | None = None  # as `supervised_spans` has them
    eval_spans: np.ndarray | None = None
    left_out: str = ""  # how many rows were left out as not valid, and which file lists them
    fits: np.ndarray | None = None  # of all pictures, as `fits_of_rows` has them; None without any
    fits_from: np.ndarray | None = None
    eval_fits: np.ndarray | None = None
    eval_fits_from: np.ndarray | None = None

    @classmethod
    def of(cls, data: "PreparedData") -> "RowSizes":
        """The sizes of prepared rows."""
        from sft_play.data.bad_rows import dropped_lines
        from sft_play.data.store import column_of, supervised_spans

        rows, val = data.train, data.val
        spans, eval_spans = supervised_spans(rows), None if val is None else supervised_spans(val)
        return cls(
            column_of(rows, "length"),
            spans[:, 0],
            None if val is None else column_of(val, "length"),
            None if eval_spans is None else eval_spans[:, 0],
            data.max_seq_len,
            data.shares,
            spans,
            eval_spans,
            "; ".join(dropped_lines(data.cache_path, data.stats)),
            *fits_of_rows(rows),
            *((None, None) if val is None else fits_of_rows(val)),
        )

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        fields = asdict(self).items()
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "RowSizes":
        """What `to_json` gave."""
        tree["shares"] = tuple(Share(**share) for share in tree["shares"])
        arrays = {name: np.array(value) for name, value in tree.items() if isinstance(value, list)}
        return cls(**tree | arrays)


@dataclass(frozen=True)
class DataFacts:
    """What a plan needs to know about the training rows.

    With train.packing, the entries of the [rows] arrays are packed sequences.
    """

    lengths: np.ndarray  # tokens
    supervised: np.ndarray  # of these
    longest_row: int  # tokens of the longest row; with packing, the capacity of a sequence
    mean_tokens: float  # of a row before packing, each counted as often as it is seen
    mean_squared_tokens: float  # also before packing
    seed: int
    eval_lengths: np.ndarray | None = None  # tokens of the validation rows
    eval_supervised: np.ndarray | None = None  # of these
    eval_rows: int | None = None  # eval.batch_size
    seen: bool = True
    shares: tuple[Share, ...] = ()  # how often the entries are seen per epoch; () for once
    parts: np.ndarray | None = None  # tokens of the rows of all packed entries, one entry after the other
    parts_from: np.ndarray | None = None  # where those of each entry begin
    spans: np.ndarray | None = None  # as `supervised_spans` has them: of each entry, or of each of the parts
    eval_spans: np.ndarray | None = None
    pictures: RowFits = RowFits()
    eval_pictures: RowFits = RowFits()
    _known: dict[Any, RunBatches] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def of(cls, data: "PreparedData", config: RunConfig, look: Look = NO_LOOK) -> "DataFacts":
        """The facts of tokenized rows, and of their pictures for a model with this look."""
        return cls.of_sizes(RowSizes.of(data), config, look)

    @classmethod
    def of_sizes(cls, data: RowSizes, config: RunConfig, look: Look = NO_LOOK) -> "DataFacts":
        """The facts of rows of these sizes, and of their pictures for a model with this look."""
        lengths, supervised = data.lengths, data.supervised
        shares = data.shares or (Share(len(lengths)),)
        weights = row_weights(shares)
        parts, parts_from, spans = None, None, data.spans
        longest, mean = int(lengths.max()), float(np.average(lengths, weights=weights))
        mean_squared = float(np.average(lengths.astype(float) ** 2, weights=weights))
        if config.train.packing:
            groups, packed = pack_shares(lengths.tolist(), data.max_seq_len, shares)
            longest, shares = data.max_seq_len, tuple(packed)
            parts = lengths[np.concatenate(groups)]
            parts_from = np.cumsum([0, *map(len, groups[:-1])])
            spans = None if spans is None else spans[np.concatenate(groups)]
            lengths, supervised = pack_sums(lengths, groups), pack_sums(supervised, groups)
        eval_rows = None if config.eval.batch_size == "auto" else config.eval.batch_size
        rest = config.train.seed, data.eval_lengths, data.eval_supervised, eval_rows
        return cls(
            lengths,
            supervised,
            longest,
            mean,
            mean_squared,
            *rest,
            shares=shares,
            parts=parts,
            parts_from=parts_from,
            spans=spans,
            eval_spans=data.eval_spans,
            pictures=RowFits(data.fits, data.fits_from, look, fills=config.tuning.vision != "frozen"),
            eval_pictures=RowFits(data.eval_fits, data.eval_fits_from),
        )

    @classmethod
    def unseen(cls, config: RunConfig, model_config: AnyArchitecture) -> "DataFacts":
        """Assumptions if there is no data yet: full rows, every token supervised.

        Raises:
            ConfigError: model.max_seq_len is more than the model supports.
        """
        limit = Architecture.of(model_config).facts.position_limit
        require_supported(config.model, limit)
        asked = config.model.max_seq_len
        length = min(UNSEEN_SEQ_LEN, limit or UNSEEN_SEQ_LEN) if asked == "auto" else asked
        return cls.full_rows(length, config.train.seed)

    @classmethod
    def full_rows(cls, length: int, seed: int) -> "DataFacts":
        """Rows of so many tokens, every one of them supervised."""
        lengths = np.full(UNSEEN_ROWS, length)
        return cls(lengths, lengths, length, length, length**2, seed, seen=False)

    @property
    def rows(self) -> int:
        """Number of rows of an epoch."""
        return rows_per_epoch(self.shares) if self.shares else len(self.lengths)

    def tokens_per_process(self, plan: Plan) -> float:
        """Tokens that a process sees in an average step of a plan, padding not counted."""
        weights = row_weights(self.shares) if self.shares else None
        return float(np.average(self.lengths, weights=weights)) * plan.rows_per_step / plan.sharing.world_size

    def tokens_per_second(self, plan: Plan) -> float | None:
        """Predicted tokens per second over all devices, padding not counted; None if the speed is unknown."""
        tokens = self.tokens_per_process(plan) * plan.sharing.world_size
        return tokens / plan.step_seconds if plan.step_seconds else None

    def busiest_share(self, plan: Plan, hidden_size: int) -> float:
        """As `BatchSplit.busiest`, of a plan."""
        if not self.seen:  # all rows are equally long
            return -(-plan.rows_per_step // (ranks := plan.sharing.data_ranks)) * ranks / plan.rows_per_step
        rest = plan.schedule.total_steps, hidden_size, plan.rows.joined
        return self._heaviest(BatchSplit.of(plan), *rest).busiest[engine_of(plan.sharing.engine).shards_state]

    def largest_micro_batch(
        self, split: BatchSplit, total_steps: int, hidden_size: int, padding_free: bool
    ) -> tuple[int, int]:
        """The most tokens (with padding) and the most supervised tokens of any micro-batch of such a run."""
        if not self.seen:
            return (split.micro * self.longest_row,) * 2
        found = self._heaviest(split, total_steps, hidden_size, padding_free).train
        supervised = max(each.supervised for each in found)
        return max(each.tokens for each in found), supervised

    def _heaviest(
        self, split: BatchSplit, total_steps: int, hidden_size: int, padding_free: bool, ranks: int = 1
    ) -> RunBatches:
        """The micro-batches that no other one exceeds in everything.

        If so many ranks divide their tokens, only the supervised ones of one of them count.
        """
        key = split, total_steps, hidden_size, padding_free, ranks
        if key not in self._known:
            schedule = make_schedule(
                self.lengths,
                rows_per_step=split.effective,
                accumulation=split.accumulation,
                data_ranks=split.data_ranks,
                total_steps=total_steps,
                seed=self.seed,
                hidden_size=hidden_size,
                padding_free=padding_free,
                shares=self.shares,
            )
            self._known[key] = self._heaviest_of(schedule, split, padding_free, ranks)
        return self._known[key]

    def _heaviest_of(
        self, schedule: Schedule, split: BatchSplit, padding_free: bool, ranks: int
    ) -> RunBatches:
        own = schedule.sums(self.lengths)
        tokens = own if padding_free else schedule.padded_tokens(self.lengths)
        busiest = split.busiest(tokens, int(own.sum()))
        tokens = np.maximum(tokens, 1 if padding_free else padded_length(1))  # of a filler, where no row is
        units = schedule.sums(self.pictures.units(len(self.lengths)))
        rows = None if padding_free else np.maximum(1, schedule.sums(np.ones_like(self.lengths)))
        tokens, units = self.pictures.filled(tokens, units, rows, padded_length)
        later = np.broadcast_to(np.arange(split.bins) >= split.data_ranks, tokens.shape)
        held = split.held(tokens)
        carried = OWN_TOKEN * tokens + held - tokens
        supervised = self._supervised_of_rank(schedule, ranks).reshape(tokens.shape)
        held_units = split.held(units)
        columns = [tokens, supervised, later | (split.accumulation == 1), carried, held_units - units, units]
        columns += [schedule.sums(self._squares)] if rows is None else [rows, tokens // rows]  # may add more
        table = np.stack([column.ravel() for column in columns], axis=1)
        values, offsets = schedule.micro_batches()
        latest = len(table) - 1 - front(table[::-1])  # of equals, that in which states exist most likely
        found = (
            replace(
                self._micro_batch(values[offsets[index] : offsets[index + 1]], table[index], padding_free),
                place=int(index),
            )
            for index in latest
        )
        most, most_units = int(held.max()), int(held_units.max())
        return RunBatches(tuple(found), held=most, held_units=most_units, busiest=busiest)

    def _supervised_of_rank(self, schedule: Schedule, ranks: int) -> np.ndarray:
        """Supervised tokens of each micro-batch, of the rank that has most of them, [micro-batches]."""
        if ranks == 1 or self.spans is None:
            return schedule.sums(self.supervised).ravel()
        entries, offsets = schedule.micro_batches()
        real = entries >= 0
        rows, counts = entries, np.ones(len(entries), dtype=np.int64)
        if self.parts is not None and self.parts_from is not None:
            counts = np.diff(np.append(self.parts_from, len(self.parts)))[entries]
            ends = np.cumsum(counts)
            rows = np.arange(ends[-1]) + np.repeat(self.parts_from[entries] - (ends - counts), counts)
        lengths = self.lengths if self.parts is None else self.parts
        real = np.repeat(real, counts)[:, None]
        begins = np.concatenate([[0], np.cumsum(counts)])[offsets[:-1]]
        return most_of_a_rank(lengths[rows] * real[:, 0], self.spans[rows] * real, begins, ranks)

    @cached_property
    def _squares(self) -> np.ndarray:
        """The sum of the squares of the row lengths of each entry, [rows]."""
        if self.parts is None or self.parts_from is None:
            return self.lengths.astype(np.int64) ** 2
        return np.add.reduceat(self.parts.astype(np.int64) ** 2, self.parts_from)

    def _micro_batch(self, rows: np.ndarray, sizes: np.ndarray, padding_free: bool) -> MicroBatch:
        tokens, supervised, later, carried, held_units, *_ = sizes.tolist()
        rest: dict[str, Any] = dict(first=not later, held=carried - OWN_TOKEN * tokens)
        rest |= dict(fits=self.pictures.of(rows), held_units=held_units)
        lengths = tuple(np.append(self.lengths, 1)[rows].tolist())  # 1 of a filler, which is row -1
        if not padding_free:
            width = padded_length(max(*lengths, *(fit.tokens for fit in rest["fits"]), 1))
            return MicroBatch(PaddedRows(tokens // width, width), supervised, **rest)
        if self.parts is not None and self.parts_from is not None and rows[0] >= 0:
            ends = np.append(self.parts_from[1:], len(self.parts))
            own = [self.parts[self.parts_from[row] : ends[row]] for row in rows]
            lengths = tuple(np.concatenate(own).tolist())
        if (more := tokens - sum(lengths)) > 0:  # of the smallest picture
            lengths = (*lengths, more)
        return MicroBatch(JoinedRows(tokens), supervised, lengths, **rest)

    def batches_of(self, plan: Plan, hidden_size: int) -> RunBatches:
        """The batches of a plan's run of which one has the highest peak, as far as they are known.

        If processes divide their tokens, what one of them has.
        """
        token, unit = self.pictures.batch_bytes(TOKEN_BYTES)
        found = replace(
            self._training_batches(plan, hidden_size),
            evaluation=self._evaluation_batches(plan),
            token_bytes=token,
            unit_bytes=unit,
        )
        return found.of_rank(plan.sharing.sequence_ranks)

    def _training_batches(self, plan: Plan, hidden_size: int) -> RunBatches:
        """Those of the schedule; none for a plan that was changed, so that it would need other rows."""
        if not self.seen:
            return RunBatches()
        about = plan.schedule.total_steps, hidden_size, plan.rows.joined
        found = self._heaviest(BatchSplit.of(plan), *about, plan.sharing.sequence_ranks)
        if max(each.tokens for each in found.train) != plan.rows.most_tokens:
            return RunBatches()
        return found

    def _evaluation_batches(self, plan: Plan) -> tuple[MicroBatch, ...]:
        if self.eval_lengths is None or self.eval_supervised is None:
            return ()
        found = []
        for rows in evaluation_batches(self.eval_lengths, plan, self.eval_rows):
            lengths, supervised = self.eval_lengths[rows], int(self.eval_supervised[rows].sum())
            fits = self.eval_pictures.of(rows)
            if plan.rows.joined:
                joined = JoinedRows(int(lengths.sum()))
                if plan.sharing.sequence_parallel and self.eval_spans is not None:
                    spans, begins = self.eval_spans[rows], np.zeros(1, dtype=np.int64)
                    supervised = int(most_of_a_rank(lengths, spans, begins, plan.sharing.sequence_ranks)[0])
                found.append(MicroBatch(joined, supervised, tuple(lengths.tolist()), fits=fits))
            else:
                padded = PaddedRows(len(rows), padded_length(int(lengths.max())))
                found.append(MicroBatch(padded, supervised, fits=fits))
        following = found[plan.sharing.data_ranks :]  # of the same process
        pairs = zip_longest(found, following, fillvalue=MicroBatch(JoinedRows(0), 0))
        return tuple(
            replace(each, held=after.tokens, held_units=after.units, place=place)
            for place, (each, after) in enumerate(pairs)
        )


def data_facts(config: RunConfig, architecture: Architecture, *, progress: bool) -> DataFacts:
    """The facts of the tokenized rows, or assumptions if there is no data or no tokenizer yet.

    So config.json alone is enough for a plan.
    """
    try:
        sizes = row_sizes(config, architecture, progress=progress)
        return DataFacts.of_sizes(sizes, config, architecture.facts.look)
    except (ConfigError, DataError) as error:
        warn(f"planned without data: {str(error).splitlines()[0]}")
        return DataFacts.unseen(config, architecture)


def row_sizes(config: RunConfig, architecture: Architecture, *, progress: bool) -> RowSizes:
    """The sizes of the rows, which are tokenized unless their sizes are kept.

    Raises:
        ConfigError, DataError: as in `load_data`.
    """
    key = _data_key(config)
    known = recall(SIZES, *key) if key else None
    if known:
        return RowSizes.from_json(known)
    from sft_play.model.load import load_data

    sizes = RowSizes.of(load_data(config, architecture.config, progress=progress, trained=True).rows)
    if key and key == _data_key(config):  # no file came or changed meanwhile
        remember(sizes.to_json(), SIZES, *key)
    return sizes


def _data_key(config: RunConfig) -> tuple[str, ...] | None:
    """All that the tokenized rows depend on; None if that cannot be told without libraries.

    Raises:
        DataError: as of `open_inputs`, before anything is downloaded for nothing.
    """
    opened = open_inputs(config.data)
    model = model_key(config.model)
    if model is None or any(source.hub is not None for _, source in opened):
        return None
    digests = [f"{given.split} {fingerprint(source)[0]}" for given, source in opened]
    asked = config.data.chat_template
    template = template_text("plain" if asked == "auto" else asked)  # plain if the tokenizer has none
    return model, config.data.model_dump_json(), str(config.train.seed), template, *digests

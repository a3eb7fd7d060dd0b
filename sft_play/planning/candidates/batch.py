"""Batch arithmetic: effective batch = micro-batch x accumulation x world size, and errors if it is not."""

import math
from dataclasses import dataclass

import numpy as np

from sft_play.config.train import TrainConfig
from sft_play.data.batching import pack, padded_length
from sft_play.errors import ConfigError
from sft_play.plan import Plan
from sft_play.units import counted

DEFAULT_EFFECTIVE_ROWS = 16
MOST_ROWS_SEEN = 50_000_000  # in a run; each time that a row is seen takes 70 bytes while planning


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class BatchSplit:
    """How the rows of an optimizer step are split into micro-batches.

    Sizes count rows; with packing, a row is one full sequence.
    """

    effective: int  # rows per optimizer step over all devices
    accumulation: int
    data_ranks: int  # processes, or groups of them, with micro-batches of their own

    @classmethod
    def of(cls, plan: Plan) -> "BatchSplit":
        """That of a plan."""
        return cls(plan.rows_per_step, plan.batch.accumulation, plan.sharing.data_ranks)

    @property
    def bins(self) -> int:
        """Micro-batches per step, over all devices."""
        return self.accumulation * self.data_ranks

    @property
    def micro(self) -> int:
        """Average rows per micro-batch, rounded up."""
        return -(-self.effective // self.bins)

    def held(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of all batches that the trainer holds beside the model, at each micro-batch, [steps, bins].

        It fetches the micro-batches of a step before the first one, and keeps them until those of the next
        step are there. The data loader is one ahead; for a GPU, that one is still in the memory of the host.
        """
        own = tokens.reshape(len(tokens), self.accumulation, self.data_ranks)
        following = np.zeros_like(own[:, 0])
        following[:-1] = own[1:, 0]
        held = own.sum(axis=1) + following
        return np.broadcast_to(held[:, None], own.shape).reshape(tokens.shape)

    def busiest(self, tokens: np.ndarray, own: int) -> tuple[float, float]:
        """How many times an average process's tokens the one has that the others wait for.

        They do at the end of a step or, if optimizer states are divided, of each micro-batch. `tokens`,
        [steps, bins], may have padding, which the `own` ones of all processes have not.
        """
        held = tokens.reshape(len(tokens), self.accumulation, self.data_ranks)
        waited = int(held.sum(axis=1).max(axis=1).sum()), int(held.max(axis=2).sum())
        return self.data_ranks * waited[0] / own, self.data_ranks * waited[1] / own


def _rows(key: str, value: int, row_tokens: int | None) -> int:
    """Converts a batch size of the config to rows.

    With packing (`row_tokens` given) the config counts tokens, which must be a multiple of `row_tokens`.
    """
    if row_tokens is None:
        return value
    if value % row_tokens:
        allowed = f"nearest: {nearest_multiples(value, row_tokens)}"
        if value < row_tokens:  # meant as sequences, as without packing
            allowed += f"; for {counted(value, 'sequence')}: {value * row_tokens}"
        raise ConfigError(
            f"train.{key}={value}: with train.packing, batch sizes count tokens and must be a multiple of "
            f"{row_tokens} (one sequence); {allowed}"
        )
    return value // row_tokens


def nearest_multiples(number: int, of: int) -> str:
    """`nearest_multiples(10, 4)` is "8 or 12"."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)


def batch_choices(train: TrainConfig, world_size: int, row_tokens: int | None) -> list[BatchSplit]:
    """Every way to split the effective batch that the config allows, smallest micro-batch first.

    `row_tokens` are those of a packed row; None if batch sizes count sequences.

    Raises:
        ConfigError: the numbers contradict each other or do not divide; the message names the nearest.
    """
    unit = row_tokens or 1
    asked = train.effective_batch_size
    effective = _rows("effective_batch_size", asked, row_tokens) if asked else DEFAULT_EFFECTIVE_ROWS
    micro = None if train.batch_size == "auto" else _rows("batch_size", train.batch_size, row_tokens)
    accumulation = None if train.grad_accum == "auto" else train.grad_accum
    if micro and accumulation:  # taken as given: the effective batch grows with the world size
        grown = micro * accumulation * world_size
        if asked and grown != effective:
            raise ConfigError(
                f"train.effective_batch_size={asked} contradicts batch_size {train.batch_size} x grad_accum "
                f"{accumulation} x {world_size} processes = {grown * unit}; remove one of the three"
            )
        return [BatchSplit(grown, accumulation, world_size)]
    if effective < world_size:
        rows = counted(effective, "packed sequence" if row_tokens else "sequence")
        raise ConfigError(
            f"train.effective_batch_size={effective * unit} is {rows}, fewer than the {world_size} "
            f"processes; set it to {world_size * unit} or more, or use at most "
            f"{counted(effective, 'process')}"
        )
    if micro or accumulation:
        return [_split_by_hand(train, effective, world_size, unit, micro, accumulation)]
    per_process = -(-effective // world_size)
    counts = {*divisors(per_process), *(2**power for power in range(per_process.bit_length()))}
    return [BatchSplit(effective, count, world_size) for count in sorted(counts, reverse=True)]


def batch_for(train: TrainConfig, world_size: int, unit: int = 1) -> int | None:
    """The effective batch that so many processes need at least; None if that of the config is enough.

    `unit` is 1, or with packing the tokens of a sequence.
    """
    if "auto" not in (train.batch_size, train.grad_accum):  # then it grows with them
        return None
    micro = unit if train.batch_size == "auto" else train.batch_size
    needed = world_size * micro * (1 if train.grad_accum == "auto" else train.grad_accum)
    return needed if (train.effective_batch_size or DEFAULT_EFFECTIVE_ROWS * unit) < needed else None


def _split_by_hand(
    train: TrainConfig,
    effective: int,
    world_size: int,
    unit: int,
    micro: int | None,
    accumulation: int | None,
) -> BatchSplit:
    """The split if the config sets either batch_size or grad_accum: the other one must be a whole number.

    Raises:
        ConfigError: it is not; the message gives the values that work.
    """
    if effective % world_size:
        raise ConfigError(
            f"train.effective_batch_size={effective * unit} is not divisible by {world_size} processes, as "
            "batch_size or grad_accum requires if set; leave both on auto, or use the nearest: "
            f"{nearest_multiples(effective * unit, world_size * unit)}"
        )
    per_process = effective // world_size
    for key, value, size in (("batch_size", micro, unit), ("grad_accum", accumulation, 1)):
        if value and per_process % value:
            allowed = ", ".join(str(divisor * size) for divisor in divisors(per_process))
            raise ConfigError(
                f"train.{key}={getattr(train, key)} does not divide {per_process * unit}, the share of each "
                f"of {counted(world_size, 'process')} in effective_batch_size={effective * unit}; allowed: "
                f"{allowed}"
            )
    return BatchSplit(effective, accumulation or per_process // (micro or 1), world_size)


def learning_rates(train: TrainConfig, effective: int, reference: int) -> dict[str, float]:
    """The learning rate at this effective batch under each rule, if the config's was tuned at `reference`."""
    ratio, rate = effective / reference, train.learning_rate
    return {"none": rate, "sqrt": rate * ratio**0.5, "linear": rate * ratio}


def scaled_learning_rate(train: TrainConfig, effective: int) -> float:
    """The learning rate at this effective batch."""
    if (reference := train.reference_batch_size) is None:
        return train.learning_rate
    return learning_rates(train, effective, reference)[train.lr_scaling]


def count_steps(train: TrainConfig, rows: int, rows_per_step: int) -> tuple[int, int]:
    """Optimizer steps per epoch, and in the whole run.

    Raises:
        ConfigError: the run is so long that its order of learning would fill the memory.
    """
    per_epoch = math.ceil(rows / rows_per_step)
    wanted = train.max_steps or train.epochs * per_epoch
    if wanted * rows_per_step > MOST_ROWS_SEEN:
        asked = f"max_steps={train.max_steps}" if train.max_steps else f"epochs={train.epochs:g}"
        raise ConfigError(
            f"train.{asked}: with {rows_per_step:,} rows in a step, a run may have at most "
            f"{MOST_ROWS_SEEN // rows_per_step:,} steps ({MOST_ROWS_SEEN / rows:,.0f} epochs of this data): "
            "the order of the rows is kept in memory"
        )
    return per_epoch, train.max_steps or max(1, math.ceil(wanted - 1e-9))


def evaluation_batches(lengths: np.ndarray, plan: Plan, rows_per_batch: int | None) -> list[list[int]]:
    """Row indices of each evaluation batch: all rows once, in batches as large as the plan's micro-batches.

    `lengths` are the tokens of the rows, [rows]. Without `rows_per_batch` (eval.batch_size), batches are
    filled up to the plan's token budget.
    """
    if rows_per_batch is None and plan.rows.joined:
        return pack(lengths.tolist(), max(plan.rows.most_tokens, int(lengths.max())))
    order, batches, first = np.argsort(-lengths, kind="stable").tolist(), [], 0
    while first < len(order):
        size = rows_per_batch or max(1, plan.rows.most_tokens // padded_length(int(lengths[order[first]])))
        batches.append(order[first : first + size])
        first += size
    return batches

"""Batch arithmetic: effective batch = micro-batch x accumulation x world size, and what to do when it does not divide."""

import math
from dataclasses import dataclass

from sft_play.config.schema import TrainConfig
from sft_play.errors import ConfigError

DEFAULT_EFFECTIVE_ROWS = 16


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class BatchCut:
    """How the rows of an optimizer step are cut; in rows, a packed row being one full sequence."""

    micro: int
    accumulation: int
    world_size: int

    @property
    def effective(self) -> int:
        """Rows per optimizer step over all devices."""
        return self.micro * self.accumulation * self.world_size


def _rows(key: str, value: int, row_tokens: int | None) -> int:
    """A batch size of the config in rows; when packed (`row_tokens` given) it is in tokens and must hold whole rows."""
    if row_tokens is None:
        return value
    if value % row_tokens:
        down, up = value // row_tokens * row_tokens, -(-value // row_tokens) * row_tokens
        choices = " or ".join(str(v) for v in (down, up) if v)
        raise ConfigError(
            f"train.{key}={value}: with train.packing it counts tokens, in whole sequences of {row_tokens}; nearest: {choices}"
        )
    return value // row_tokens


def nearest_multiples(number: int, of: int) -> str:
    """`nearest_multiples(10, 4)` is "8 or 12"."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)


def batch_choices(train: TrainConfig, world_size: int, row_tokens: int | None) -> list[BatchCut]:
    """Every way to cut the effective batch that the config allows, smallest micro-batch first.

    Raises:
        ConfigError: the numbers contradict each other or do not divide; names the nearest that do.
    """
    unit = row_tokens or 1
    asked = train.effective_batch_size
    effective = _rows("effective_batch_size", asked, row_tokens) if asked else DEFAULT_EFFECTIVE_ROWS
    micro = None if train.batch_size == "auto" else _rows("batch_size", train.batch_size, row_tokens)
    accumulation = None if train.grad_accum == "auto" else train.grad_accum
    if micro and accumulation:  # taken as given: the effective batch grows with the world
        cut = BatchCut(micro, accumulation, world_size)
        if asked and cut.effective != effective:
            raise ConfigError(
                f"train.effective_batch_size={asked} contradicts batch_size {train.batch_size} x grad_accum {accumulation} x "
                f"{world_size} processes = {cut.effective * unit}; remove one of the three"
            )
        return [cut]
    if effective % world_size:
        raise ConfigError(
            f"train.effective_batch_size={effective * unit} does not divide among {world_size} processes; "
            f"nearest: {nearest_multiples(effective * unit, world_size * unit)}"
        )
    per_process = effective // world_size
    for key, value in (("batch_size", micro), ("grad_accum", accumulation)):
        if value and per_process % value:
            allowed = ", ".join(str(d * (unit if key == "batch_size" else 1)) for d in divisors(per_process))
            raise ConfigError(
                f"train.{key}={getattr(train, key)} does not divide the {per_process * unit} that each of {world_size} "
                f"process(es) has of effective_batch_size={effective * unit}; allowed: {allowed}"
            )
    if micro or accumulation:
        micro = micro or per_process // (accumulation or 1)
        return [BatchCut(micro, per_process // micro, world_size)]
    return [BatchCut(d, per_process // d, world_size) for d in divisors(per_process)]


def learning_rates(train: TrainConfig, effective: int, reference: int) -> dict[str, float]:
    """The learning rate at this effective batch under each rule, if the config's was found at `reference`."""
    ratio = effective / reference
    return {name: train.learning_rate * factor for name, factor in (("none", 1.0), ("sqrt", ratio**0.5), ("linear", ratio))}


def scaled_learning_rate(train: TrainConfig, effective: int) -> tuple[float, str]:
    """The learning rate at this effective batch, and how it came about."""
    if train.lr_scaling == "none" or train.reference_batch_size is None:
        return train.learning_rate, f"learning rate {train.learning_rate:g} as given, not scaled"
    rate = learning_rates(train, effective, train.reference_batch_size)[train.lr_scaling]
    factor = rate / train.learning_rate
    return rate, (
        f"learning rate {train.learning_rate:g} x {factor:.3g} = {rate:.3g}: {train.lr_scaling} scaling from batch "
        f"{train.reference_batch_size} to {effective}"
    )


def count_steps(train: TrainConfig, rows: int, rows_per_step: int) -> tuple[int, int]:
    """Optimizer steps per epoch, and in the whole run."""
    per_epoch = math.ceil(rows / rows_per_step)
    return per_epoch, train.max_steps or max(1, math.ceil(train.epochs * per_epoch - 1e-9))

"""How the effective batch is cut into micro-batches: pure arithmetic, every choice with its reason."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.errors import ConfigError

DEFAULT_EFFECTIVE_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted bytes of one process. `phases` are peaks (their maximum counts), `terms` are parts of the highest one."""

    budget_bytes: int
    peak_bytes: int
    peak_phase: str
    phases: dict[str, int] = field(default_factory=dict)
    terms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was chosen for a run. Batch sizes count sequences; when `packing`, tokens."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    world_size: int
    engine: str  # "none" (one process), "ddp" or "deepspeed_z2"
    max_seq_len: int
    packing: bool
    gradient_checkpointing: bool
    mixed_precision: str  # "bf16", "fp16" or "no"
    dtype: str  # of the weights: "bfloat16", "float16" or "float32"
    attention: str
    learning_rate: float
    steps_per_epoch: int
    total_steps: int
    device: str  # "cuda" or "cpu"
    memory: Memory | None = None
    why: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows that a collator gets at once; a packed row holds max_seq_len tokens."""
        return self.micro_batch_size // self.max_seq_len if self.packing else self.micro_batch_size

    @property
    def rows_per_step(self) -> int:
        """Rows per optimizer step over all devices."""
        return self.rows_per_micro_batch * self.gradient_accumulation_steps * self.world_size

    def to_json(self) -> dict[str, Any]:
        """The shape that `sft-play plan --json` prints and plan.json holds."""
        values = asdict(self)
        memory, why, alternatives = (values.pop(key) for key in ("memory", "why", "alternatives"))
        return {"plan": values, "memory": memory, "why": list(why), "alternatives": list(alternatives)}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        memory = Memory(**tree["memory"]) if tree.get("memory") else None
        return cls(**tree["plan"], memory=memory, why=tuple(tree["why"]), alternatives=tuple(tree["alternatives"]))


@dataclass(frozen=True)
class Device:
    """What the planner needs to know of the device that each process trains on."""

    kind: str  # "cuda" or "cpu"
    name: str
    bf16: bool
    free_bytes: int | None = None


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def choose_precision(config: RunConfig, device: Device) -> tuple[str, str, str]:
    """Weights' dtype, autocast type and the reason.

    Raises:
        ConfigError: bf16 is asked for and the device does not have it.
    """
    asked, dtype = config.train.mixed_precision, config.model.dtype
    if (asked == "bf16" or dtype == "bfloat16") and not device.bf16:
        key = "train.mixed_precision=bf16" if asked == "bf16" else "model.dtype=bfloat16"
        raise ConfigError(f"{key}: {device.name} does not compute in bf16; use fp16, or auto, which picks what the device has")
    if device.kind == "cpu":
        precision = "no" if asked == "auto" else asked
        reason = "fp32 on the CPU" if asked == "auto" else f"{asked} autocast as asked"
        chosen = "float32" if dtype == "auto" else dtype
    else:
        precision = ("bf16" if device.bf16 else "fp16") if asked == "auto" else asked
        reason = f"{precision} autocast: {'as asked' if asked != 'auto' else f'what {device.name} has'}"
        sixteen = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")
        chosen = dtype if dtype != "auto" else "float32" if config.tuning.mode == "full" else sixteen
    if precision == "fp16" and device.kind == "cpu":
        raise ConfigError("train.mixed_precision=fp16: the CPU has no fp16 training; use auto, bf16 or no")
    if config.tuning.mode == "full" and chosen == "float16":
        raise ConfigError("model.dtype=float16 cannot be trained in full: small updates vanish; use float32 or bfloat16")
    return chosen, precision, reason


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


def scaled_learning_rate(train: TrainConfig, effective: int) -> tuple[float, str]:
    """The learning rate at this effective batch, and how it came about."""
    if train.lr_scaling == "none" or train.reference_batch_size is None:
        return train.learning_rate, f"learning rate {train.learning_rate:g} as given, not scaled"
    ratio = effective / train.reference_batch_size
    factor = ratio if train.lr_scaling == "linear" else ratio**0.5
    rate = train.learning_rate * factor
    return rate, (
        f"learning rate {train.learning_rate:g} x {factor:.3g} = {rate:.3g}: {train.lr_scaling} scaling from batch "
        f"{train.reference_batch_size} to {effective}"
    )


def count_steps(train: TrainConfig, rows: int, rows_per_step: int) -> tuple[int, int]:
    """Optimizer steps per epoch, and in the whole run."""
    per_epoch = math.ceil(rows / rows_per_step)
    return per_epoch, train.max_steps or max(1, math.ceil(train.epochs * per_epoch - 1e-9))


def choose_engine(asked: str, world_size: int) -> tuple[str, str]:
    """How the processes share the work, and why."""
    if world_size == 1:
        return "none", "one process: nothing to share"
    if asked == "auto":
        return "ddp", f"DDP over {world_size} processes: each holds the whole model, gradients are averaged"
    return asked, f"{asked} over {world_size} processes as asked"


def make_plan(
    config: RunConfig,
    *,
    device: Device,
    world_size: int,
    rows: int,
    max_seq_len: int,
    attention: str,
) -> Plan:
    """The plan of a run.

    Args:
        config: the run.
        device: of each process.
        world_size: number of processes.
        rows: training rows; packed sequences when train.packing.
        max_seq_len: longest row in tokens.
        attention: implementation that the model will use.

    Raises:
        ConfigError: what is asked for contradicts itself or the device.
    """
    train = config.train
    dtype, precision, precision_reason = choose_precision(config, device)
    engine, engine_reason = choose_engine(config.parallel.engine, world_size)
    choices = batch_choices(train, world_size, max_seq_len if train.packing else None)
    cut, unit = choices[0], max_seq_len if train.packing else 1
    rate, rate_reason = scaled_learning_rate(train, cut.effective * unit)
    per_epoch, total = count_steps(train, rows, cut.effective)
    checkpointing = False if train.gradient_checkpointing == "auto" else train.gradient_checkpointing
    micro_reason = (
        f"micro-batch {cut.micro}: the smallest, since no memory was predicted"
        if len(choices) > 1
        else f"micro-batch {cut.micro} follows from the config"
    )
    words = "tokens" if train.packing else "sequences"
    return Plan(
        micro_batch_size=cut.micro * unit,
        gradient_accumulation_steps=cut.accumulation,
        effective_batch_size=cut.effective * unit,
        world_size=world_size,
        engine=engine,
        max_seq_len=max_seq_len,
        packing=train.packing,
        gradient_checkpointing=checkpointing,
        mixed_precision=precision,
        dtype=dtype,
        attention=attention,
        learning_rate=rate,
        steps_per_epoch=per_epoch,
        total_steps=total,
        device=device.kind,
        why=(
            f"effective batch {cut.effective * unit} {words} = micro-batch {cut.micro * unit} x accumulation "
            f"{cut.accumulation} x {world_size} process{'es' if world_size > 1 else ''}",
            micro_reason,
            engine_reason,
            precision_reason,
            rate_reason,
        ),
    )

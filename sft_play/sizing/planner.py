"""What a plan is, and the choices that need no memory estimate: pure, each with its reason."""

from dataclasses import asdict, dataclass, field
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.sizing.batch import batch_choices, count_steps, scaled_learning_rate


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted bytes of one process. `phases` are peaks (their maximum counts), `terms` are parts of the highest one."""

    budget_bytes: int
    peak_bytes: int
    peak_phase: str
    phases: dict[str, int] = field(default_factory=dict)
    terms: dict[str, int] = field(default_factory=dict)
    guard_bytes: int = 0  # kept free beside the budget
    reserved_bytes: int | None = None  # taken from the device to serve the peak, gaps included; where that could decide

    @property
    def needed_bytes(self) -> int:
        """What the device must have free."""
        return max(self.peak_bytes, self.reserved_bytes or 0)


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


def choose_precision(config: RunConfig, device: Device) -> tuple[str, str, str]:
    """Weights' dtype, autocast type and the reason.

    Raises:
        ConfigError: bf16 is asked for and the device does not have it.
    """
    asked, dtype = config.train.mixed_precision, config.model.dtype
    chosen: str
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


def engines(config: RunConfig, world_size: int) -> list[str]:
    """How the processes may share the work, the preferred way first."""
    if world_size == 1:
        return ["none"]
    asked = config.parallel.engine
    return ["ddp", "deepspeed_z2"] if asked == "auto" else [asked]


def draft_plans(
    config: RunConfig, *, device: Device, world_size: int, rows: int, max_seq_len: int, attention: str
) -> list[Plan]:
    """Every plan that the config allows: engine, then checkpointing off before on, then micro-batch from small to large.

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
    unit = max_seq_len if train.packing else 1
    dtype, precision, precision_reason = choose_precision(config, device)
    cuts = batch_choices(train, world_size, max_seq_len if train.packing else None)
    rate, rate_reason = scaled_learning_rate(train, cuts[0].effective * unit)
    per_epoch, total = count_steps(train, rows, cuts[0].effective)
    checkpointing = [False, True] if train.gradient_checkpointing == "auto" else [train.gradient_checkpointing]
    return [
        Plan(
            micro_batch_size=cut.micro * unit,
            gradient_accumulation_steps=cut.accumulation,
            effective_batch_size=cut.effective * unit,
            world_size=world_size,
            engine=engine,
            max_seq_len=max_seq_len,
            packing=train.packing,
            gradient_checkpointing=recompute,
            mixed_precision=precision,
            dtype=dtype,
            attention=attention,
            learning_rate=rate,
            steps_per_epoch=per_epoch,
            total_steps=total,
            device=device.kind,
            why=(precision_reason, rate_reason),
        )
        for engine in engines(config, world_size)
        for recompute in checkpointing
        for cut in cuts
    ]

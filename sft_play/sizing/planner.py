"""How the effective batch is cut into micro-batches: pure arithmetic, every choice with its reason."""

from dataclasses import asdict, dataclass, field
from typing import Any


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

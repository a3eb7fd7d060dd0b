"""The types that all packages share: the plan of a run, its memory, the device, and who predicts them.

Plain frozen data; nothing here decides anything.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from pydantic import TypeAdapter

from sft_play.config.schema import RunConfig
from sft_play.parts import (
    PARTS,
    Activations,
    Batch,
    Kernels,
    Precision,
    Rows,
    Schedule,
    Sharing,
    flat,
    parts_of,
)

# Where the numbers of a plan come from. What an earlier run measured is no prediction.
TRACED, PROFILED, EARLIER, PROBED = "trace", "profile", "earlier run", "probe"


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The predicted RAM of all processes of a machine that offload to it what a GPU would hold, in bytes."""

    budget_bytes: int | None  # free RAM, less what is kept free; None if it is unknown
    processes: int  # of the machine
    own_bytes: int  # of each process without tensors: interpreter, libraries, CUDA
    terms: dict[str, int]  # what tensors of one process take at their peak, pinned ones as allocated
    saved_bytes: int  # of all that is trained, which the first process gathers to save it

    @property
    def needed_bytes(self) -> int:
        """What all processes of the machine need; PyTorch keeps pinned memory that was freed."""
        return self.processes * (self.own_bytes + sum(self.terms.values())) + self.saved_bytes

    @property
    def fits(self) -> bool:
        """Whether it is within the budget, if that is known."""
        return self.budget_bytes is None or self.needed_bytes <= self.budget_bytes


@dataclass(frozen=True, kw_only=True)
class HighestBatches:
    """The micro-batch of a run and the batch of its evaluation with the highest predicted peaks.

    Their places are those among all in their order, of all processes; None if unknown.
    """

    train: int
    last: bool  # of its optimizer step, or the others of the step are like the last one
    held: int  # bytes of the other batches that the trainer holds at this micro-batch
    held_after: int  # and, at most, from the update on
    evaluation: int | None
    phases: dict[str, int]  # predicted peak of each phase in their steps, when the optimizer has its states


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The predicted memory of one process, in bytes.

    On a GPU there are three numbers, each of which contains the one before: what tensors take (`peak_bytes`),
    what PyTorch's allocator reserves for them (`reserved_bytes`), and what the driver counts for the process
    (`process_bytes`), which must be within the budget. On a CPU there is the first one only.
    """

    budget_bytes: int  # for the process
    peak_bytes: int  # allocated
    peak_phase: str
    phases: dict[str, int] = field(default_factory=dict)  # peak of each phase; the highest one counts
    terms: dict[str, int] = field(default_factory=dict)  # breakdown of the highest peak, and the context
    phase_terms: dict[str, dict[str, int]] = field(default_factory=dict)  # breakdown of each phase's peak
    guard_bytes: int = 0  # kept free in addition to the budget
    reserved_bytes: int | None = None  # with fragmentation; None on a CPU, and where it cannot decide
    at_most_bytes: int | None = None  # of a process, if that must fit, since the rest is not proven enough
    ran_out: bool = False  # memory ran out with as large a micro-batch in an earlier run, with as much free
    origin: str = TRACED  # of the sizes: the trace alone, or EARLIER
    host: HostMemory | None = None  # the second budget, if a GPU's process offloads
    highest: HighestBatches | None = None  # which batches have the peaks; None where batches are unknown

    @property
    def process_bytes(self) -> int:
        """Free memory that the device must have: what is reserved, and context and communicator."""
        return max(self.peak_bytes, self.reserved_bytes or 0) + self.terms.get("context", 0)

    @property
    def decisive_bytes(self) -> int:
        """What must be within the budget."""
        return max(self.process_bytes, self.at_most_bytes or 0)

    @property
    def within_budget(self) -> bool:
        """Whether the process, with its context and fragmentation, is predicted to be within both budgets."""
        return self.decisive_bytes <= self.budget_bytes and (self.host is None or self.host.fits)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to be within the budget, and no earlier run has shown otherwise."""
        return self.within_budget and not self.ran_out

    def fits_without(self, terms: Iterable[str], parts: float = math.inf) -> bool:
        """Whether the process would be within its budget with a fraction of these terms, or without them."""
        saved = sum(self.terms.get(term, 0) for term in terms) * (1 - 1 / parts)
        return self.process_bytes - saved < self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields, `process_bytes` (null on a CPU) and what the host needs."""
        tree = asdict(self) | {"process_bytes": self.process_bytes if self.reserved_bytes else None}
        if self.host:
            tree["host"]["needed_bytes"] = self.host.needed_bytes
        return tree

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Memory":
        """The inverse of `to_json`, whose sums are passed over."""
        return TypeAdapter(cls).validate_python(tree)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was chosen for a run."""

    batch: Batch
    sharing: Sharing
    rows: Rows
    activations: Activations
    precision: Precision
    kernels: Kernels
    schedule: Schedule
    device: str  # "cuda" or "cpu"
    compute_capability: tuple[int, int] | None = None  # of the GPU; None if unknown, and for a CPU
    kernels_origin: str | None = None  # PROBED: they were timed beside others, and won
    step_seconds: float | None = None  # predicted, of an average optimizer step; plans are compared by it
    step_seconds_range: tuple[float, float] | None = None  # the least and the most; None if unknown
    step_seconds_range_reason: str | None = None  # what decides between them; None if they are one number
    step_seconds_origin: str = PROFILED  # the profile alone, EARLIER, or PROBED
    profile_seconds: float | None = None  # as the device profile alone predicts them
    refuted_seconds: float | None = None  # predicted by a profile that the probe has shown to be wrong
    memory: Memory | None = None
    why: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()

    @property
    def offloads_activations(self) -> bool:
        """Whether layers are recomputed from inputs in RAM; a CPU has them there anyway."""
        return self.activations.policy == "offload" and self.device == "cuda"

    @property
    def mlp_tile(self) -> int:
        """The most tokens that the MLP of a layer computes at a time; 0: all of a micro-batch."""
        return self.activations.tile(self.sharing.tokens_of_rank(self.rows.most_tokens))

    @property
    def rows_per_step(self) -> int:
        """Rows per optimizer step over all devices; a packed row holds max_seq_len tokens."""
        return self.batch.effective // self.rows.max_seq_len if self.rows.packing else self.batch.effective

    @property
    def rows_per_micro_batch(self) -> int:
        """Average rows per micro-batch, rounded up."""
        return -(-self.rows_per_step // (self.batch.accumulation * self.sharing.data_ranks))

    def with_layers(self, kernels: str) -> "Plan":
        """The same with these kernels of norms, rotary embeddings and gated layers."""
        return replace(self, kernels=replace(self.kernels, layers=kernels))

    def with_compiled(self, compiled: bool) -> "Plan":
        """The same with decoder layers that are compiled, or are not."""
        return replace(self, kernels=replace(self.kernels, compiled=compiled))

    def flat(self) -> dict[str, object]:
        """All of it but memory, reasons and alternatives, by the names of a plan's JSON."""
        values: dict[str, object] = {}
        for name, value in vars(self).items():
            values |= flat(value) if name in PARTS else {name: value}
        return {name: values[name] for name in values if name not in ("memory", "why", "alternatives")}

    def to_json(self) -> dict[str, Any]:
        """The tree that `sft-play plan --json` prints and that plan.json contains."""
        values = self.flat() | {"gradient_checkpointing": self.activations.recomputes}
        why, alternatives = self.why, self.alternatives
        memory = self.memory.to_json() if self.memory else None
        return {"plan": values, "memory": memory, "why": list(why), "alternatives": list(alternatives)}

    def as_alternative(self, relative_speed: float | None) -> dict[str, Any]:
        """A sized plan in the JSON of the chosen one, whose speed is 1."""
        assert self.memory
        return {
            "micro_batch_size": self.batch.micro,
            "gradient_accumulation_steps": self.batch.accumulation,
            "gradient_checkpointing": self.activations.recomputes,
            **flat(self.activations),
            "engine": self.sharing.engine,
            "replicas": self.sharing.replicas,
            "offload": self.sharing.offload,
            "peak_bytes": self.memory.peak_bytes,
            "process_bytes": self.memory.process_bytes,
            "fits": self.memory.fits,
            "ran_out": self.memory.ran_out,
            "relative_speed": relative_speed,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        memory = Memory.from_json(tree["memory"]) if tree.get("memory") else None
        values = dict(tree["plan"])
        values.pop("prefetch_layers", None)  # of a setting that is gone
        capability, recomputes = values.get("compute_capability"), values.pop("gradient_checkpointing")
        values["compute_capability"] = tuple(capability) if capability else None
        if spread := values.get("step_seconds_range"):
            values["step_seconds_range"] = tuple(spread)
        values.setdefault("activations", "recompute" if recomputes else "keep")  # older plans have no other
        why, alternatives = tuple(tree["why"]), tuple(tree["alternatives"])
        return cls(**parts_of(values), **values, memory=memory, why=why, alternatives=alternatives)


@dataclass(frozen=True)
class Device:
    """What the planner needs to know about the device that each process trains on."""

    kind: str  # "cuda" or "cpu"
    name: str
    bf16: bool
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None  # None if unknown, and for a CPU


# Predicts the seconds of an optimizer step of a plan; None if the device's speed is unknown.
Clock = Callable[[RunConfig, Plan], float | None]


class Estimator(Protocol):
    """Predicts the memory of a plan."""

    def __call__(self, config: RunConfig, plan: Plan, /, *, complete: bool = False) -> Memory:
        """Predicted bytes of one process; `complete` also where reserved bytes cannot decide what fits."""

"""The parts of a plan, which the description of its training step holds too. Frozen; no torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from sft_play.units import AUTOCAST

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from sft_play.config.train import TrainConfig

IGNORED = -100  # label of a token that nothing is learned from
# Names in a plan's JSON, of the fields that have another one here.
JSON_NAMES = {
    "micro": "micro_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "effective": "effective_batch_size",
    "joined": "padding_free",
    "most_tokens": "micro_batch_tokens",
    "most_supervised": "micro_batch_supervised",
    "policy": "activations",
    "autocast": "mixed_precision",
    "layers": "kernels",
    "compiled": "compile",
}
# Of a tensor: a trace takes longer with more, and the parts of so many are small. More processes need less.
MOST_SHARDS = 512


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How an optimizer step is cut. Sizes count sequences, or tokens of packed rows."""

    micro: int  # of a process; rows are dealt to micro-batches of about as many each
    accumulation: int  # micro-batches of a process in an optimizer step
    effective: int  # of an optimizer step, over all processes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How processes share the work."""

    world_size: int
    engine: str  # name of an engine (engines/registry.py); "" of any
    machines: int = 1  # that the processes are on
    sequence_ranks: int = 1  # processes that divide the tokens of the same micro-batch
    replicas: int = 1  # of a divided model: one on each machine, whose processes divide it; 1: all divide it
    offload: str = "none"  # "ram": weights, gradients and the optimizer's states are in RAM
    defers_exchange: bool = False  # gradients of a divided model stay whole until a step's last micro-batch
    reshard_after_forward: bool = True  # else a divided model stays gathered for the backward pass

    @property
    def shards(self) -> int:
        """Among how many processes weights are divided, if the engine divides them."""
        return self.world_size // self.replicas

    @property
    def data_ranks(self) -> int:
        """How many different micro-batches the processes have at a time (the data-parallel size)."""
        return self.world_size // self.sequence_ranks

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients and the optimizer's states are elsewhere than on the device."""
        return self.offload != "none"

    @property
    def replicated(self) -> bool:
        """Whether there are several divided models, among which gradients are reduced."""
        return self.replicas > 1

    @property
    def sharded(self) -> bool:
        """Whether tensors are sharded, though it may be for one process."""
        return self.shards > 1 or self.offloads

    def traced(self, *, divides: bool) -> "Sharing":
        """What the memory of a process depends on, if its engine divides the weights or does not."""
        shards = min(self.shards, MOST_SHARDS) if divides else 1
        replicas = 2 if divides and self.replicated else 1
        return replace(self, engine="", world_size=shards * replicas, machines=1, replicas=replicas)

    @property
    def sequence_parallel(self) -> bool:
        """Whether several processes have parts of the same micro-batch."""
        return self.sequence_ranks > 1

    def tokens_of_rank(self, tokens: int) -> int:
        """The most tokens that a process has of a micro-batch of so many."""
        return -(-tokens // self.sequence_ranks)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What micro-batches are made of."""

    max_seq_len: int  # tokens of the longest row
    packing: bool  # whether rows are filled to max_seq_len
    joined: bool = True  # whether rows are joined end to end; otherwise padded to the longest
    most_tokens: int = 0  # of the largest micro-batch, including padding: the plan's token budget
    most_supervised: int = 0  # supervised tokens of any micro-batch
    sequence_tokens: int = 0  # of an average sequence, in which attention runs; 0 if unknown


Policy = Literal["keep", "recompute", "offload"]
WAYS = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}
SAID = WAYS | {"offload": "recomputed from inputs in RAM"}


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What the backward pass needs of the forward pass, and where it comes from."""

    policy: Policy = "keep"  # "offload": recomputed from inputs in RAM
    kept_layers: int = 0  # if layers are recomputed: the last ones, which keep their activations
    mlp_tiles: int = 1  # in which MLPs compute the largest micro-batch, if layers are recomputed

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed in the backward pass (gradient checkpointing)."""
        return self.policy != "keep"

    @property
    def in_tiles(self) -> bool:
        """Whether MLPs compute the largest micro-batch in several parts."""
        return self.mlp_tiles > 1

    @property
    def apart(self) -> int:
        """How many of the last layers are treated otherwise than the others."""
        return self.kept_layers

    def with_apart(self, count: int) -> "Activations":
        """The same with so many of them."""
        return replace(self, kept_layers=count)

    @property
    def partly_kept(self) -> bool:
        """Whether some layers keep their activations, and the others recompute theirs."""
        return self.kept_layers > 0

    @property
    def saved(self) -> float:
        """Grows with what is saved of them: 0 if nothing is."""
        if not self.recomputes:
            return 0.0
        return 1 / (1 + self.kept_layers) + self.in_tiles + 2 * (self.policy == "offload")

    def traced(self, device: str) -> "Activations":
        """What the memory of a device depends on; a CPU has no other memory to offload to."""
        on_cpu = self.policy == "offload" and device == "cpu"
        return replace(self.whole, policy="recompute" if on_cpu else self.policy)

    @property
    def whole(self) -> "Activations":
        """The same with MLPs that compute all tokens at once."""
        return replace(self, mlp_tiles=1)

    @property
    def uniform(self) -> "Activations":
        """The same in all layers."""
        return self.with_apart(0)

    @property
    def kind(self) -> "Activations":
        """Alike for all that differ only in how many layers keep their activations, if some do."""
        return self.with_apart(min(self.apart, 1))

    @property
    def way(self) -> str:
        """What becomes of them, in a word or two."""
        if self.partly_kept:
            return "partly kept"
        return WAYS[self.policy] + ", in tiles" * self.in_tiles

    @property
    def words(self) -> str:
        """The same where it is not said otherwise where they are recomputed from."""
        return "partly kept" if self.partly_kept else SAID[self.policy]

    @property
    def methods(self) -> list[str]:
        """The methods that save memory."""
        tiles = [f"MLPs in {self.mlp_tiles} tiles"] if self.in_tiles else []
        return ["gradient checkpointing", *tiles] if self.recomputes else tiles

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Activations":
        """Those of a plan or of an alternative to it; earlier versions had two ways only."""
        older = "recompute" if values.get("gradient_checkpointing") else "keep"
        known = {each.name: values.get(JSON_NAMES.get(each.name, each.name)) for each in fields(cls)}
        return cls(**{"policy": older} | {name: value for name, value in known.items() if value is not None})

    def tile(self, tokens: int) -> int:
        """The most tokens that an MLP computes at a time of so many that a process has; 0: all."""
        return -(-tokens // self.mlp_tiles) if self.in_tiles else 0


RECOMPUTED = Activations(policy="recompute")


def recomputed_words(found: Iterable[Activations]) -> str:
    """How plans that recompute activations do it, taken together."""
    several = list(found)
    tiles = max((each.mlp_tiles for each in several), default=1)
    in_ram = ", from inputs in RAM" * any(each.policy == "offload" for each in several)
    return "recomputed" + in_ram + f", MLPs in {tiles} tiles" * (tiles > 1)


def ways(train: "TrainConfig", device: str) -> Iterator[Activations]:
    """What may become of activations, the fastest first.

    A CPU has no other memory to offload to, compiled layers cannot.
    """
    if train.asked_activations != "auto":
        yield Activations(policy=train.asked_activations)
        return
    if not train.asks_tiles:
        yield Activations()
    yield RECOMPUTED
    if device == "cuda" and not train.asks_compile:
        yield Activations(policy="offload")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The types of numbers."""

    autocast: str = "no"  # or "bf16" or "fp16"
    dtype: str = "float32"  # of the weights; or "bfloat16" or "float16"

    @property
    def computed_in(self) -> str:
        """The type of products, by its name in torch."""
        return AUTOCAST.get(self.autocast, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes attention and the other parts of a layer."""

    attention: str = "varlen_sdpa"  # a row of `ATTENTIONS`
    layers: str = "own"  # of norms, rotary embeddings and gated layers: `own`, or a row of `LAYERS`
    compiled: bool = False  # whether decoder layers are compiled


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The optimizer steps of a run."""

    learning_rate: float
    steps_per_epoch: int
    total_steps: int


# By their name in a plan.
PARTS: dict[str, type[Any]] = {
    "batch": Batch,
    "sharing": Sharing,
    "rows": Rows,
    "activations": Activations,
    "precision": Precision,
    "kernels": Kernels,
    "schedule": Schedule,
}


def flat(part: "DataclassInstance") -> dict[str, object]:
    """The fields of a part, by their names in a plan's JSON."""
    return {JSON_NAMES.get(name, name): value for name, value in asdict(part).items()}


def parts_of(values: dict[str, Any]) -> dict[str, Any]:
    """The parts that have these values, which are named as in a plan's JSON and removed from there."""

    def known(part: type[Any]) -> Iterator[tuple[str, Any]]:
        for each in fields(part):
            if (name := JSON_NAMES.get(each.name, each.name)) in values:
                yield each.name, values.pop(name)

    return {name: part(**dict(known(part))) for name, part in PARTS.items()}

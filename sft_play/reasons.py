"""Why a plan is as it is, as facts. `report.reasons` writes them as sentences; nothing else does."""

from dataclasses import dataclass
from typing import Literal, dataclass_transform

from sft_play.plan import HostMemory, Plan

Range = tuple[float, float]  # of relative errors; negative if the prediction was too low


@dataclass_transform(frozen_default=True)
class Reason:
    """One thing to know about a plan; each kind is a frozen dataclass."""

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)


class EffectiveBatch(Reason):
    """The equation of the effective batch."""

    plan: Plan


class Dealing(Reason):
    """How many tokens a micro-batch has, and how its rows lie."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class OtherKind:
    """The largest micro-batch that fits with another engine, or with other activations."""

    size: int
    engine: str | None = None  # its label, if it differs
    activations: str | None = None  # if they differ, as in a plan


class MicroBatch(Reason, kw_only=True):
    """Why not a larger micro-batch; of the chosen kind, unless only others have one that fits."""

    size: int
    timed: bool  # whether speed is predicted
    fits: int | None = None  # the largest of the chosen kind that fits
    whole_step: bool = False  # all rows of a step at once
    misfit: int | None = None  # the next larger one, which does not fit
    ran_out: bool = False  # as an earlier run has shown
    other: OtherKind | None = None


class Activations(Reason):
    """What becomes of activations, and why."""

    activations: str  # as in a plan
    cause: Literal["config", "fit", "exceed", "faster"]
    kept_layers: int = 0  # that keep theirs, though others are recomputed
    layers: int = 0  # of the model, if some do
    device: str = "cuda"  # or "cpu"
    host: HostMemory | None = None  # of a GPU that offloads what they are recomputed from


class Tiles(Reason):
    """MLPs compute the tokens of a micro-batch in tiles, and why."""

    tiles: int  # of the largest micro-batch
    tokens: int  # of a tile
    cause: Literal["config", "exceed"]


class EngineChoice(Reason, kw_only=True):
    """The engine, and what another one would need with the same micro-batch; labels of both."""

    engine: str
    principle: str  # what the engine does to the memory of a process
    trades_speed: bool  # for memory
    world_size: int
    replicas: int = 1  # of the model, each divided inside a machine
    exchanges_once: bool = False  # whether gradients wait for the last micro-batch of a step
    other: str | None = None
    more_bytes: int = 0  # that the other one needs; negative if it needs less
    slower: float | None = None  # how many times as long the other one takes, if longer
    alone: bool = False  # whether no other engine fits that the config allows


class WeightsAlone(Reason):
    """Engines that were left out since what a process holds of the weights alone is more than its memory."""

    engines: str  # labels
    held_bytes: int  # by the one that holds least


class GatheredWeights(Reason):
    """Whether weights stay gathered from the forward to the backward pass, and why."""

    # "kept", "freed": as the config says; "faster": kept; "exceed", "tie", "unknown": freed
    cause: Literal["kept", "freed", "faster", "exceed", "tie", "unknown"]
    saved_share: float = 0.0  # of a step's predicted time


class Offload(Reason):
    """What is in RAM, and why: the config says so, or nothing else fits."""

    device: str  # "cuda" or "cpu"
    engine: str  # its label
    cause: Literal["config", "exceed"]
    host: HostMemory | None  # on a GPU whose memory is predicted
    held: str = "weights, gradients and optimizer states"


class TokensDivided(Reason):
    """Whether processes divide the tokens of a micro-batch, which nobody asked for, and the other ways."""

    ranks: int  # of a group; 1: rows stay whole
    slower: tuple[
        tuple[int, float], ...
    ]  # ranks of other groups that fit, and how many times as long they take
    ruled_out: bool  # whether larger groups cannot be faster, whatever they take


class StatesOnDisk(Reason):
    """The optimizer's states, and of some engines weights, are in files, as the config says."""

    files: str  # what is there
    folder: str
    saved_bytes: int  # of RAM, of all processes of a machine


class Unsized(Reason):
    """The micro-batch of a model whose memory cannot be predicted."""

    given: bool


class Precision(Reason):
    """The autocast type."""

    precision: str
    cause: Literal["config", "cpu", "device"]
    device: str


class MasterWeights(Reason):
    """The type of weights, gradients and optimizer states of full fine-tuning."""

    dtype: Literal["float32", "bfloat16"]  # "float32": masters
    bytes: int  # by which bf16 needs less
    place: Literal["memory", "RAM"] = "memory"  # "RAM": of a machine whose processes offload


class LearningRate(Reason, kw_only=True):
    """The learning rate, and the rule that scaled it from another effective batch."""

    given: float
    used: float
    rule: str = "none"
    reference: int | None = None
    effective: int


class UnknownFreeMemory(Reason):
    """Nothing tells how much memory is free."""

    device: str


class Untraceable(Reason):
    """Memory cannot be predicted; the first line of the error."""

    message: str


class ScratchOffRule(Reason):
    """What a CPU's products in a type take beside operands and results follows no rule; the worst error."""

    dtype: str
    worst: float


class MemoryLimit(Reason):
    """parallel.memory_gib, and the bytes that are free if they are fewer."""

    asked_gib: float
    free_bytes: int | None


class GuardKept(Reason):
    """Bytes that stay free, and where the number comes from."""

    bytes: int
    why: str


class Assumed(Reason):
    """Parts of each process that are assumed, not measured."""

    parts: tuple[str, ...]


class UnknownCapability(Reason):
    """The GPU's compute capability is unknown; its kernels are assumed to be those of another."""

    assumed: tuple[int, int]


class PredictionErrors(Reason):
    """Errors of predictions in published runs on such GPUs, by what was predicted; unknown without runs."""

    capability: tuple[int, int]
    quantized: bool
    runs: int
    errors: tuple[tuple[str, Range], ...]


class ProfileSource(Reason):
    """Where the predicted seconds come from."""

    device: str
    source: str


class OnlyWhileBusy(Reason):
    """The device was measured, but other programs used the machine meanwhile."""

    device: str


class SecondsOfEarlierRun(Reason):
    """An earlier run measured seconds, in proportion to which those of this plan are."""


class Communication(Reason):
    """Where the seconds of communication come from."""

    processes: int
    measured: bool
    links: tuple[float, ...]  # bytes a second by the data sheet, as `planning.speed.links_of`
    measured_later: bool  # by the first run


class AssumedRows(Reason):
    """There are no training rows yet."""

    rows: int
    tokens: int


class DrawnLengths(Reason, kw_only=True):
    """The training rows are not here; their lengths are drawn from a lognormal distribution."""

    rows: int
    median: int  # tokens, as p95
    p95: int
    longest: int  # of those that are left
    longer: int  # rows above the limit
    overlong: str  # what becomes of these: data.overlong


class OptimizerStates(Reason):
    """States of an optimizer that is not the default, and those that may leave the GPU."""

    optimizer: str
    bytes: int
    paged_bytes: int | None = None  # None if they never do


class Ranks(Reason):
    """Ranks of adapters that are not alike."""

    rank: int
    others: tuple[tuple[str, int], ...]


class LoraPlus(Reason):
    """Learning rates of the two factors of adapters."""

    rate: float
    ratio: float


class Decomposed(Reason):
    """Adapters start from a decomposition of the base weights."""

    init: str


class Noise(Reason):
    """NEFTune's noise on the embeddings."""

    alpha: float


class Corrected(Reason):
    """An earlier probe corrects the predicted memory."""

    ratio: float


class RanOutBefore(Reason):
    """Memory ran out in an earlier run of this kind."""

    tokens: int  # in a micro-batch
    outcome: Literal["again", "more_free", "smaller"]  # what this plan makes of it


class FourBitBase(Reason):
    """How much of the base QLoRA packs."""

    share: float
    bytes: int
    sixteen_bit_bytes: int


class Padded(Reason):
    """Rows are padded."""

    cause: Literal["config", "boundaries", "layers", "attention"]
    what: str = ""  # the model's class, the types of its layers, or the attention


class NewTokens(Reason):
    """Rows of a frozen embedding that are trained."""

    tokens: int
    parameters: int
    tied: bool


class TrainedWhole(Reason):
    """tuning.lora.modules_to_save."""

    parameters: int
    modules: int
    names: tuple[str, ...]


class AttentionKernel(Reason):
    """The kernel of attention that a GPU runs."""

    kernel: str
    calls: Literal["one", "each_row", "padded"]


class Unproven(Reason):
    """What the GPU and the model could run, and what is off until `make gpu-proof` has seen it win."""

    label: str
    setting: str  # that takes it


class CompiledLayers(Reason):
    """Whether torch.compile compiles the decoder layers, which the prediction does not count on."""

    compiled: Literal["on", "off", "float8"]


class LayerKernels(Reason):
    """What computes norms, rotary embeddings and gated layers on a GPU."""

    kernels: Literal["off", "liger"]
    modules: int
    saved_bytes: int  # of a process: what Liger's take less than ours, with the same micro-batch

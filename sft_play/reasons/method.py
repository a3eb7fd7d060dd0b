"""What is trained, with which numbers and kernels."""

from typing import Literal

from sft_play.choices.kernels import LAYERS
from sft_play.reasons.reason import Reason
from sft_play.units import counted, format_bytes


class Precision(Reason):
    """The autocast type."""

    precision: str
    cause: Literal["config", "cpu", "device"]
    device: str

    def __str__(self) -> str:
        return {
            "config": f"{self.precision} autocast, as set in the config",
            "cpu": "fp32 on the CPU",
            "device": f"{self.precision} autocast, which {self.device} supports",
        }[self.cause]


class MasterWeights(Reason):
    """The type of weights, gradients and optimizer states of full fine-tuning."""

    dtype: Literal["float32", "bfloat16"]  # "float32": masters
    bytes: int  # by which bf16 needs less
    place: Literal["memory", "RAM"] = "memory"  # "RAM": of a machine whose processes offload

    def __str__(self) -> str:
        size = f"{format_bytes(self.bytes)} of {self.place}"
        if self.dtype == "float32":
            return (
                f"fp32 master weights: pure bf16 (model.dtype=bfloat16) would save {size}, but lose updates "
                "below 1/512 of a weight"
            )
        return (
            f"pure bf16 (model.dtype=bfloat16): saves {size} over fp32 master weights, but loses updates "
            "below 1/512 of a weight"
        )


class LearningRate(Reason, kw_only=True):
    """The learning rate, and the rule that scaled it from another effective batch."""

    given: float
    used: float
    rule: str = "none"
    reference: int | None = None
    effective: int

    def __str__(self) -> str:
        if self.rule == "none" or self.reference is None:
            return f"learning rate {self.given:g} as given, not scaled"
        return (
            f"learning rate {self.given:g} x {self.used / self.given:.3g} = {self.used:.3g}: {self.rule} "
            f"scaling from batch {self.reference} to {self.effective}"
        )


class OptimizerStates(Reason):
    """States of an optimizer that is not the default, and those that may leave the GPU."""

    optimizer: str
    bytes: int
    paged_bytes: int | None = None  # None if they never do

    def __str__(self) -> str:
        found = f"{self.optimizer}: {format_bytes(self.bytes)} of optimizer states"
        if self.paged_bytes is None:
            return f"{found} in each process"
        if self.paged_bytes <= 0:
            return f"{found}, none of them paged: only those of large weights are"
        return (
            f"{found} on the GPU, and about {format_bytes(self.paged_bytes)} that move to RAM while the GPU "
            "is full, which takes time that is not counted below"
        )


class Ranks(Reason):
    """Ranks of adapters that are not alike."""

    rank: int
    others: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, but {', '.join(f'{rank} for {name}' for name, rank in self.others)}"


class LoraPlus(Reason):
    """Learning rates of the two factors of adapters."""

    rate: float
    ratio: float

    def __str__(self) -> str:
        return f"LoRA+: learning rate {self.rate * self.ratio:.2e} for B, {self.rate:.2e} for A"


class Decomposed(Reason):
    """Adapters start from a decomposition of the base weights."""

    init: str
    text = (
        "{init}: every adapted weight is decomposed before the first step; the saved adapter has "
        "twice the rank"
    )


class Noise(Reason):
    """NEFTune's noise on the embeddings."""

    alpha: float
    text = "NEFTune: noise within {alpha:g} / sqrt(tokens of a padded row x hidden size) on the embeddings"


class FourBitBase(Reason):
    """How much of the base QLoRA packs."""

    share: float
    bytes: int
    sixteen_bit_bytes: int
    text = "{share:.0%} of the weights of the base are 4-bit ({bytes} in all, {sixteen_bit_bytes} in 16 bit)"


class Padded(Reason):
    """Rows are padded."""

    cause: Literal["config", "noise", "boundaries", "layers", "attention"]
    what: str = ""  # the model's class, the types of its layers, or the attention

    def __str__(self) -> str:
        if self.cause == "config":
            return "rows are padded because train.padding_free=false"
        return f"rows are padded: {self.why()}"

    def why(self) -> str:
        """Why joined rows would see each other."""
        return {
            "config": "train.padding_free=false",
            "noise": "NEFTune scales its noise by the length of a row",
            "boundaries": f"{self.what} passes no row boundaries to its attention",
            "layers": f"layers of type {self.what} would mix them",
            "attention": f"{self.what} attention does not support row boundaries",
        }[self.cause]


class NewTokens(Reason):
    """Rows of a frozen embedding that are trained."""

    tokens: int
    parameters: int
    tied: bool

    def __str__(self) -> str:
        where = "tied embedding" if self.tied else "embedding and output head"
        trained = f"{self.parameters:,} parameters of the {where} are trained for them"
        return f"{counted(self.tokens, 'new token')}: {trained}"


class TrainedWhole(Reason):
    """tuning.lora.modules_to_save."""

    parameters: int
    modules: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters of {counted(self.modules, 'module')} are trained in full "
            f"(tuning.lora.modules_to_save: {', '.join(self.names)})"
        )


class AttentionKernel(Reason):
    """The kernel of attention that a GPU runs."""

    kernel: str
    calls: Literal["one", "each_row", "padded"]

    def __str__(self) -> str:
        how = {
            "one": "one call for all rows of a micro-batch",
            "each_row": "a call for each row",
            "padded": "rows are padded",
        }
        return f"attention: {self.kernel}, {how[self.calls]}"


class Unproven(Reason):
    """What the GPU and the model could run, and what is off until `make gpu-proof` has seen it win."""

    label: str
    setting: str  # that takes it
    text = "{label} is off, not yet benchmarked on a GPU; {setting} turns it on"


class CompiledLayers(Reason):
    """Whether torch.compile compiles the decoder layers, and the prediction of memory counts on it."""

    compiled: Literal["on", "off", "timed", "float8"]
    traced_for: Literal["cpu", "cuda"] | None = None

    def __str__(self) -> str:
        if self.compiled == "off":
            return (
                "layers are not compiled: that takes a minute or more, which a run tries where it is under "
                "2% of its time and gain more than it takes; train.compile=true always compiles"
            )
        also, not_so = ("", "are not")
        if self.compiled == "float8":
            also, not_so = " and multiply in float8", "do neither"
        timed = self.compiled == "timed"
        why = "since steps timed on this device were faster" if timed else "as set in the config"
        memory = f"predicted for layers that {not_so}"
        if self.traced_for:
            memory = "that of the code which the compiler generates, unless a warning says otherwise"
        if self.traced_for == "cuda":
            memory = (
                f"about {memory} (not compared with a run on a GPU yet; the plan fits without compiling too)"
            )
        return (
            f"layers are compiled{also}, {why}; memory is {memory}, "
            "seconds on a GPU with element-wise operations fused; the first step takes longer"
        )


class LayerKernels(Reason):
    """Other kernels that compute modules of the layers on a GPU."""

    kernels: Literal[tuple(LAYERS)]  # type: ignore[valid-type]
    modules: int
    saved_bytes: int | None  # of a process: what they take less than ours; None: they are off

    def __str__(self) -> str:
        row = LAYERS[self.kernels]
        if self.saved_bytes is None:
            return (
                f"{row.label} are off until a run has timed them on this GPU (not with FSDP2 or ZeRO-3), or "
                f"with {row.setting}"
            )
        difference = f"{format_bytes(abs(self.saved_bytes))} {'less' if self.saved_bytes >= 0 else 'more'}"
        return f"{row.label} compute {self.modules} {row.serves}, which needs {difference} than ours"

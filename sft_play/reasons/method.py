"""What is trained, with which numbers and kernels, in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sft_play.choices.kernels import LAYERS
from sft_play.config.train import TrainConfig
from sft_play.plan import Device
from sft_play.units import counted, format_bytes


def precision(asked: str, autocast: str, device: Device) -> str:
    """The autocast type, and why."""
    if asked != "auto":
        return f"{asked} autocast, as set in the config"
    if device.kind == "cpu":
        return "fp32 on the CPU"
    return f"{autocast} autocast, which {device.name} supports"


def master_weights(dtype: Literal["float32", "bfloat16"], size: int, place: str = "memory") -> str:
    """The type of weights, gradients and optimizer states of full fine-tuning; "float32": masters.

    The size is by how many bytes bf16 needs less, of memory, or of RAM of a machine whose processes offload.
    """
    saved = f"{format_bytes(size)} of {place}"
    if dtype == "float32":
        return (
            f"fp32 master weights: pure bf16 (model.dtype=bfloat16) would save {saved}, but lose updates "
            "below 1/512 of a weight"
        )
    return (
        f"pure bf16 (model.dtype=bfloat16): saves {saved} over fp32 master weights, but loses updates "
        "below 1/512 of a weight"
    )


def learning_rate(train: TrainConfig, used: float, effective: int) -> str:
    """The learning rate, and the rule that scaled it from another effective batch."""
    given, reference = train.learning_rate, train.reference_batch_size
    if train.lr_scaling == "none" or reference is None:
        return f"learning rate {given:g} as given, not scaled"
    return (
        f"learning rate {given:g} x {used / given:.3g} = {used:.3g}: {train.lr_scaling} "
        f"scaling from batch {reference} to {effective}"
    )


def optimizer_states(optimizer: str, size: int, paged_bytes: int | None) -> str:
    """States of an optimizer that is not the default, and those that may leave the GPU; None: none may."""
    found = f"{optimizer}: {format_bytes(size)} of optimizer states"
    if paged_bytes is None:
        return f"{found} in each process"
    if paged_bytes <= 0:
        return f"{found}, none of them paged: only those of large weights are"
    return (
        f"{found} on the GPU, and about {format_bytes(paged_bytes)} that move to RAM while the GPU "
        "is full, which takes time that is not counted below"
    )


def ranks(rank: int, others: Mapping[str, int]) -> str:
    """Ranks of adapters that are not alike."""
    return f"rank {rank}, but {', '.join(f'{other} for {name}' for name, other in others.items())}"


def lora_plus(rate: float, ratio: float) -> str:
    """Learning rates of the two factors of adapters."""
    return f"LoRA+: learning rate {rate * ratio:.2e} for B, {rate:.2e} for A"


def decomposed(init: str) -> str:
    """Adapters start from a decomposition of the base weights."""
    return (
        f"{init}: every adapted weight is decomposed before the first step; the saved adapter has "
        "twice the rank"
    )


def noise(alpha: float) -> str:
    """NEFTune's noise on the embeddings."""
    return f"NEFTune: noise within {alpha:g} / sqrt(tokens of a padded row x hidden size) on the embeddings"


def four_bit_base(share: float, size: int, sixteen_bit_bytes: int) -> str:
    """How much of the base QLoRA packs."""
    sizes = f"{format_bytes(size)} in all, {format_bytes(sixteen_bit_bytes)} in 16 bit"
    return f"{share:.0%} of the weights of the base are 4-bit ({sizes})"


@dataclass(frozen=True)
class Padded:
    """Rows are padded, and why."""

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


def new_tokens(tokens: int, parameters: int, tied: bool) -> str:
    """Rows of a frozen embedding that are trained."""
    where = "tied embedding" if tied else "embedding and output head"
    return f"{counted(tokens, 'new token')}: {parameters:,} parameters of the {where} are trained for them"


def trained_whole(parameters: int, modules: int, names: Sequence[str]) -> str:
    """tuning.lora.modules_to_save."""
    return (
        f"{parameters:,} parameters of {counted(modules, 'module')} are trained in full "
        f"(tuning.lora.modules_to_save: {', '.join(names)})"
    )


def unproven(label: str, setting: str) -> str:
    """What the GPU and the model could run, and what is off until `make gpu-proof` has seen it win."""
    return f"{label} is off, not yet benchmarked on a GPU; {setting} turns it on"


NOT_COMPILED = (
    "layers are not compiled: that takes a minute or more, which a run tries where it is under "
    "2% of its time and gain more than it takes; train.compile=true always compiles"
)


def compiled_layers(
    compiled: Literal["on", "timed", "float8"], traced_for: Literal["cpu", "cuda"] | None = None
) -> str:
    """That torch.compile compiles the decoder layers, and whether the prediction of memory counts on it."""
    also, not_so = ("", "are not")
    if compiled == "float8":
        also, not_so = " and multiply in float8", "do neither"
    why = "since steps timed on this device were faster" if compiled == "timed" else "as set in the config"
    memory = f"predicted for layers that {not_so}"
    if traced_for:
        memory = "that of the code which the compiler generates, unless a warning says otherwise"
    if traced_for == "cuda":
        memory = f"about {memory} (not compared with a run on a GPU yet; the plan fits without compiling too)"
    return (
        f"layers are compiled{also}, {why}; memory is {memory}, "
        "seconds on a GPU with element-wise operations fused; the first step takes longer"
    )


def layer_kernels(
    kernels: Literal[tuple(LAYERS)],  # type: ignore[valid-type]
    modules: int,
    saved_bytes: int | None,
) -> str:
    """Other kernels that compute so many modules of the layers on a GPU.

    `saved_bytes` is what a process needs less with them than with ours; None: they are off.
    """
    row = LAYERS[kernels]
    if saved_bytes is None:
        return (
            f"{row.label} are off until a run has timed them on this GPU (not with FSDP2 or ZeRO-3), or "
            f"with {row.setting}"
        )
    difference = f"{format_bytes(abs(saved_bytes))} {'less' if saved_bytes >= 0 else 'more'}"
    return f"{row.label} compute {modules} {row.serves}, which needs {difference} than ours"

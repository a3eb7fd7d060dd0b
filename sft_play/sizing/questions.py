"""What the planner asks about an architecture. Each answer takes transformers, so `Architecture` keeps them.

Arguments are all that an answer depends on besides the architecture.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sft_play.choices import optimizers
from sft_play.config.schema import LoraSettings
from sft_play.errors import ConfigError
from sft_play.model.attention_table import ATTENTIONS, NAME
from sft_play.reasons.method import AttentionKernel, FourBitBase, NewTokens, Padded, TrainedWhole
from sft_play.sizing.step import StepSpec
from sft_play.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKED_BYTES = 0.5 + (1 + 4 / 256) / 64  # of a weight in NF4, with its share of double-quantized scales
MOST_IN_EXPERTS = 0.1  # of the weights: more than this is not worth 4-bit layers around it
BY_LONGEST = {"dynamic", "longrope"}  # types of RoPE whose angles depend on the longest position of a batch


def hidden_size(config: "PretrainedConfig") -> int:
    """The width of the decoder."""
    return config.get_text_config().hidden_size


def state_bytes(config: "PretrainedConfig", optimizer: str, device: str, elements: int) -> int:
    """As in `choices.optimizers`."""
    return optimizers.state_bytes(optimizer, device, elements)


def trained_elements(
    config: "PretrainedConfig", mode: str, lora: LoraSettings, new_tokens: int
) -> list[list[int]]:
    """As `fake.trained_elements`."""
    from sft_play.sizing.fake import trained_elements

    return trained_elements(config, StepSpec(mode=mode, lora=lora, new_tokens=new_tokens))


def update_bytes(config: "PretrainedConfig", optimizer: str, device: str, elements: int) -> int:
    """As `trace.update_bytes`."""
    from sft_play.sizing.trace import update_bytes

    return update_bytes(StepSpec(mode="full", optimizer=optimizer, device=device), elements)


def position_limit(config: "PretrainedConfig") -> int | None:
    """As in `model.load`."""
    from sft_play.model.load import position_limit

    return position_limit(config)


def attention(
    config: "PretrainedConfig", asked: str, device: str, capability: tuple[int, int] | None, dtype: str
) -> str:
    """As `choose_attention`; with a package it also depends on the GPU that is here."""
    from sft_play.model.attention_choice import choose_attention

    return choose_attention(asked, config, device, capability, dtype)


def has_attention_packages() -> bool:
    """Whether attention may come from a package, which is found out without importing it."""
    return any(find_spec(name) for row in ATTENTIONS.values() for name in row.modules)


def heads_and_scaling(config: "PretrainedConfig") -> tuple[int | None, str | None]:
    """The attention heads of a layer, and the RoPE type if it depends on the longest position of a batch.

    The first is None if layers differ, the second if each position is for itself.
    """
    from sft_play.model.architecture import setting

    text = config.get_text_config()
    heads = setting(text, "num_attention_heads")
    found = setting(text, "rope_parameters") or {}
    kinds = [found, *(each for each in found.values() if isinstance(each, dict))]
    scaling = next((kind["rope_type"] for kind in kinds if kind.get("rope_type") in BY_LONGEST), None)
    return heads if isinstance(heads, int) else None, scaling


def why_padded(
    config: "PretrainedConfig", packing: bool, padding_free: Any, attention_name: str
) -> Padded | None:
    """As in `model.attention_choice`."""
    from sft_play.model.attention_choice import why_padded

    return why_padded(packing, padding_free, config, attention_name)


def balances_experts(config: "PretrainedConfig") -> bool:
    """Whether the model can be asked for what its routers chose, which a loss may balance."""
    text = config.get_text_config()
    return hasattr(text, "output_router_logits") and hasattr(text, "router_aux_loss_coef")


def layer_kinds(config: "PretrainedConfig") -> list[int]:
    """A number for each decoder layer, as in `sizing.fake`; none if they are recomputed all or none."""
    from sft_play.model.architecture import decoder_layers, empty_model
    from sft_play.model.recomputation import can_mix
    from sft_play.sizing.fake import layer_kinds

    model = empty_model(config)
    try:
        return layer_kinds(decoder_layers(model)[2]) if can_mix(model) else []
    except LookupError:
        return []


def weights(config: "PretrainedConfig") -> int:
    """How many weights the model has; tied ones count once."""
    from sft_play.model.architecture import empty_model

    return sum(weight.numel() for weight in empty_model(config).parameters())


def padded_share(config: "PretrainedConfig", processes: int) -> float:
    """What all weights take if `fully_shard` divides them among so many processes, of what they take whole.

    It divides each weight by its rows and pads it until every process has as many. The rows of fused experts
    are the experts: if they are 128, 256 processes gather twice as much.
    """
    from sft_play.model.architecture import empty_model

    weights = [weight for weight in empty_model(config).parameters() if weight.ndim]
    padded = sum(-(-len(weight) // processes) * processes * weight[0].numel() for weight in weights)
    return padded / sum(weight.numel() for weight in weights)


def tiled_mlps(config: "PretrainedConfig") -> int:
    """How many of the model's MLPs can compute in tiles, as in `model.tiled_mlp`."""
    from sft_play.model.architecture import decoder_layers, empty_model
    from sft_play.model.tiled_mlp import mlps_of

    try:
        return sum(len(list(mlps_of(layer))) for layer in decoder_layers(empty_model(config))[2])
    except LookupError:
        return 0


def require_liger_modules(config: "PretrainedConfig") -> int:
    """How many modules of the model Liger's kernels serve.

    Raises:
        ConfigError: none.
    """
    from sft_play.model import liger
    from sft_play.model.architecture import empty_model
    from sft_play.model.layer_forward import replace_forwards

    if count := replace_forwards(empty_model(config), liger.NAME):
        return count
    raise ConfigError(
        f"train.kernels=liger: none of {config.model_type}'s modules are those that Liger's kernels compute "
        f"(norms, rotary embeddings and gated layers as of {', '.join(liger.EXAMPLES)}); allowed for it: "
        "auto, own"
    )


def float8_layers(config: "PretrainedConfig") -> int:
    """How many linear layers of the model can multiply in float8."""
    from sft_play.model.architecture import decoder_layers, empty_model
    from sft_play.model.float8 import is_served

    try:
        return sum(is_served(module) for module in decoder_layers(empty_model(config))[2].modules())
    except LookupError:
        return 0


def besides_dense_layers(config: "PretrainedConfig") -> str | None:
    """What the decoder layers have besides attention and a dense feed-forward part; None if nothing."""
    from sft_play.model.architecture import empty_model
    from sft_play.model.attention_choice import why_padded
    from sft_play.model.targets import fused_experts

    if next(fused_experts(empty_model(config)), None):
        return "experts"
    found = why_padded(False, "auto", config, NAME)
    if found is None:
        return None
    return f"layers of type {found.what}" if found.cause == "layers" else "an attention of its own"


def attention_kernel(config: "PretrainedConfig", spec: StepSpec) -> AttentionKernel | None:
    """As in `sizing.attention_kernels`."""
    from sft_play.sizing.attention_kernels import attention_kernel

    return attention_kernel(config, spec)


def depends_on_lengths(config: "PretrainedConfig", spec: StepSpec) -> bool:
    """As in `sizing.attention_kernels`."""
    from sft_play.sizing.attention_kernels import depends_on_lengths

    return depends_on_lengths(config, spec)


@dataclass(frozen=True)
class FourBit:
    """Weights of a base model by how QLoRA keeps them; their sum is `weights`."""

    model: str
    weights: int
    packed: int  # in linear layers
    experts: int  # in fused experts, which stay in 16 bit

    def bytes(self, packed: int) -> int:
        """Size of the base with so many weights in 4 bits and the others in 16."""
        return round(packed * PACKED_BYTES + 2 * (self.weights - packed))


def four_bit(config: "PretrainedConfig") -> FourBit:
    """Counts the weights of an architecture on the meta device.

    Raises:
        ConfigError: it does not work with 4-bit weights at all.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    from sft_play.model.architecture import empty_model
    from sft_play.model.families import family_of
    from sft_play.model.targets import fused_experts

    if family_of(config.get_text_config()).clamps_weights:
        raise ConfigError(
            f"tuning.mode=qlora: {config.model_type} clamps weights while it trains, which 4-bit ones do not "
            "allow; set tuning.mode=lora"
        )
    model = empty_model(config)
    head = model.get_output_embeddings()
    linear = (m for m in model.modules() if isinstance(m, (Linear, Conv1D)) and m is not head)
    weights = sum(weight.numel() for weight in model.parameters())
    packed = sum(module.weight.numel() for module in linear)
    experts = sum(weight.numel() for _, weight in fused_experts(model))
    return FourBit(type(model).__name__, weights, packed, experts)


def require_packable(found: FourBit) -> FourBitBase:
    """How much of the base is 4-bit.

    Raises:
        ConfigError: much of it would not be, since fused experts stay in 16 bit.
    """
    if found.experts > MOST_IN_EXPERTS * found.weights:
        share, as_it_is = found.experts / found.weights, format_bytes(found.bytes(found.packed))
        raise ConfigError(
            f"tuning.mode=qlora: {share:.0%} of the weights of {found.model} are fused experts, which stay "
            f"in 16 bit, so that the base would take {as_it_is} instead of {format_bytes(found.bytes(0))}; "
            "set tuning.mode=lora, or use QLoRA with a model without experts"
        )
    return FourBitBase(found.packed / found.weights, found.bytes(found.packed), found.bytes(0))


def trained_besides(
    config: "PretrainedConfig", tokens: int, names: tuple[str, ...]
) -> tuple[NewTokens | None, TrainedWhole | None]:
    """The rows of so many new tokens, and the modules that an adapter's modules_to_save names.

    Raises:
        ConfigError: this model has no such module.
    """
    from sft_play.model.architecture import empty_model
    from sft_play.model.targets import modules_to_save

    model: Any = empty_model(config)
    rows = whole = None
    if tokens:
        outer = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        parameters = sum({id(weight): tokens * weight.shape[1] for weight in outer}.values())
        rows = NewTokens(tokens, parameters, tied=outer[0] is outer[1])
    if names:
        modules = modules_to_save(model, names)
        weights = {id(p): p.numel() for name in modules for p in model.get_submodule(name).parameters()}
        whole = TrainedWhole(sum(weights.values()), len(modules), tuple(names))
    return rows, whole

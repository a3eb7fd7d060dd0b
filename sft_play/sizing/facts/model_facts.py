"""What the planner knows of an architecture, found once; `Architecture` keeps both parts.

What config.json tells takes transformers, what the modules tell takes building them, without weights.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sft_play.choices.kernels import LAYERS
from sft_play.errors import ConfigError
from sft_play.reasons.method import Padded, four_bit_base
from sft_play.units import format_bytes
from sft_play.vision.looks import Look, look_of, seeing_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKED_BYTES = 0.5 + (1 + 4 / 256) / 64  # of a weight in NF4, with its share of double-quantized scales
MOST_IN_EXPERTS = 0.1  # of the weights: more than this is not worth 4-bit layers around it
BY_LONGEST = {"dynamic", "longrope"}  # types of RoPE whose angles depend on the longest position of a batch


@dataclass(frozen=True)
class ModelFacts:
    """What the config tells."""

    model_type: str
    hidden_size: int  # of the decoder
    position_limit: int | None  # the longest sequence in tokens; None if it does not say
    heads: int | None  # of attention in a layer; None if layers differ
    scaling: str | None
    """The RoPE type if angles depend on the longest position of a batch, or None."""
    balances_experts: bool  # whether it can be asked for what its routers chose, which a loss may balance
    clamps_weights: bool  # while it trains
    rows_mix: Padded | None
    """Why joined rows would see each other, whatever the attention; None if they would not."""
    look: Look  # how pictures reach it


@dataclass(frozen=True)
class ModuleFacts:
    """What the modules tell, of all decoder layers where they are counted; tied weights count once."""

    name: str  # of the class
    layer_kinds: tuple[int, ...]
    """A number for each decoder layer, as in `fake_model`; none if they are recomputed all or none."""
    tiled_mlps: int  # that can compute in tiles, as in `model.layers.tiled_mlp`
    served: dict[str, int]  # modules that other kernels of `train.kernels` serve
    float8_layers: int  # that can multiply in float8
    weights: int
    trained: int  # of these, if all weights are trained
    packed: int  # in linear layers, which QLoRA keeps in 4 bits
    experts: int  # in fused experts, which stay in 16 bit
    rows: dict[int, int]  # rows of a weight -> weights in all that have so many

    @property
    def four_bit_bytes(self) -> int:
        """Size of the base as QLoRA keeps it."""
        return self.bytes(self.packed)

    def bytes(self, packed: int) -> int:
        """Size of the base with so many weights in 4 bits and the others in 16."""
        return round(packed * PACKED_BYTES + 2 * (self.weights - packed))

    def padded_share(self, processes: int) -> float:
        """What weights take if `fully_shard` divides them among so many processes, of what they take whole.

        It divides each weight by its rows and pads it until every process has as many. The rows of fused
        experts are the experts: if they are 128, 256 processes gather twice as much.
        """
        padded = sum(-(-rows // processes) * processes * count // rows for rows, count in self.rows.items())
        return padded / sum(self.rows.values())


def require_packable(facts: ModelFacts, modules: ModuleFacts) -> str:
    """How much of the base is 4-bit under QLoRA.

    Raises:
        ConfigError: the model does not work with 4-bit weights, or much of it would not be 4-bit, since fused
            experts stay in 16 bit.
    """
    if facts.clamps_weights:
        raise ConfigError(
            f"tuning.mode=qlora: {facts.model_type} clamps weights while it trains, which 4-bit ones do not "
            "allow; set tuning.mode=lora"
        )
    if modules.experts > MOST_IN_EXPERTS * modules.weights:
        share, as_it_is = modules.experts / modules.weights, format_bytes(modules.four_bit_bytes)
        raise ConfigError(
            f"tuning.mode=qlora: {share:.0%} of the weights of {modules.name} are fused experts, which stay "
            f"in 16 bit, so that the base would take {as_it_is} instead of {format_bytes(modules.bytes(0))}; "
            "set tuning.mode=lora, or use QLoRA with a model without experts"
        )
    return four_bit_base(modules.packed / modules.weights, modules.four_bit_bytes, modules.bytes(0))


def model_facts(config: "PretrainedConfig") -> ModelFacts:
    """The facts of a config."""
    from sft_play.model.architecture.families import family_of
    from sft_play.model.architecture.shape import setting
    from sft_play.model.attention.choice import why_rows_mix
    from sft_play.model.load import position_limit

    text = config.get_text_config()
    heads = setting(text, "num_attention_heads")
    rope = setting(text, "rope_parameters") or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return ModelFacts(
        model_type=config.model_type,
        hidden_size=text.hidden_size,
        position_limit=position_limit(config),
        heads=heads if isinstance(heads, int) else None,
        scaling=next((kind["rope_type"] for kind in kinds if kind.get("rope_type") in BY_LONGEST), None),
        balances_experts=hasattr(text, "output_router_logits") and hasattr(text, "router_aux_loss_coef"),
        clamps_weights=family_of(text).clamps_weights,
        rows_mix=why_rows_mix(config),
        look=look_of(config),
    )


def module_facts(config: "PretrainedConfig") -> ModuleFacts:
    """The facts of an architecture's modules, on the meta device."""
    from torch.nn import Linear, ModuleList
    from transformers.pytorch_utils import Conv1D

    from sft_play.model.adapters.targets import fused_experts
    from sft_play.model.architecture.shape import decoder_layers, empty_model
    from sft_play.model.build import freeze_what_gets_no_gradient
    from sft_play.model.layers import float8
    from sft_play.model.layers.own_passes import replace_forwards
    from sft_play.model.layers.recomputation import can_mix
    from sft_play.model.layers.tiled_mlp import mlps_of
    from sft_play.sizing.trace.fake_model import layer_kinds

    model: Any = empty_model(config)
    try:
        layers = decoder_layers(model)[2]
    except LookupError:
        layers = ModuleList()
    head, weights = model.get_output_embeddings(), list(model.parameters())
    linear = {module for module in model.modules() if isinstance(module, (Linear, Conv1D))} - {head}
    for part in seeing_parts(model.config):
        linear -= set(model.get_submodule(part).modules())
    rows: Counter[int] = Counter()
    for weight in weights:
        if weight.ndim:
            rows[len(weight)] += weight.numel()
    freeze_what_gets_no_gradient(model)
    return ModuleFacts(
        name=type(model).__name__,
        layer_kinds=tuple(layer_kinds(layers)) if len(layers) and can_mix(model) else (),
        tiled_mlps=sum(len(list(mlps_of(layer))) for layer in layers),
        float8_layers=sum(map(float8.is_served, layers.modules())),
        weights=sum(weight.numel() for weight in weights),
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        packed=sum(module.weight.numel() for module in linear),
        experts=sum(weight.numel() for _, weight in fused_experts(model)),
        rows=dict(rows),
        served={name: replace_forwards(model, name) for name in LAYERS},  # last, since it changes them
    )

"""The model that is trained, with fake tensors: shapes and data types but no memory, so that 70B parameters fit anywhere."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

from sft_play import attention
from sft_play.model import attach_adapter, keep_differentiable, nf4
from sft_play.sizing.kernels import swapped
from sft_play.sizing.ledger import Ledger
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import WHOLE_MODEL

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

NF4_BLOCK, NF4_SUPERBLOCK = 64, 256  # weights that share a scale, scales that share a scale of their own
LISTED_KINDS = 4  # layers of more kinds than this are told apart by their parameters alone


def skeleton(config: "PretrainedConfig", spec: StepSpec, *, all_layers: bool) -> tuple["PreTrainedModel", tuple[int, ...]]:
    """The base model on the meta device with few decoder layers, and for each layer of the whole model its stand-in.

    Linear layers are replaced as bitsandbytes would for QLoRA.
    """
    attention.register()
    dtype = getattr(torch, spec.dtype)
    with torch.device("meta"), without_initialisation():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=_implementation(spec))
        stand_ins = (
            tuple(range(model.config.get_text_config().num_hidden_layers)) if all_layers else keep_one_of_each_kind(model)
        )
        if spec.mode == "qlora":
            AutoHfQuantizer.from_config(nf4(dtype))._process_model_before_weight_loading(model, device_map=None)
            model.is_loaded_in_4bit = True
            keep_differentiable(model)
    model.config.use_cache = False
    return model, stand_ins


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Within, layers do not draw their first weights, which on the meta device has no effect but takes half of the time."""
    with ExitStack() as stack:
        for name in ("kaiming_uniform_", "uniform_", "normal_", "trunc_normal_"):
            stack.enter_context(swapped(torch.nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def _implementation(spec: StepSpec) -> str:
    """Kernels that cost what ours costs are traced as ours: they need packages, or masks that only a traced model gets."""
    return spec.attention if spec.attention == "eager" else attention.NAME


def decoder_layers(model: "PreTrainedModel") -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """The list of the model's decoder layers, the module that has it and its name there.

    Raises:
        LookupError: there is no list of as many modules as the config has layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                return module, name, child
    raise LookupError(f"no list of {count} layers in {type(model).__name__}")


def layer_kinds(layers: torch.nn.ModuleList) -> list[int]:
    """A number for each layer; layers with equal numbers allocate alike."""

    def shapes(layer: torch.nn.Module) -> tuple:
        return tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())

    def settings(layer: torch.nn.Module) -> tuple:
        return tuple(
            (path, type(module).__name__, name, value)
            for path, module in layer.named_modules()
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, str)) and not any(part in name for part in ("idx", "layer_id", "layer_number"))
        )

    for describe in (lambda layer: (shapes(layer), settings(layer)), shapes):
        described = [describe(layer) for layer in layers]
        kinds = list(dict.fromkeys(described))
        if len(kinds) <= LISTED_KINDS:
            break
    return [kinds.index(description) for description in described]


def choose_layers(kinds: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """The layers that are recorded - the first, the last, one of each kind between them - and for each layer its stand-in."""
    last = len(kinds) - 1
    middle: dict[int, int] = {}
    for index in range(1, last):
        middle.setdefault(kinds[index], index)
    kept = sorted({0, last, *middle.values()})
    stand_ins = [kept.index(middle[kind]) if 0 < index < last else kept.index(index) for index, kind in enumerate(kinds)]
    return kept, tuple(stand_ins)


def keep_one_of_each_kind(model: "PreTrainedModel") -> tuple[int, ...]:
    """Drops the decoder layers that need not be recorded, also in the config's per-layer lists; returns the stand-ins."""
    owner, name, layers = decoder_layers(model)
    kept, stand_ins = choose_layers(layer_kinds(layers))
    setattr(owner, name, torch.nn.ModuleList(layers[index] for index in kept))
    count = len(layers)
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if getattr(m, "config", None) is not None}
    for config in configs.values():
        if getattr(config, "num_hidden_layers", None) == count:
            for key, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == count:
                    setattr(config, key, [value[index] for index in kept])
            config.num_hidden_layers = len(kept)
    return stand_ins


def attach(model: "PreTrainedModel", spec: StepSpec) -> "PreTrainedModel | PeftModel":
    """Adapters as the trainer has them: fp32, on the meta device."""
    if spec.mode == "full":
        return model
    with torch.device("meta"), without_initialisation():
        adapted = attach_adapter(model, spec.lora)
    if spec.all_in_dtype:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    return adapted


def layer_of_modules(model: torch.nn.Module, layers: torch.nn.ModuleList) -> dict[torch.nn.Module, int]:
    """For each module the decoder layer that it is in."""
    owners = dict.fromkeys(model.modules(), WHOLE_MODEL)
    for index, layer in enumerate(layers):
        owners.update(dict.fromkeys(layer.modules(), index))
    return owners


def materialise(model: torch.nn.Module, layers: torch.nn.ModuleList, ledger: Ledger) -> None:
    """Gives parameters and buffers fake tensors and writes them down, layer by layer; must run in a FakeTensorMode."""
    from bitsandbytes.nn import Linear4bit

    owners = layer_of_modules(model, layers)
    made: dict[int, torch.nn.Parameter] = {}  # tied weights stay tied
    for owner in (WHOLE_MODEL, *range(len(layers))):
        ledger.begin("load", owner)
        for path, module in model.named_modules():
            if owners[module] != owner:
                continue
            term = "adapters" if ".lora_" in path else "weights"
            tensors = four_bit_tensors(module) if isinstance(module, Linear4bit) else ()
            if tensors:  # the 16-bit weight is on the device while it is packed
                ledger.add(module.weight.new_empty(module.weight.quant_state.shape, dtype=module.compute_dtype), "temporaries")
            for tensor in (*tensors, *plain_tensors(module, made)):
                ledger.add(tensor, term)
    ledger.begin("load")


def plain_tensors(module: torch.nn.Module, made: dict[int, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Replaces the module's own meta parameters and buffers."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None or parameter.device.type != "meta":
            continue
        if id(parameter) not in made:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
            made[id(parameter)] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        module._parameters[name] = made[id(parameter)]
        yield made[id(parameter)]
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            made_buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
            module._buffers[name] = made_buffer
            yield made_buffer


def four_bit_tensors(module: Any) -> list[torch.Tensor]:
    """Packs the weight of a Linear4bit as bitsandbytes does: two weights a byte, 8-bit scales, 32-bit scales of the scales."""
    from bitsandbytes.functional import QuantState

    rows, columns = module.weight.shape
    blocks = -(-rows * columns // NF4_BLOCK)
    packed = torch.empty((-(-rows * columns // 2), 1), dtype=torch.uint8)
    inner = QuantState(
        absmax=torch.empty(-(-blocks // NF4_SUPERBLOCK)),
        code=torch.empty(256),
        blocksize=NF4_SUPERBLOCK,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=module.compute_dtype,
        offset=torch.empty(()),
        state2=inner,
    )
    # A Params4bit cannot hold a fake tensor; an ordinary parameter that knows its quant_state serves.
    weight: Any = torch.nn.Parameter(packed, requires_grad=False)
    weight.quant_state, weight.bnb_quantized = state, True
    module._parameters["weight"], module.quant_state = weight, state
    return [weight, state.absmax, state.code, state.offset, inner.absmax, inner.code]

"""The trained model as fake tensors: shapes and types without memory, so that 70B parameters fit anywhere."""

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import dora

from sft_play.config.schema import LoraSettings
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.architecture.shape import decoder_layers, empty_model, setting, without_weights
from sft_play.model.attention import varlen
from sft_play.model.attention.choice import calls_ours
from sft_play.model.build import freeze_what_gets_no_gradient
from sft_play.model.layers import own_passes
from sft_play.model.layers.cpu import keep_differentiable
from sft_play.model.weights.four_bit import NF4_BLOCK, NF4_SUPERBLOCK, nf4
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.layers import choose_layers
from sft_play.timeline import WHOLE_MODEL
from sft_play.upstream.patching import patched
from sft_play.upstream.transformers import decayed, quantize_layers
from sft_play.vision.looks import trained_parts
from sft_play.vision.models import attention_by_part

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

PLAIN_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")  # of a module, with no number of a layer
BESIDE_BASE = re.compile(r"\.lora_|\.trainable_tokens_|\.modules_to_save\.")  # in the names of PEFT's modules
MOST_MADE = 8  # models without weights, each of megabytes
MAX_LAYER_KINDS = 4  # with more kinds than this, layers are distinguished only by their parameters


def skeleton(
    config: "PretrainedConfig", spec: StepSpec, *, all_layers: bool
) -> tuple["PreTrainedModel", tuple[int, ...]]:
    """The base model on the meta device, with few decoder layers unless `all_layers`.

    For QLoRA, linear layers are replaced as bitsandbytes replaces them.

    Returns:
        The model, and for each layer of the full-depth model the layer that represents it; none if all layers
        are there, which then need not be told apart.
    """
    varlen.register()
    dtype = getattr(torch, spec.precision.dtype)
    cut = not (all_layers or names_layers(spec.lora))
    settings = dtype, _attention_to_trace(config, spec), cut, cut and spec.activations.apart > 0
    model, stand_ins = few_layers(_without_idle_window(config, spec), *settings)
    if spec.mode == "qlora":
        with without_weights():
            quantize_layers(model, nf4(config, dtype))
            keep_differentiable(model)
    own_passes.replace_forwards(model, spec.kernels.layers)
    model.config.use_cache = False
    return model, stand_ins


def few_layers(
    config: "PretrainedConfig", dtype: torch.dtype, attention: str, cut: bool, all_differ: bool
) -> tuple[Any, tuple[int, ...]]:
    """A model as transformers makes it, and its stand-ins: those of all layers if it is `cut` to few.

    To make 80 layers, and compare them, takes a third of a trace: the last models are kept, and copied.
    """
    key = config.to_json_string(use_diff=False), dtype, attention, cut, all_differ
    if key not in _MADE:
        by_part = attention_by_part(config, attention)
        model: Any = empty_model(config, dtype=dtype, attn_implementation=by_part)
        stand_ins = keep_one_of_each_kind(model, all_differ) if cut else ()
        if len(_MADE) >= MOST_MADE:
            _MADE.clear()
        _MADE[key] = model, stand_ins
    return copy.deepcopy(_MADE[key])


_MADE: dict[tuple[Any, ...], tuple[Any, tuple[int, ...]]] = {}  # what `few_layers` has made


def _without_idle_window(config: "PretrainedConfig", spec: StepSpec) -> "PretrainedConfig":
    """A copy whose window masks nothing in the trace if it masks nothing in the step."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    window = setting(text, "sliding_window")
    if spec.joined and window is not None and window >= spec.longest_sequence:
        text.sliding_window = max(window, spec.tokens, math.prod(spec.evaluated.shape))
    return config


def _attention_to_trace(config: "PretrainedConfig", spec: StepSpec) -> str:
    """Our implementation stands for all fused kernels: memory is the same, and no package is needed."""
    takes_ours = spec.kernels.attention != "eager" and calls_ours(config)
    return varlen.LIBRARY_NAME if takes_ours else spec.kernels.attention


def layers_told_apart(model: "PreTrainedModel", stand_ins: Sequence[int]) -> torch.nn.ModuleList:
    """The decoder layers that a trace tells apart because they stand for others; none if all are traced."""
    return decoder_layers(model)[2] if stand_ins else torch.nn.ModuleList()


def layer_kinds(layers: torch.nn.ModuleList) -> list[int]:
    """A number for each layer; layers with equal numbers allocate the same."""

    def shapes_and_settings(layer: torch.nn.Module) -> tuple:
        return layer_shapes(layer), tuple(_settings(layer))

    for describe in (shapes_and_settings, layer_shapes):
        descriptions = [describe(layer) for layer in layers]
        kinds = list(dict.fromkeys(descriptions))
        if len(kinds) <= MAX_LAYER_KINDS:
            break
    return [kinds.index(description) for description in descriptions]


def layer_shapes(layer: torch.nn.Module) -> tuple:
    """Names, shapes and types of a layer's parameters."""
    return tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())


def _settings(layer: torch.nn.Module) -> Iterator[tuple[str, str, str, Any]]:
    """Settings of the layer's modules, such as a sliding window, without the layer's own index."""
    for path, module in layer.named_modules():
        for name, value in sorted(vars(module).items()):
            is_index = any(part in name for part in ("idx", "layer_id", "layer_number"))
            if isinstance(value, (bool, int, str)) and not is_index:
                yield path, type(module).__name__, name, value


def keep_one_of_each_kind(model: "PreTrainedModel", all_differ: bool) -> tuple[int, ...]:
    """Drops layers that need no trace, also from the config's per-layer lists; returns the stand-ins."""
    owner, name, layers = decoder_layers(model)
    kept, stand_ins = choose_layers(range(len(layers)) if all_differ else layer_kinds(layers))
    setattr(owner, name, torch.nn.ModuleList(layers[index] for index in kept))
    count = len(layers)
    configs = [getattr(module, "config", None) for module in model.modules()]
    for config in {id(config): config for config in configs if config is not None}.values():
        if getattr(config, "num_hidden_layers", None) == count:
            for key, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == count:
                    setattr(config, key, [value[index] for index in kept])
            config.num_hidden_layers = len(kept)
    return stand_ins


def attach(model: "PreTrainedModel", spec: StepSpec) -> "PreTrainedModel | PeftModel":
    """The model with its adapters on the meta device, in fp32 as the trainer has them."""
    if spec.mode == "full":
        return model
    embedding: Any = model.get_input_embeddings()
    rows = len(embedding.weight)
    new_ids = range(rows - spec.new_tokens, rows)  # which rows they are does not matter
    with without_weights(), unpacking_for_dora():
        adapted = attach_adapter(
            model,
            spec.lora,
            autocast=spec.precision.autocast != "no",
            new_ids=new_ids,
            seeing=trained_parts(model.config, spec.vision),
        )
    if spec.cast_adapters:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, spec.precision.dtype))
    return adapted


def trained_elements(config: "PretrainedConfig", spec: StepSpec) -> list[list[int]]:
    """Elements of the trained parameters of each of the optimizer's groups, in its order, of all layers.

    transformers' trainer has two groups, with weight decay and without, and LoRA+ those of the B matrices.
    """
    base, stand_ins = skeleton(config, spec, all_layers=False)
    model: Any = attach(base, spec)
    if spec.mode == "full":
        freeze_what_gets_no_gradient(base, trained_parts(config, spec.vision))
    owners = layer_of_modules(model, layers_told_apart(base, stand_ins))
    owner_of = {weight: owners[module] for module in owners for weight in module.parameters(recurse=False)}
    decay = decayed(model)
    splits_rates = spec.lora.plus_ratio is not None
    keys = product((False, True) if splits_rates else (False,), (True, False))
    groups: dict[tuple[bool, bool], list[int]] = {key: [] for key in keys}
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    for owner, named in groupby(trained, key=lambda pair: owner_of[pair[1]] != WHOLE_MODEL):
        own = list(named)
        for stand_in in stand_ins if owner else (WHOLE_MODEL,):
            for name, weight in own:
                if owner_of[weight] == stand_in:
                    groups[splits_rates and "lora_B" in name, name in decay].append(weight.numel())
    return [group for group in groups.values() if group]


def names_layers(lora: LoraSettings) -> bool:
    """Whether a pattern may tell layers apart, whose numbers change when layers are dropped."""
    return not all(map(PLAIN_NAME.fullmatch, (*lora.rank_pattern, *lora.alpha_pattern)))


def layer_of_modules(model: torch.nn.Module, layers: torch.nn.ModuleList) -> dict[torch.nn.Module, int]:
    """The decoder layer that each module belongs to; `WHOLE_MODEL` for modules outside the layers."""
    owners = dict.fromkeys(model.modules(), WHOLE_MODEL)
    for index, layer in enumerate(layers):
        owners.update(dict.fromkeys(layer.modules(), index))
    return owners


def materialise(model: torch.nn.Module, layers: torch.nn.ModuleList, recorder: AllocationRecorder) -> None:
    """Replaces meta tensors with fake ones and records them layer by layer; runs in a `FakeTensorMode`.

    First the weights, in the alphabetical order in which transformers loads them, then the adapters.
    """
    made: dict[int, torch.nn.Parameter] = {}  # keeps tied weights tied
    modules: dict[tuple[str, int], list[torch.nn.Module]] = defaultdict(list)
    owners = layer_of_modules(model, layers)
    for path, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        modules["adapters" if BESIDE_BASE.search(path) else "weights", owners[module]].append(module)
    for term, owner in product(("weights", "adapters"), (WHOLE_MODEL, *range(len(layers)))):
        recorder.begin("load", owner)
        for module in modules[term, owner]:
            _materialise_module(module, term, made, recorder)
    recorder.begin("load")


def _materialise_module(
    module: torch.nn.Module, term: str, made: dict[int, torch.nn.Parameter], recorder: AllocationRecorder
) -> None:
    from bitsandbytes.nn import Linear4bit

    packed = four_bit_tensors(module) if isinstance(module, Linear4bit) else ()
    for tensor, stays in packed:  # the others live until this returns
        recorder.add(tensor, term if stays else "temporaries")
    for tensor in plain_tensors(module, made):
        recorder.add(tensor, term)


def plain_tensors(module: torch.nn.Module, made: dict[int, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Replaces the module's own meta parameters and buffers, of any shape, with fake ones; yields these."""
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if parameter.device.type != "meta":
            continue
        if id(parameter) not in made:
            data = torch.empty(parameter.shape, dtype=parameter.dtype)
            made[id(parameter)] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        setattr(module, name, made[id(parameter)])
        yield made[id(parameter)]
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        made_buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
        setattr(module, name, made_buffer)
        yield made_buffer


def unpacking_for_dora() -> AbstractContextManager[None]:
    """In the block, DoRA reads the weight of a Linear4bit, [rows, columns], also where it is not packed yet.

    PEFT unpacks only a Params4bit, which cannot hold a fake tensor, and has no values on the meta device.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    def unpacked(layer: Any) -> torch.Tensor:
        if not isinstance(layer, Linear4bit):
            return layer.weight  # type: ignore[no-any-return]
        if layer.weight.device.type == "meta":
            return layer.weight.new_empty(layer.weight.shape, dtype=layer.compute_dtype)
        return dequantize_4bit(layer.weight.data, layer.quant_state)

    return patched(dora, "dequantize_module_weight", unpacked)


def four_bit_tensors(module: Any) -> list[tuple[torch.Tensor, bool]]:
    """Packs the weight of a Linear4bit as bitsandbytes does (`quantize_4bit`).

    A weight of [rows, columns] becomes bytes of two values each, [rows * columns / 2, 1], with an 8-bit scale
    for each 64 values, a 32-bit scale for each 256 of these scales, and two code tables.

    Returns:
        The tensors in the order in which they are allocated, and whether they stay: the 16-bit weight, and
        the 32-bit scales before and after their mean was subtracted, are there only while it is packed.
    """
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
    # A Params4bit cannot hold a fake tensor, but an ordinary parameter with a quant_state works too.
    weight: Any = torch.nn.Parameter(packed, requires_grad=False)
    weight.quant_state, weight.bnb_quantized = state, True
    module.weight, module.quant_state = weight, state
    original = packed.new_empty((rows, columns), dtype=module.compute_dtype)
    scales, centred = torch.empty(blocks), torch.empty(blocks)
    before = [(original, False), (scales, False), (weight, True), (state.code, True), (state.offset, True)]
    return [*before, (centred, False), (inner.absmax, True), (state.absmax, True), (inner.code, True)]

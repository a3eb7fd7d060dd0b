"""What config.json alone tells: whether a model can be trained here, its sizes, its shape without weights."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, __version__
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.config.values import modules_of
from sft_play.data.limits import ROW_SECONDS, TemplateOverrun, within_limits
from sft_play.errors import ConfigError
from sft_play.model.architecture.families import family_of
from sft_play.upstream.patching import lasting
from sft_play.upstream.transformers import classes_by_config, loaded_as, undivided
from sft_play.vision.looks import seeing_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ALLOWED = (
    "SFT-Play trains decoder-only language models "
    "(Llama, Qwen, Gemma, Mistral and others; see docs/reference/models.md)"
)


def require_decoder(config: "PretrainedConfig") -> None:
    """Raises a ConfigError unless a model predicts each token from those before it alone; says what it is."""
    problem = _why_no_decoder(config)
    if problem:
        raise ConfigError(f"model.name: {config.model_type} {problem}; {ALLOWED}")


def _why_no_decoder(config: "PretrainedConfig") -> str | None:
    family = family_of(config)
    if config.is_encoder_decoder:
        return "is an encoder-decoder"
    if family.refused:
        return family.refused
    text = config.get_text_config()  # of which some encoder-decoders have two
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or family.reads_both_ways
    if is_encoder and not getattr(config, "is_decoder", False):
        return "reads text in both directions, so each token would see what it has to predict"

    if getattr(config, "vision_config", None) is not None and text is config:
        return "describes images, and its text part is not a model of its own"
    if not isinstance(getattr(text, "hidden_size", None), int):
        return "has no single width, so it is not a plain decoder"
    know_multimodal(config)
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in classes_by_config(AutoModelForCausalLM) and not has_own_code:
        return f"is not a language model that transformers {__version__} knows"
    return None


def know_multimodal(config: "PretrainedConfig") -> None:
    """Lets `AutoModelForCausalLM` build a model that sees too, whose text part is trained.

    For some of them transformers itself does so (Gemma 3, Llama 4), for others not (Qwen-VL, Mistral 3). Of
    Qwen3.5 it would leave out what sees, which would be missing from what is saved.
    """
    kind, known = type(config), classes_by_config(AutoModelForCausalLM)
    multimodal = classes_by_config(AutoModelForImageTextToText)
    if family_of(config).text_alone:
        lasting(loaded_as, AutoModelForCausalLM, kind, known[type(config.get_text_config())])
    elif kind in multimodal and (kind not in known or seeing_parts(config)):
        lasting(loaded_as, AutoModelForCausalLM, kind, multimodal[kind])


def class_to_name(config: "PretrainedConfig") -> str | None:
    """The class that loads the model as it is trained here; None if `AutoModelForCausalLM` takes it."""
    found: Any = classes_by_config(AutoModelForCausalLM).get(type(config), None)
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return None if found is None or found.__name__ == usual else found.__name__


SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
MOST, MOST_LAYERS = 2**28, 2_000  # far above any published model


def require_few_layers(tree: Mapping[str, Any], name: str) -> None:
    """Raises a ConfigError if config.json has too many layers: architectures make a list of them at once."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            require_few_layers(value, name)
        elif "layer" in str(key) and isinstance(value, int) and value > MOST_LAYERS:
            raise _wrong(name, f"{key} is {value:.3g}; expected at most {MOST_LAYERS:,}")


def require_sound_sizes(config: "PretrainedConfig", name: str) -> None:
    """Raises a ConfigError if a size is no number in a sensible range, or attention heads do not divide."""
    text = config.get_text_config()
    found = {size: setting(text, size) for size in SIZES}
    # some architectures have one size per layer, and leave out what does not apply to them
    sizes = {size: value for size, value in found.items() if not isinstance(value, (list, tuple, NoneType))}
    for size, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
            raise _wrong(name, f"{size} is {value!r:.40}; expected a whole number from 1 to {MOST:,}")
    hidden, heads, groups = map(sizes.get, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if hidden and heads and not sizes.get("head_dim") and hidden % heads:
        raise _wrong(name, f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if heads and groups and heads % groups:
        raise _wrong(name, f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")


def setting(text: "PretrainedConfig", name: str) -> Any:
    """A setting of the text part; None if it has none, or one per layer (Gemma 4's head_dim)."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"model.name: config.json of '{name}': {what}\ndownload or save the model again")


@contextmanager
def without_weights() -> Iterator[None]:
    """What is built in the block is on the meta device: shapes and types, with nothing drawn or stored."""
    with torch.device("meta"), no_init_weights():
        yield


def empty_model(config: "PretrainedConfig", **settings: object) -> "PreTrainedModel":
    """The model of an architecture without weights, on the meta device, with settings of `from_config`."""
    with without_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **settings)
    model.tie_weights()  # left out with the initialization
    return model


def base_of(model: Any) -> Any:
    """The model itself: what an adapter is around, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: Any) -> tuple[torch.nn.Module, str, torch.nn.ModuleList]:
    """The module that holds the list of decoder layers, the list's attribute name, and the list itself.

    The model may have an adapter around it.

    It is as long as the config says, or of what transformers never splits over devices: some configs count
    attention (LongCat Flash), or how often layers run (HRM).

    Raises:
        LookupError: there is no such list.
    """
    model = base_of(model)
    count, unsplit = model.config.get_text_config().num_hidden_layers, undivided(model)
    lists = [
        (module, name, child)
        for module in model.get_decoder().modules()
        for name, child in module.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) > 0
    ]
    as_long = (found for found in lists if len(found[2]) == count)
    of_layers = (found for found in lists if all(type(each).__name__ in unsplit for each in found[2]))
    found = next(as_long, None) or next(of_layers, None)
    if found is None:
        raise LookupError(f"no list of {count} layers in {type(model).__name__}")
    return found


def units_of(model: Any) -> list[torch.nn.Module]:
    """What a divided model gathers, one at a time, for a forward and a backward pass; the whole model last.

    They are every decoder layer, the embedding, and the rest, which is the final norm and the output head.
    The model may have an adapter around it.

    Raises:
        ConfigError: its decoder layers cannot be found.
    """
    base = base_of(model)
    try:
        layers = decoder_layers(base)[2]
    except LookupError as error:
        raise ConfigError(
            f"model.name: {error}, so it cannot be divided; choose another parallel.engine"
        ) from error
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tied = head is None or getattr(head, "weight", None) is embedding.weight
    # an adapter around the embedding computes with its weight, without calling it
    own = [] if tied or type(embedding) is not torch.nn.Embedding else [embedding]
    return [*layers, *own, model]


@dataclass(frozen=True)
class FlopSizes:
    """The sizes of a model that its arithmetic depends on."""

    matmul_parameters: int  # used by each token: with the output head, and of the experts only active ones
    trained_parameters: int
    layers: int
    attention_width: int  # heads x head_dim


def flops_per_token(sizes: FlopSizes, sequence: int) -> int:
    """FLOPs of a training step per token: weights, attention to half of `sequence`, weight gradients.

    Recomputation does not count, as is usual for MFU. `sequence` is the most tokens that one can attend to.
    """
    forward = 2 * sizes.matmul_parameters + 2 * sequence * sizes.attention_width * sizes.layers
    return 2 * forward + 2 * sizes.trained_parameters


def require_quick_patterns(lora: LoraSettings, names: Iterable[str]) -> None:
    """Raises a ConfigError if a pattern takes long on the names of modules, as with nested repetitions."""
    known = list(names)
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            try:
                within_limits(partial(list, map(modules_of(pattern).match, known)))
            except TemplateOverrun:
                raise ConfigError(
                    f"tuning.lora.{setting}: {pattern!r} takes more than {ROW_SECONDS:g} s on the names of "
                    "the modules; leave out repetitions within repetitions, such as (a+)+"
                ) from None


def _rank(lora: LoraSettings, module: str) -> int:
    from peft.utils.other import get_pattern_key

    return lora.rank_pattern.get(get_pattern_key(list(lora.rank_pattern), module), lora.r)


def flop_sizes(config: "PretrainedConfig", run: RunConfig) -> FlopSizes:
    """The sizes of a model, from its skeleton on the meta device; experts that a token skips do not count."""
    text = config.get_text_config()
    model: Any = empty_model(config)
    head = model.get_output_embeddings().weight
    require_quick_patterns(run.tuning.lora, (name for name, _ in model.named_modules()))
    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    linears = [layer.weight for layer in layers.values()]
    in_linears = sum(weight.numel() for weight in linears) - head.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    body = max(in_linears, parameters - head.numel() - model.get_input_embeddings().weight.numel())
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    active = body * getattr(text, "num_experts_per_tok", 1) / experts if experts else body
    # LoRA's A and B for a weight of [out, in] have r * (out + in) elements.
    adapted = [(name, layer.weight.shape) for name, layer in layers.items() if layer.weight is not head]
    adapter = sum(_rank(run.tuning.lora, name) * sum(shape) for name, shape in adapted)
    return FlopSizes(
        matmul_parameters=int(active) + head.numel(),
        trained_parameters=parameters if run.tuning.mode == "full" else adapter,
        layers=text.num_hidden_layers,
        attention_width=text.hidden_size,
    )

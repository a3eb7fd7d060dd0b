"""What we change in transformers, and take of its private parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from sft_play.upstream.patching import lasting, loaded_within, patched

if TYPE_CHECKING:
    import torch

UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"  # of transformers' own environment variables
# In names of weights that the trainer does not decay.
NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def exports_read_once() -> AbstractContextManager[None]:
    """In the block, an import of transformers reads its models' files once, and looks at their ends alone.

    It looks for their `__all__` from line to line, in 45 MB, and twice, since it remembers no more than 128
    of its folders (5.23): 0.6 s of a plan. What makes this unnecessary: a list of what it exports.
    """
    return loaded_within("transformers.utils.import_utils", _reading_once)


@contextmanager
def _reading_once(module: Any) -> Iterator[None]:
    yield
    names_in = module.fetch__all__
    module.fetch__all__ = lambda text: names_in(text[text.rfind("\n__all__") + 1 :])
    module.create_import_structure_from_path = cache(module.create_import_structure_from_path.__wrapped__)


@contextmanager
def attention_called(names: Sequence[str], function: Callable[..., Any]) -> Iterator[None]:
    """In the block, models find a function by the names that a config has for attention.

    What makes this unnecessary: an `unregister` beside `register`, which keeps functions for all (5.23).
    """
    from transformers import AttentionInterface

    before = dict(AttentionInterface._global_mapping)
    for name in names:
        AttentionInterface.register(name, function)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before)


def grouping(rewrite: Callable[[Mapping[str, Any]], dict[str, Any]]) -> AbstractContextManager[None]:
    """In the block, trackers show records under the names that `rewrite` gives them.

    Its own are "eval", and "train" for all the rest, also for what has a group ("speed/mfu"; 5.23). What
    makes this unnecessary: callbacks that leave names with a group alone.
    """
    from transformers.integrations import integration_utils

    return patched(integration_utils, "rewrite_logs", rewrite)


def bars_left_out() -> AbstractContextManager[None]:
    """In the block, transformers draws no bars, which a notebook keeps; those of downloads stay.

    What makes this unnecessary: a switch that is not for downloads too (5.23).
    """
    from transformers.utils import logging

    return patched(logging, "_tqdm_active", False)


def compiled_template(text: str) -> Any:
    """The Jinja template that transformers (since 4.42) renders a chat template by, whose globals we change.

    It is kept for all that render the same text. What makes this unnecessary: globals as an argument of
    `apply_chat_template`.

    Raises:
        TemplateError, SyntaxError: it is broken.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    lasting(_templates_compiled_anew)
    return _compile_jinja_template(text)


@contextmanager
def _templates_compiled_anew() -> Iterator[None]:
    """After the block, chat templates are compiled again, so that none has what we have put into it."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        yield
    finally:
        _compile_jinja_template.cache_clear()


def classes_by_config(auto: Any) -> Any:
    """The mapping of an auto class, config class -> model class (or several).

    What makes this unnecessary: a public name (5.23 has none).
    """
    return auto._model_mapping


@contextmanager
def loaded_as(auto: Any, config_class: type, model_class: type) -> Iterator[None]:
    """In the block, an auto class makes this model from such a config, as its `register` does for good.

    What makes this unnecessary: a way to take back what was registered (5.23 has none), and 5.23 as the
    oldest version: 5.17 registers no config of its own.
    """
    known = auto._model_mapping
    before = dict(known._extra_content)
    known._extra_content[config_class] = model_class
    try:
        yield
    finally:
        known._extra_content.clear()
        known._extra_content.update(before)


def class_since(release: str, name: str) -> Any:
    """A class of transformers that does what we need since this release.

    ImportError, a sentence, with an older one. What makes this unnecessary: 5.21 as the oldest version.
    """
    import transformers

    if Version(transformers.__version__) < Version(release):
        raise ImportError(f"it needs transformers {release} (found {transformers.__version__})")
    return getattr(transformers, name)


def undivided(model: Any) -> Sequence[str]:
    """Names of the classes of a model's layers, each of which stays on one device.

    What makes this unnecessary: a public name (5.23 has none).
    """
    return model._no_split_modules or ()


def types_apart(model: Any, dtype: "torch.dtype") -> dict[str, "torch.dtype"]:
    """The types of weights, by pattern of name, that a model has other than `dtype` when it is loaded so.

    What makes this unnecessary: a public name (5.23 has none).
    """
    return model._get_dtype_plan(dtype)


def decayed(model: Any) -> set[str]:
    """Names of the weights that the trainer decays.

    As its `get_decay_parameter_names` finds them, with which datasets would be imported: half a second of a
    plan. What makes this unnecessary: a function for it outside of the trainer (5.23 has none).
    """
    from torch.nn import LayerNorm
    from transformers.trainer_pt_utils import get_parameter_names

    return set(get_parameter_names(model, [LayerNorm], NOT_DECAYED))


def has_routers(model: Any) -> bool:
    """Whether any of a model's layers is one whose router logits transformers would record.

    What makes this unnecessary: a model that says whether it has routers (5.23 does not).
    """
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    found = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    routers = [router for each in found for router in (each if isinstance(each, list) else [each])]
    classes = tuple(getattr(router, "target_class", router) for router in routers)
    return not classes or any(isinstance(module, classes) for module in model.modules())


def supports(model_class: object, what: Literal["sdpa", "flash_attn", "attention_backend"]) -> bool | None:
    """Whether models of a class can have PyTorch's attention, FlashAttention, or any that is registered.

    None: its transformers does not say. What makes this unnecessary: public names for it (5.23 has none).
    """
    return getattr(model_class, f"_supports_{what}", None)


def recompute_by(layer: Any, function: Callable[..., Any]) -> None:
    """Lets a layer that is recomputed be so by a function like `torch.utils.checkpoint.checkpoint`.

    What makes this unnecessary: a function as an argument of `gradient_checkpointing_enable` (5.23: none).
    """
    layer._gradient_checkpointing_func = function


def recomputed(layer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the place of a layer's forward pass, recomputed as the layer would be.

    What makes this unnecessary: a public name of the function that the layer calls (5.23 has none).
    """
    return layer._gradient_checkpointing_func(function, *args)


def quantize_layers(model: Any, settings: Any) -> None:
    """Replaces the linear layers of a model on the meta device as loading it with these settings does.

    The config's mark is for FalconMamba's forward pass, which reads it. What makes this unnecessary: a way to
    build a quantized model from its config alone (5.23 has none).
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    AutoHfQuantizer.from_config(settings).preprocess_model(model, device_map=None)
    model.is_loaded_in_4bit = model.config._is_quantized = True


def joins_weights(model: Any) -> bool:
    """Whether weights of a loaded model are made of several in its files.

    What makes this unnecessary: a public name for how they were made (5.23 has none).
    """
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(each, WeightConverter) for each in model._weight_conversions)


@contextmanager
def saved_as_it_is(model: object) -> Iterator[None]:
    """In the block, a whole model's `save_pretrained` writes weights by the names and shapes that it has.

    Files of some models have others, as all of Gemma 3 and the experts of a mixture. An engine that divides
    weights reads those of a checkpoint one parameter at a time, by its name. What makes this unnecessary: a
    setting of the trainer for this argument of `save_pretrained` (5.23 has none).
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        yield
        return
    with patched(model, "save_pretrained", partial(model.save_pretrained, save_original_format=False)):
        yield


@contextmanager
def loaded_as_saved(model: object) -> Iterator[None]:
    """In the block, a model's `load_state_dict` takes weights by the names and shapes that its files have.

    The trainer leaves out what files call otherwise, as all of Gemma 3 and the experts of a mixture, and goes
    on from what was there (5.23). What makes this unnecessary: a trainer that converts what it loads.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not model._weight_conversions:
        yield
        return

    kind: Any = type(model)

    def load(weights: dict[str, Any], strict: bool = True) -> Any:
        settings = {"config": model.config, "dtype": model.dtype, "output_loading_info": True}
        with_info: Any = kind.from_pretrained(None, state_dict=weights, **settings)
        made, info = with_info
        missing = info["missing_keys"]
        found = {name: weight for name, weight in made.state_dict().items() if name not in missing}
        return kind.load_state_dict(model, found, strict)

    with patched(model, "load_state_dict", load):
        yield


def save_from(model: Any, weights: Any) -> None:
    """Lets `save_pretrained` take `weights`, by name, when it writes the file that they belong to.

    It does so for weights that accelerate has offloaded, and knows these by what is set here (5.23). What
    makes this unnecessary: a `state_dict` that is read file by file.
    """
    model._hf_hook = SimpleNamespace(weights_map=weights)
    model.hf_device_map = {"": "disk"}


def deepstack_added_by(text: Any, function: Callable[..., Any]) -> None:
    """Lets a decoder of Qwen3-VL add the features of pictures to its first layers' results by this function.

    Its own way makes tensors whose sizes depend on data, which no trace can follow (5.23). What makes this
    unnecessary: a `masked_scatter` there.
    """
    text._deepstack_process = function


def features_made_by(model: Any, function: Callable[..., Any]) -> None:
    """Lets a model of Idefics3's kind make the features of tiles by this function of itself and them.

    Its own drops tiles that are zeros, for which it looks into data (5.23). What makes this unnecessary: a
    way to say that all are to be seen.
    """
    model.get_image_features = MethodType(function, model)


def features_unchecked() -> AbstractContextManager[None]:
    """In the block, nobody counts image tokens to compare them with features.

    A trace has no tokens to count (5.23). What makes this unnecessary: a check that skips fake tensors.
    """
    from accelerate.utils import patch_environment

    return patch_environment(**{UNCHECKED: "1"})

"""What we change in transformers, and take of its private parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from sft_play.upstream.patching import lasting, patched

if TYPE_CHECKING:
    import torch


@contextmanager
def attention_called(names: Sequence[str], function: Callable[..., Any]) -> Iterator[None]:
    """In the block, models find a function by the names that a config has for attention.

    What makes this unnecessary: an `unregister` beside `register`, which keeps functions for all models.
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

    Its own are "eval", and "train" for all the rest, also for what has a group ("speed/mfu"). What makes this
    unnecessary: callbacks that leave names with a group alone.
    """
    from transformers.integrations import integration_utils

    return patched(integration_utils, "rewrite_logs", rewrite)


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
    """The mapping of an auto class, config class -> model class (or several), which has no public name."""
    return auto._model_mapping


@contextmanager
def loaded_as(auto: Any, config_class: type, model_class: type) -> Iterator[None]:
    """In the block, an auto class makes this model from such a config, as its `register` does for good."""
    known = auto._model_mapping
    before = dict(known._extra_content)
    known.register(config_class, model_class, exist_ok=True)
    try:
        yield
    finally:
        known._extra_content.clear()
        known._extra_content.update(before)


def undivided(model: Any) -> Sequence[str]:
    """Names of the classes of a model's layers, each of which stays on one device."""
    return model._no_split_modules or ()


def types_apart(model: Any, dtype: "torch.dtype") -> dict[str, "torch.dtype"]:
    """The types of weights, by pattern of name, that a model has other than `dtype` when it is loaded so."""
    return model._get_dtype_plan(dtype)


def has_routers(model: Any) -> bool:
    """Whether any of a model's layers is one whose router logits transformers would record."""
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    found = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    routers = [router for each in found for router in (each if isinstance(each, list) else [each])]
    classes = tuple(getattr(router, "target_class", router) for router in routers)
    return not classes or any(isinstance(module, classes) for module in model.modules())

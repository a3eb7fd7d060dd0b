"""Adapters: attached to a base model for training, or read from a finished run."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from sft_play.config.schema import LoraSettings
from sft_play.errors import CheckpointError, ConfigError
from sft_play.model.decomposition import take_out_start
from sft_play.model.targets import Targets, auto_targets, kept_by_peft, text_prefix

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

SHOWN = 3  # names in a message
# What PEFT and safetensors raise for a broken one.
NOT_AN_ADAPTER = (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError)


def lora_config(lora: LoraSettings, model: "PreTrainedModel") -> "LoraConfig":
    """PEFT's config of the adapter.

    Raises:
        ConfigError: a setting does not work with fused experts.
    """
    from peft import LoraConfig

    auto = lora.target_modules == "auto"
    targets = auto_targets(model) if auto else Targets(tuple(lora.target_modules), ())
    if targets.experts and (lora.dropout or lora.use_dora or lora.init != "default"):
        setting = "use_dora=true" if lora.use_dora else f"dropout={lora.dropout}"
        setting = setting if lora.init == "default" else f"init={lora.init}"
        raise ConfigError(
            f"tuning.lora.{setting} does not work with the fused experts of {type(model).__name__}: leave it "
            "out, or list the other layers in tuning.lora.target_modules"
        )
    prefix = text_prefix(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float works too
        lora_dropout=lora.dropout,
        target_modules=list(targets.modules),
        target_parameters=list(targets.experts) or None,
        exclude_modules=f"(?!{re.escape(prefix)}\\.).*" if prefix and not auto else None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )
    if targets.experts:
        config.target_modules = kept_by_peft(config, model)
    return config


def attach_adapter(
    model: "PreTrainedModel", lora: LoraSettings, *, autocast: bool = False, start: Path | None = None
) -> "PeftModel":
    """Freezes the model and adds LoRA layers, fp32 on a 16-bit or 4-bit base (PEFT's default).

    Args:
        model: the base model.
        lora: the adapter's settings.
        autocast: every forward pass will run under autocast.
        start: file with what the adapters of a resumed run started from, if that is a part of the weights.

    Raises:
        CheckpointError: that file does not fit the model.
        ConfigError: target_modules or patterns match nothing in this model, or an embedding or the output
            head; the message says what would do.
    """
    from peft import get_peft_model

    outer = [model.get_input_embeddings(), model.get_output_embeddings()]
    try:
        adapted = get_peft_model(model, lora_config(lora, model))
    except ValueError as error:
        linear = sorted(
            {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if "Linear" in type(module).__name__
            }
        )
        raise ConfigError(
            f"tuning.lora.target_modules={lora.target_modules}: {str(error).splitlines()[0]}\n"
            f"linear layers of this model: {', '.join(linear)}; or use target_modules: auto"
        ) from error
    require_inner_layers(adapted, outer)  # type: ignore[arg-type]  # not a mixed model
    require_matches(adapted, lora)  # type: ignore[arg-type]
    if lora.init != "default":
        take_out_start(adapted, lora, start)  # type: ignore[arg-type]
    if autocast and not lora.use_dora:  # DoRA computes the norms of weights in the type of its input
        leave_types_to_autocast(adapted)
    return adapted  # type: ignore[return-value]


def require_inner_layers(model: "PeftModel", outer: list[Any]) -> None:
    """Checks that no adapter is on an embedding or on the output head.

    The loss is computed from the weights of the head alone, in tiles, so an adapter there would be ignored.

    Args:
        model: with its adapters.
        outer: input embedding and output head of the base.

    Raises:
        ConfigError: an adapter is on one of them; names it.
    """
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, torch.nn.Embedding) or any(base is layer for layer in outer if base is not None):
            raise ConfigError(
                f"tuning.lora.target_modules: {name.rpartition('.')[2]} is an embedding or the output head, "
                "which cannot have an adapter here; use linear layers inside the decoder layers, or auto"
            )


def require_matches(model: "PeftModel", lora: LoraSettings) -> None:
    """Checks that each pattern matches a module with an adapter; PEFT would only warn.

    Raises:
        ConfigError: one does not; names it and the modules.
    """
    from peft.utils.other import get_pattern_key

    tuner: Any = model.base_model
    adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        unused = [key for key in patterns if not any(get_pattern_key([key], name) == key for name in adapted)]
        if unused:
            ends = sorted({name.rpartition(".")[2] for name in adapted})
            raise ConfigError(
                f"tuning.lora.{setting}: {', '.join(unused)} matches no module that has an adapter; these "
                f"have: {', '.join(ends)}, as in {adapted[0]}"
            )


def leave_types_to_autocast(model: "PeftModel") -> None:
    """Gives adapters the inputs of their layers as they are, for forward passes under autocast.

    PEFT converts an input to the type of the adapter, fp32, and autocast converts it back: one more 16-bit
    copy of each layer's input that is kept for the backward pass. The values are the same.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def require_fitting(empty: "PreTrainedModel", folder: Path) -> None:
    """Checks, before any base weights are loaded, that an adapter is whole and one for this base.

    PEFT would start missing weights from scratch and leave out unexpected ones.

    Args:
        empty: the base on the meta device, without weights.
        folder: of the adapter.

    Raises:
        CheckpointError: the adapter is not one for this base, or not whole.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    try:
        with torch.device("meta"):
            model = PeftModel(empty, PeftConfig.from_pretrained(str(folder)))
        with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except NOT_AN_ADAPTER as error:
        raise _unfit(folder, error) from error
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name: tuple(weight.shape) for name, weight in weights.items()}
    other = [
        f"{name} {found[name]} instead of {expected[name]}"
        for name in found.keys() & expected.keys()
        if found[name] != expected[name]
    ]
    problems = (
        _listed("missing", expected.keys() - found.keys())
        + _listed("unexpected", found.keys() - expected.keys())
        + _listed("of another shape:", other)
    )
    if problems:
        raise CheckpointError(
            f"the adapter in {folder} does not fit the model: {problems}use the config that it was "
            "trained with, restore the folder, or train again with `make train`"
        )


def load_adapter(base: "PreTrainedModel", folder: Path) -> "PeftModel":
    """The base with the adapter of a finished run, for which `require_fitting` was called.

    Raises:
        CheckpointError: the adapter cannot be loaded.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, str(folder))
    except NOT_AN_ADAPTER as error:
        raise _unfit(folder, error) from error


def _unfit(folder: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(
        f"the adapter in {folder} does not fit the model: {reason}\n"
        "Use the config that it was trained with, or train again with `make train`"
    )


def _listed(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(sorted(names)[:SHOWN])}{more}; "

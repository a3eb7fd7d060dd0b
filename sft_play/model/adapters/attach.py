"""Adapters: attached to a base model for training, or read from a finished run."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils.other import ModulesToSaveWrapper, get_pattern_key
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from sft_play.config.schema import LoraSettings
from sft_play.errors import CheckpointError, ConfigError
from sft_play.model.adapters import passes
from sft_play.model.adapters.decomposition import take_out_start
from sft_play.model.adapters.targets import (
    Targets,
    auto_targets,
    is_within,
    kept_by_peft,
    modules_to_save,
    parts_within,
)
from sft_play.model.architecture.shape import require_quick_patterns, without_weights
from sft_play.model.new_tokens import complete_wrappers, name_of, require_wrapped, trained_rows
from sft_play.model.placement import places_for_adapter
from sft_play.spelling import make
from sft_play.units import listed

SHOWN = 3  # names in a message
PEFTS_OWN = re.compile(r"\.lora_|\.base_layer$")  # layers within a layer with an adapter
OF_TARGETS = re.compile(r"(?i)target|module '")  # in the messages of PEFT's errors about target_modules
LAYERS_WITHIN = re.compile(r"\(\n.*\n\)", re.DOTALL)  # of a module that they show, line by line
# What PEFT and safetensors raise for a broken one.
NOT_AN_ADAPTER = (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError)


def lora_config(
    lora: LoraSettings, model: PreTrainedModel, new_ids: Sequence[int] = (), seeing: Sequence[str] = ()
) -> LoraConfig:
    """PEFT's config of the adapter, which has layers of the text part, and of `seeing` modules.

    Raises:
        ConfigError: a setting does not work with fused experts, contradicts modules_to_save, or is a pattern
            that takes too long.
    """
    require_quick_patterns(lora, (name for name, _ in model.named_modules()))
    besides = _also_trained(lora, model, new_ids)
    targets = _targets(lora, model, besides["modules_to_save"] or [], seeing)
    if targets.experts and (lora.dropout or lora.use_dora or lora.init != "default"):
        setting = "use_dora=true" if lora.use_dora else f"dropout={lora.dropout}"
        setting = setting if lora.init == "default" else f"init={lora.init}"
        raise ConfigError(
            f"tuning.lora.{setting} does not work with the fused experts of {type(model).__name__}: leave it "
            "out, or list the other layers in tuning.lora.target_modules"
        )
    begins = "|".join(map(re.escape, parts_within(model, seeing))) if lora.target_modules != "auto" else ""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float works too
        lora_dropout=lora.dropout,
        target_modules=list(targets.modules),
        target_parameters=list(targets.experts) or None,
        exclude_modules=f"(?!{begins}).*" if begins else None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        **besides,
    )
    if targets.experts:
        config.target_modules = kept_by_peft(config, model)
    return config


def _targets(
    lora: LoraSettings, model: PreTrainedModel, whole: Sequence[str], seeing: Sequence[str]
) -> Targets:
    """What gets an adapter, apart from the modules that are trained whole."""
    if lora.target_modules == "auto":
        targets = auto_targets(model, whole, seeing)
        if not targets.modules and not targets.experts:
            raise ConfigError(
                f"tuning.lora.modules_to_save: {', '.join(whole)} holds every layer that could be adapted; "
                "name modules within it, or set tuning.mode=full"
            )
        return targets
    _require_inner_layers(model, lora.target_modules)
    names = (name for name, _ in model.named_modules() if name.rpartition(".")[2] in lora.target_modules)
    if both := next((name for name in names if is_within(name, whole)), None):
        raise ConfigError(
            f"tuning.lora.modules_to_save trains {both} in full, and tuning.lora.target_modules gives it an "
            "adapter; leave it out of one of them"
        )
    return Targets(tuple(lora.target_modules), ())


def _require_inner_layers(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Checks that no target is an embedding or the output head.

    The loss is computed from the weights of the head alone, in tiles, so an adapter there would be ignored.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_outer = module is head or isinstance(module, torch.nn.Embedding)
        if is_outer and any(f".{name}".endswith(f".{target}") for target in targets):
            raise ConfigError(
                f"tuning.lora.target_modules: {name.rpartition('.')[2]} is an embedding or the output head, "
                "which cannot have an adapter here; use linear layers inside the decoder layers, or auto"
            )


def _also_trained(lora: LoraSettings, model: PreTrainedModel, new_ids: Sequence[int]) -> dict[str, Any]:
    """PEFT's settings for what is trained beside the adapters."""
    whole, rows = modules_to_save(model, lora.modules_to_save), trained_rows(model, new_ids)
    found: dict[str, Any] = {"modules_to_save": whole or None, "trainable_token_indices": rows}
    if not whole:
        return found
    outer = {name_of(model, layer) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    both = sorted(outer.intersection(whole))
    if both and rows:
        raise ConfigError(
            f"tuning.lora.modules_to_save trains {both[0]} in full, and model.new_tokens trains single rows "
            "of the embedding and the output head; leave one of them out"
        )
    return found | {"ensure_weight_tying": bool(both) and _is_tied(model)}


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether output head and embedding have the same weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head.weight is embedding.weight  # type: ignore[union-attr]


def attach_adapter(
    model: PreTrainedModel,
    lora: LoraSettings,
    *,
    autocast: bool = False,
    new_ids: Sequence[int] = (),
    seeing: Sequence[str] = (),
) -> PeftModel:
    """Freezes the model and adds LoRA layers, fp32 on a 16-bit or 4-bit base (PEFT's default).

    With `autocast`, every forward pass will run under it. The rows of `new_ids` are trained too. Of a model
    that sees, `seeing` modules have adapters too.

    Raises:
        ConfigError: target_modules or patterns match nothing in this model, or an embedding or the output
            head; the message says what would do. Or something else cannot be trained.
    """
    config = lora_config(lora, model, new_ids, seeing)
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        said = LAYERS_WITHIN.sub("", str(error))
        if not OF_TARGETS.search(said):
            raise
        raise _no_target(model, f"={lora.target_modules}: {said}") from error
    require_matches(adapted, lora)
    if lora.init != "default":
        take_out_start(adapted, lora)
    if new_ids:
        require_wrapped(adapted)
        complete_wrappers(adapted)
    if lora.modules_to_save:
        _train_whole(adapted, tied=config.ensure_weight_tying, fp32=autocast)
    # "auto" would save a whole embedding that has grown, of which only single rows are trained
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    # safetensors takes PEFT's "cuda" for the first GPU, of whose memory every rank would take some for good
    adapted.load_adapter = partial(adapted.load_adapter, torch_device="cpu")
    if not lora.use_dora:  # which computes the norms of weights in the type of its input
        passes.replace_forwards(adapted, autocast=autocast)
    return adapted


def _no_target(model: torch.nn.Module, said: str) -> ConfigError:
    """The error for target_modules, of which something was `said`; lists the names that there are."""
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if "Linear" in type(module).__name__ and not PEFTS_OWN.search(name)
    }
    return ConfigError(
        f"tuning.lora.target_modules{said}\n"
        f"linear layers of this model: {', '.join(sorted(linear))}; or use target_modules: auto"
    )


def _train_whole(model: PeftModel, *, tied: bool, fp32: bool) -> None:
    """Completes modules_to_save: in fp32 if asked to, since small updates of 16-bit weights are lost."""
    if tied and not _is_tied(model):  # type: ignore[arg-type]
        raise ConfigError(
            "tuning.lora.modules_to_save: PEFT cannot keep embedding and output head of "
            f"{type(model.get_base_model()).__name__} tied; leave them out, or set tuning.mode=full"
        )
    for module in model.modules():
        if fp32 and isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save.float()


def require_matches(model: PeftModel, lora: LoraSettings) -> None:
    """Raises a ConfigError if a target or pattern matches no module with an adapter; PEFT would only warn."""
    tuner: Any = model.base_model
    adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    asked = () if lora.target_modules == "auto" else lora.target_modules
    names = "".join(f".{name}\n" for name in adapted)
    unknown = [each for each in asked if f".{each}\n" not in names]
    if unknown:
        raise _no_target(model.get_base_model(), f": nothing is named {', '.join(unknown)}")
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        unused = [key for key in patterns if not any(get_pattern_key([key], name) == key for name in adapted)]
        if unused:
            ends = sorted({name.rpartition(".")[2] for name in adapted})
            raise ConfigError(
                f"tuning.lora.{setting}: {', '.join(unused)} matches no module that has an adapter; these "
                f"have: {', '.join(ends)}, as in {adapted[0]}"
            )


def require_fitting(empty: PreTrainedModel, folder: Path) -> None:
    """Raises a CheckpointError unless an adapter is whole and one for this base, which has no weights yet.

    PEFT would start missing weights from scratch and leave out unexpected ones.
    """
    try:
        config = PeftConfig.from_pretrained(str(folder))
        _require_rows(empty, config, folder)
        with without_weights():
            model = PeftModel(empty, config)
        with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except NOT_AN_ADAPTER as error:
        raise _unfit(folder, error) from error
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name: tuple(weight.shape) for name, weight in weights.items()}
    shaped = ((name, found[name], expected[name]) for name in found.keys() & expected.keys())
    other = [f"{name} {was} instead of {wanted}" for name, was, wanted in shaped if was != wanted]
    problems = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys(),
        "of another shape:": other,
    }
    said = [f"{what} {listed(sorted(names), SHOWN)}" for what, names in problems.items() if names]
    if said:
        raise _unfit(folder, "; ".join(said))


def _require_rows(empty: PreTrainedModel, config: object, folder: Path) -> None:
    trained = getattr(config, "trainable_token_indices", None) or {}
    last = max((max(rows) for rows in trained.values()), default=-1)
    embedding: Any = empty.get_input_embeddings()
    count = len(embedding.weight)
    if last >= count:
        raise _unfit(
            folder, f"it has trained row {last} of the embedding, which has {count}; see model.new_tokens"
        )


def load_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """The base with the adapter of a finished run, for which `require_fitting` was called.

    Raises:
        CheckpointError: the adapter cannot be loaded.
    """
    try:
        # not through a GPU, which may be in use, where a merge needs none
        model = PeftModel.from_pretrained(base, str(folder), torch_device="cpu", **places_for_adapter(base))
    except NOT_AN_ADAPTER as error:
        raise _unfit(folder, error) from error
    complete_wrappers(model)
    return model


def _unfit(folder: Path, why: str | Exception) -> CheckpointError:
    reason = why if isinstance(why, str) else " ".join(str(why).split())[:300]
    return CheckpointError(
        f"the adapter in {folder} does not fit the model: {reason}\n"
        f"Use the config that it was trained with, or train again with `{make('train')}`"
    )

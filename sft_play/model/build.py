"""Builds models with their weights: for full fine-tuning, LoRA and QLoRA, and to generate with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.integrations.neftune import activate_neftune

from sft_play.config.schema import ModelConfig, RunConfig
from sft_play.engines.registry import engine_of
from sft_play.engines.stored import looking_as_used, say_types
from sft_play.errors import CheckpointError, ConfigError
from sft_play.manifest import find_damage, has_manifest
from sft_play.model.adapters.attach import attach_adapter, load_adapter, require_fitting
from sft_play.model.adapters.targets import CHOOSES_TOKENS, parts_within
from sft_play.model.attention import varlen
from sft_play.model.attention.choice import generation_attention
from sft_play.model.layers import own_passes
from sft_play.model.layers.cpu import keep_differentiable
from sft_play.model.layers.tiled_mlp import tile_mlps
from sft_play.model.load import (
    empty_base,
    hub_arguments,
    load_model_config,
    new_tokens,
    not_loadable,
    scaled_config,
)
from sft_play.model.new_tokens import add_rows
from sft_play.model.placement import SPREAD, choose_place, compute_head_in_ram, say_spread
from sft_play.model.weights.files import compare_with_index, require_own_weights
from sft_play.model.weights.finished import first_not_finite
from sft_play.model.weights.four_bit import nf4, quantize_later
from sft_play.plan import Plan
from sft_play.spelling import make
from sft_play.ui.console import warn
from sft_play.upstream.huggingface_hub import is_network_error
from sft_play.upstream.transformers import bars_left_out, types_apart
from sft_play.vision.looks import trained_parts
from sft_play.vision.models import attention_by_part, join_pictures

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def local_device(device: str, local_rank: int = 0) -> torch.device:
    """This process's device; on a GPU machine, the GPU of its local rank."""
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def freeze_what_gets_no_gradient(model: PreTrainedModel, seeing: Sequence[str] = ()) -> None:
    """Freezes what only chooses tokens, and vision and audio towers: DDP would wait for their gradients.

    Not so `seeing` modules, which are trained on images.
    """
    begins = (*parts_within(model, seeing), "lm_head.")
    for name, parameter in model.named_parameters():
        if not name.startswith(begins) or CHOOSES_TOKENS.search(name):
            parameter.requires_grad_(False)


def load_base(
    model: ModelConfig,
    *,
    dtype: str,
    attn_implementation: str,
    device: torch.device | str,
    quantize: bool,
    checks_files: bool = True,
    as_stored: bool = False,
) -> PreTrainedModel:
    """The pretrained weights on a device or SPREAD, 4-bit when `quantize`, with rows for model.new_tokens.

    Only safetensors: pickled weights can run code. Of several ranks of a machine, one checks the files. With
    `as_stored`, weights are neither cast nor quantized before each is put to use (`engines.stored`).

    Raises:
        ConfigError: the folder or repository has no weights that can be loaded, names files as such that are
            none of its own, or they are damaged.
    """
    _require_weights(model)
    if checks_files:
        _require_undamaged(model)
    varlen.register()
    torch_dtype, architecture = getattr(torch, dtype), load_model_config(model)
    try:
        with bars_left_out():
            with_info: Any = AutoModelForCausalLM.from_pretrained(
                model.name,
                dtype="auto" if as_stored else torch_dtype,
                attn_implementation=attention_by_part(architecture, varlen.library_name(attn_implementation)),
                quantization_config=nf4(architecture, torch_dtype) if quantize and not as_stored else None,
                device_map=SPREAD if device == SPREAD else {"": device},
                low_cpu_mem_usage=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with a better message
                **scaled_config(model) | hub_arguments(model),
            )
        if quantize and as_stored:
            quantize_later(with_info[0], torch_dtype)
    except ImportError as error:
        key = "tuning.mode=qlora" if quantize else f"model.attention={attn_implementation}"
        remedy = f"run `{make('install')}`" if quantize else "model.attention=auto uses what is installed"
        raise ConfigError(f"{key} needs a package that cannot be imported: {error}\n{remedy}") from error
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, SafetensorError)) and not is_network_error(error):
            raise
        raise not_loadable("weights", model, error) from error
    loaded, info = with_info
    _require_all_weights(model, info)
    _release_what_was_split(loaded)
    keep_differentiable(loaded)
    own_passes.replace_forwards(loaded)
    add_rows(loaded, new_tokens(model))
    if as_stored:
        say_types(loaded, torch_dtype, types_apart(loaded, torch_dtype))
    return loaded


def _require_weights(model: ModelConfig) -> None:
    """Refuses a folder without safetensors, and weights that are to be read from other files."""
    folder = Path(model.name)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(f"model.name: {folder} has no *.safetensors weights (found: {found})")
    require_own_weights(model)


def _require_undamaged(model: ModelConfig) -> None:
    """Checks a folder against its manifest and its index, if it has them."""
    folder = Path(model.name)
    damage, odd = (find_damage(folder), None) if has_manifest(folder) else compare_with_index(folder)
    if odd:
        warn(f"warning: {folder}: {odd}; is it a complete copy?")
    if damage:
        raise ConfigError(f"model.name: {folder} is damaged: {damage}; make or copy it again")


def _require_all_weights(model: ModelConfig, info: dict[str, Any]) -> None:
    """Refuses incomplete weights; transformers would fill what it does not find with random numbers."""
    missing = sorted(info["missing_keys"])
    wrong = [
        f"{name} {tuple(found)} instead of {tuple(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    if missing or wrong:
        listed = "; ".join([*wrong, *(f"{name} missing" for name in missing)][:3])
        raise ConfigError(
            f"model.name: the weights of '{model.name}' do not match its config.json: {listed}"
            f"{' and more' if len(missing) + len(wrong) > 3 else ''}\ndownload or save the model again"
        )


def _release_what_was_split(model: torch.nn.Module) -> None:
    """Copies weights that are views of a larger tensor, which stays in memory for them.

    transformers splits some fused tensors while loading, as those of Kimi K2.5's vision tower.
    """
    for parameter in model.parameters():
        if parameter.untyped_storage().nbytes() > parameter.nbytes:
            parameter.data = parameter.data.clone()


def build_model(config: RunConfig, plan: Plan, local_rank: int = 0) -> PreTrainedModel | PeftModel:
    """The model to train: base weights and, if the mode has them, adapters, seeded by train.seed.

    Raises:
        ConfigError: it cannot be loaded, or full fine-tuning would start from a NaN or infinite weight.
    """
    set_seed(config.train.seed)  # adapters start from random numbers
    engine = engine_of(plan.sharing.engine)
    shards = engine.shards_weights
    # 4-bit layers keep computing in the type that they are loaded in, whatever the engine casts
    dtype = plan.precision.computed_in if engine.casts_model else plan.precision.dtype
    model = load_base(
        config.model,
        dtype=dtype,
        attn_implementation=plan.kernels.attention,
        device=local_device("cpu" if shards else plan.device, local_rank),
        quantize=config.tuning.mode == "qlora",
        checks_files=local_rank == 0,
        as_stored=shards and can_be_cast_later(config, dtype),
    )
    if plan.kernels.layers != "own":
        own_passes.replace_forwards(model, plan.kernels.layers)
    model.config.use_cache = False
    trained: PreTrainedModel | PeftModel = model
    seeing = trained_parts(model.config, config.tuning.vision)
    if config.tuning.mode == "full":
        _require_finite(model)
        freeze_what_gets_no_gradient(model, seeing)
    else:
        autocast, ids = plan.precision.autocast != "no", [token.id for token in new_tokens(config.model)]
        with looking_as_used(model):
            trained = attach_adapter(model, config.tuning.lora, autocast=autocast, new_ids=ids, seeing=seeing)
    join_pictures(model)
    if plan.mlp_tile:
        tile_mlps(trained, plan.mlp_tile)
    if config.train.neftune_noise_alpha:
        activate_neftune(trained, config.train.neftune_noise_alpha)
    return trained


def can_be_cast_later(config: RunConfig, dtype: str) -> bool:
    """Whether nothing is made from the weights, or from their type, before they are divided.

    Gemma's factor of the embedding, for example, is rounded to the type that the model is made in.
    """
    architecture, lora = load_model_config(config.model), config.tuning.lora
    if config.tuning.mode != "full" and (
        lora.use_dora
        or lora.init != "default"
        or lora.modules_to_save
        or config.model.new_tokens
        or getattr(architecture, "quantization_config", None) is not None
    ):
        return False
    if architecture.dtype is None:
        return False
    stored, used = (
        empty_base(config.model, dtype=each) for each in (architecture.dtype, getattr(torch, dtype))
    )
    return _types_of_buffers(stored) == _types_of_buffers(used)


def _types_of_buffers(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers()}


def _require_finite(model: PreTrainedModel) -> None:
    if broken := first_not_finite(model.named_parameters()):
        raise ConfigError(
            f"model.name: the weight {broken} of '{model.name_or_path}' is NaN or infinite, and training "
            "from it would spread that; download the model again, or use another one"
        )


def inference_dtype(device: str) -> str:
    """bf16 on a GPU that supports it, else fp16; fp32 on the CPU."""
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def load_for_inference(
    config: RunConfig, weights: Path | None, *, dtype: str = "auto", quantize: bool | None = None
) -> PreTrainedModel | PeftModel:
    """A model ready to generate: the base alone, or with the adapter or the full weights of a finished run.

    By default, the base is 16-bit on a GPU, fp32 on the CPU, and 4-bit if it was so in training. It is spread
    over all GPUs and RAM if it does not fit one GPU.

    Raises:
        DoesNotFitError: nor does it fit them all together.
        CheckpointError: `weights` is neither an adapter nor a model, or an adapter that does not fit.
    """
    is_adapter = weights is not None and (weights / "adapter_config.json").is_file()
    if weights is not None and not is_adapter and not (weights / "config.json").is_file():
        raise CheckpointError(f"{weights} holds neither an adapter nor a model; run `{make('train')}` first")
    if is_adapter and weights:
        require_fitting(empty_base(config.model), weights)
    source = config.model if weights is None or is_adapter else ModelConfig(name=str(weights))
    quantize = config.tuning.mode == "qlora" if quantize is None else quantize
    quantize = quantize and (weights is None or is_adapter)
    if dtype == "auto":
        dtype = inference_dtype("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = load_base(
        source,
        dtype=dtype,
        attn_implementation=generation_attention(load_model_config(source)),
        device=choose_place(source, dtype, quantize=quantize),
        quantize=quantize,
    )
    say_spread(model)
    if is_adapter and weights:
        model = load_adapter(model, weights)
    compute_head_in_ram(model)
    return model.eval()

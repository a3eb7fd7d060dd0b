"""Tensors of a model folder as llama.cpp expects them: its names, its order of rotary channels, its types."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sft_play.errors import ConfigError, NonFiniteError
from sft_play.export.architecture import Gguf, head_size, rope_settings
from sft_play.spelling import var

TEXT_PREFIX = re.compile(r"(?:model\.)?(?:language|text)_model\.(?:model\.)?")
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Stored:
    """A tensor of a GGUF file."""

    name: str
    source: str | None  # its name in the model folder; None: the factors of Llama 3's rotary positions
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType

    @property
    def bytes(self) -> int:
        """Size in the file."""
        from gguf import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // block * size


ModelFolder = dict[str, Any]  # name of a tensor -> the open safetensors file that has it


@contextmanager
def opened(folder: Path) -> Iterator[ModelFolder]:
    """Opens the weights of a model folder."""
    with ExitStack() as stack:
        paths = sorted(folder.glob("*.safetensors"))
        files = [stack.enter_context(safe_open(str(path), framework="pt")) for path in paths]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict


def stored_tensors(folder: ModelFolder, family: Gguf, text: PretrainedConfig, wanted: str) -> list[Stored]:
    """What the file will contain, in order, for a family of GGUF and the config of the text model.

    Matrices have the type `wanted`: f32, f16, bf16 or q8_0; norms and biases are always f32.

    Raises:
        ConfigError: llama.cpp has no place for a tensor.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

    places = get_tensor_name_map(MODEL_ARCH[family.name.upper()], text.num_hidden_layers)
    found = []
    for source, file in folder.items():
        plain = TEXT_PREFIX.sub("model.", source)
        if plain.startswith(OTHER_PARTS) or source.startswith(tuple(f"model.{part}" for part in OTHER_PARTS)):
            continue
        if plain == "lm_head.weight" and text.tie_word_embeddings:
            continue
        target = places.get_name(plain, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ConfigError(f"{var(FORMAT='gguf')}: llama.cpp has no place for the weight {source}")
        shape = tuple(file.get_slice(source).get_shape())
        found.append(Stored(target, source, shape, _type(shape, wanted)))
    if rope_settings(text)["full_attention"].get("rope_type") == "llama3":
        found.append(Stored(ROPE_FACTORS, None, (head_size(text) // 2,), GGMLQuantizationType.F32))
    return found


def _type(shape: tuple[int, ...], wanted: str) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    chosen = GGMLQuantizationType[wanted.upper()]
    fits = shape[-1] % GGML_QUANT_SIZES[chosen][0] == 0
    return chosen if fits else GGMLQuantizationType.F16


def read_stored(folder: ModelFolder, stored: Stored, family: Gguf, text: PretrainedConfig) -> np.ndarray:
    """The content of a tensor as it goes into the file.

    Raises:
        NonFiniteError: a value is beyond float16.
    """
    from gguf.quants import quantize

    if stored.source is None:
        return _rope_factors(text).numpy()
    read = folder[stored.source].get_tensor(stored.source).float()
    weight = _changed(read, stored.source, family, text)
    if stored.type.name == "F16" and not torch.isfinite(weight.half()).all():
        raise NonFiniteError(
            f"weight {stored.source} overflows float16; use {var(DTYPE='bf16')} or {var(DTYPE='f32')}"
        )
    return quantize(weight.numpy(), stored.type)


def _changed(weight: torch.Tensor, source: str, family: Gguf, text: PretrainedConfig) -> torch.Tensor:
    """A weight as llama.cpp uses it."""
    if family.rotates_neighbours and ".q_proj." in source:
        return _interleaved(weight, text.num_attention_heads)
    if family.rotates_neighbours and ".k_proj." in source:
        return _interleaved(weight, text.num_key_value_heads)
    return weight + family.norm_offset if source.endswith("norm.weight") else weight


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads x 2 halves x channels, ...] -> [heads x channels x 2, ...]."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _rope_factors(text: PretrainedConfig) -> torch.Tensor:
    """By how much Llama 3 slows down each rotary frequency, float32 [head size / 2]."""
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](text, torch.device("cpu"))
    size = head_size(text)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = 1.0 / rope_settings(text)["full_attention"]["rope_theta"] ** exponents
    return (plain / slowed).float()

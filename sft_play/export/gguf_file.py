"""A model folder as one GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from sft_play.export import architecture, vocabulary, weights
from sft_play.ui.progress import progress_bar

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class Source:
    """A model folder, loaded as far as a GGUF file needs it."""

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    title: str
    adds_bos: bool  # as `vocabulary.Beginning.added`


def file_bytes(source: Source, wanted: str) -> int:
    """Size of the tensors of the file."""
    with weights.opened(source.folder) as folder:
        return sum(tensor.bytes for tensor in _tensors(folder, source, wanted))


def write(path: Path, source: Source, wanted: str) -> dict[str, int]:
    """Writes the file, one tensor in memory at a time; returns how many tensors have which type.

    Matrices have the type `wanted`, a key of TYPES; rows that a block of q8_0 does not divide are f16.

    Raises:
        ConfigError: llama.cpp cannot run this model, or has no such tokenizer.
        NonFiniteError: a weight is beyond float16.
    """
    from gguf import GGUFWriter

    family = architecture.gguf_family(source.config)
    text = source.config.get_text_config()
    writer = GGUFWriter(path, family.name)
    _describe(writer, source, wanted)
    counts: dict[str, int] = {}
    with weights.opened(source.folder) as folder:
        tensors = _tensors(folder, source, wanted)
        for stored in tensors:
            writer.add_tensor_info(stored.name, stored.shape, np.dtype(np.float32), stored.bytes, stored.type)
            counts[stored.type.name] = counts.get(stored.type.name, 0) + 1
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            with progress_bar(f"  writing {path.name}", len(tensors)) as done:
                for stored in tensors:
                    writer.write_tensor_data(weights.read_stored(folder, stored, family, text))
                    done(1)
        finally:
            writer.close()
    return counts


def _tensors(folder: weights.ModelFolder, source: Source, wanted: str) -> list[weights.Stored]:
    family, text = architecture.gguf_family(source.config), source.config.get_text_config()
    return weights.stored_tensors(folder, family, text, wanted)


def _describe(writer: "GGUFWriter", source: Source, wanted: str) -> None:
    """Everything that the file says before its tensors."""
    from gguf import GGML_QUANT_VERSION, GGUFType, LlamaFileType

    text = source.config.get_text_config()
    writer.add_type(GGUFType.MODEL)
    writer.add_name(source.title)
    writer.add_file_type(LlamaFileType[TYPES[wanted]])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    architecture.describe(writer, text)
    vocabulary.describe(writer, source.tokenizer, text.vocab_size, adds_bos=source.adds_bos)

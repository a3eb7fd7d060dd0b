"""Checks the files of a model folder before anything is loaded. No torch."""

import json
from pathlib import Path

# Any one of these is enough for transformers to build a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer can be built from the folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def missing_shards(folder: Path) -> list[str]:
    """Weight files that are listed in the folder's index but do not exist."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []
    return sorted(name for name in set(index.get("weight_map", {}).values()) if not (folder / name).is_file())

"""Checks the files of a model folder before anything is loaded. No torch."""

import json
import re
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")

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


def _class_references(folder: Path) -> list[str]:
    """The Python classes that a model folder brings or names: "module.Class" or "org/repo--module.Class"."""
    found: list[str] = []
    for name in ("config.json", "tokenizer_config.json"):
        try:
            mapping = json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map") or {}
        except (OSError, ValueError, AttributeError):
            continue
        values = mapping.values() if isinstance(mapping, dict) else [mapping]
        for value in values:
            found += value if isinstance(value, list) else [value]
    return [reference for reference in found if isinstance(reference, str)]


def unpinned_code(name: str, revision: str | None) -> str | None:
    """The Hub repository whose Python code a model would run at whatever commit it then has, or None.

    Args:
        name: a folder or a Hub name.
        revision: branch, tag or commit; only a full commit id pins the code.
    """
    if COMMIT.fullmatch(revision or ""):
        return None
    if not Path(name).is_dir():
        return name
    elsewhere = [text for text in _class_references(Path(name)) if "--" in text]
    return elsewhere[0].partition("--")[0] if elsewhere else None


def missing_shards(folder: Path) -> list[str]:
    """Weight files that are listed in the folder's index but do not exist."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []
    return sorted(name for name in set(index.get("weight_map", {}).values()) if not (folder / name).is_file())

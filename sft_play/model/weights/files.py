"""The files of a model: what a folder has, and whether it is the same model as before. No torch."""

import contextlib
import hashlib
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.hub import REPOSITORY
from sft_play.model.architecture.published import asked_before_the_hub
from sft_play.upstream.huggingface_hub import limit_network

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEITHER = "neither a folder here nor a name on the Hub"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
FROM_EITHER = "use a folder written by save_pretrained(), or a name on the Hub such as Qwen/Qwen3-0.6B"
COMMIT = re.compile(r"[0-9a-f]{40}")

# Any one of these is enough for transformers to build a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "tekken.json",
)  # fmt: skip
WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".npz",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
OWN_FILE = re.compile(r"[^/\\\0]+\.safetensors")  # of a folder; other kinds of files can hold code
TEMPLATES = "additional_chat_templates"  # the only folder in a model's folder that tokenizers read


def require_possible(model: ModelConfig) -> None:
    """Raises ConfigError if the model is no folder and cannot be on the Hub; asks nobody."""
    may_be_on_hub = "/" not in model.name or REPOSITORY.fullmatch(model.name)
    if not may_be_on_hub and not Path(model.name).expanduser().exists():
        raise ConfigError(f"model.name: '{model.name}' is {NEITHER}\n{FROM_EITHER}")


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

    Of branches, tags and commits, only a full commit id pins the code.
    """
    if COMMIT.fullmatch(revision or ""):
        return None
    if not Path(name).is_dir():
        return name
    elsewhere = [text for text in _class_references(Path(name)) if "--" in text]
    return elsewhere[0].partition("--")[0] if elsewhere else None


def _read_index(folder: Path) -> tuple[dict[str, str], Any]:
    """Tensor -> file of the index of a folder's weights, and its metadata; {} if there is none to be read."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        listed = {str(tensor): str(name) for tensor, name in index["weight_map"].items()}
        return listed, index.get("metadata")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}, None


def foreign_weights(folder: Path) -> str | None:
    """What a folder calls its weights although it is no safetensors file of its own, in words; else None.

    Libraries would open such a file, which is another model's, or pickled: loading that can run code.
    """
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_weights")
    except (OSError, ValueError, AttributeError, RecursionError):
        named = None
    if named not in (None, INDEX) and not OWN_FILE.fullmatch(str(named)):
        return f"config.json names {str(named)[:100]!r} in transformers_weights"
    names = sorted(set(_read_index(folder)[0].values()))
    foreign = next((name for name in names if not OWN_FILE.fullmatch(name)), None)
    return None if foreign is None else f"{INDEX} lists {foreign[:100]!r}"


def require_own_weights(model: ModelConfig) -> None:
    """Raises a ConfigError if a model, in a folder or on the Hub, has `foreign_weights`."""
    folder = _folder_of(model, INDEX)
    if folder:
        _require_own_weights(folder, model.name)


def _require_own_weights(folder: Path, name: str) -> None:
    if found := foreign_weights(folder):
        raise ConfigError(
            f"model.name: the weights of '{name}' are not loaded: {found}. Allowed are names of files beside "
            f"it that end with .safetensors, since others can run code when loaded; {FROM_EITHER}"
        )


def _listed(folder: Path) -> tuple[dict[str, str], Any]:
    """`_read_index` of a folder without `foreign_weights`; ConfigError if it has some."""
    _require_own_weights(folder, str(folder))
    return _read_index(folder)


def weight_files(folder: Path) -> list[str]:
    """The weight files of a model's folder that are loaded: one, those of its index, or all.

    This and what else reads the index raises a ConfigError if the folder has `foreign_weights`.
    """
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    listed = set(_listed(folder)[0].values())
    return sorted(listed or {path.name for path in folder.glob("*.safetensors")})


def missing_shards(folder: Path) -> list[str]:
    """Weight files that are listed in the folder's index but do not exist."""
    return sorted(name for name in set(_listed(folder)[0].values()) if not (folder / name).is_file())


def compare_with_index(folder: Path) -> tuple[str | None, str | None]:
    """What the index of a folder's weights says otherwise than the files: a problem, and what is only odd.

    The total size is only odd, since some published indices count tied weights twice. Files that cannot be
    opened are left to whoever loads them.
    """
    from safetensors import SafetensorError, safe_open

    listed, metadata = _listed(folder)
    if not listed:
        return (f"{INDEX} lists no weights" if (folder / INDEX).is_file() else None), None
    by_file: dict[str, set[str]] = {}
    for tensor, name in listed.items():
        by_file.setdefault(name, set()).add(tensor)
    size = 0
    for name, tensors in sorted(by_file.items()):
        try:
            with safe_open(str(folder / name), framework="numpy") as file:
                missing = sorted(tensors.difference(file.keys()))
            with (folder / name).open("rb") as opened:
                header = int.from_bytes(opened.read(8), "little")
        except (OSError, SafetensorError):
            return None, None
        if missing:
            return f"{name} has no weight {missing[0]}, which {INDEX} lists there", None
        size += (folder / name).stat().st_size - 8 - header
    total = metadata.get("total_size", size) if isinstance(metadata, dict) else size
    odd = None if total == size else f"the weights have {size} bytes in all, but {INDEX} says {total}"
    return None, odd


def stored_types(model: ModelConfig) -> dict[str, int]:
    """Type -> elements of the weights in a model's files, as {"BF16": 8030261248}; {} if not known here."""
    from safetensors import SafetensorError, safe_open

    folder = _folder_of(model)
    found: Counter[str] = Counter()
    if folder is None:
        return {}
    for name in weight_files(folder):
        try:
            with safe_open(str(folder / name), framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    stored = file.get_slice(key)
                    found[stored.get_dtype()] += math.prod(stored.get_shape())
        except (OSError, SafetensorError):
            return {}
    return dict(found)


def copy_processors(model: ModelConfig, config: "PretrainedConfig", target: Path) -> None:
    """Copies how a model that sees makes its inputs of pictures, which servers read, beside saved weights."""
    if getattr(config, "vision_config", None) is None:
        return
    for name in PROCESSOR_FILES:
        folder = _folder_of(model, also=name)
        if folder and (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def model_key(model: ModelConfig) -> str | None:
    """Equal keys mean equal configs and tokenizers; None if that cannot be told.

    It cannot for code of the model's own, nor while the model is not on this machine, or cannot be read. The
    Hub is asked for a newer config.json, as transformers would.
    """
    if model.trust_remote_code or asked_before_the_hub(model):
        return None
    folder = _folder_of(model)
    try:
        return f"{model.model_dump_json()} {folder.name} {files_digest(folder)}" if folder else None
    except OSError:
        return None


def files_digest(folder: Path) -> str:
    """A hash of the names and the contents of the files in a model's folder that are no weights."""
    digest = hashlib.sha256()
    for file in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*")]):
        if file.suffix not in WEIGHTS and file.is_file():
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
            digest.update(f"{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


def _folder_of(model: ModelConfig, also: str | None = None) -> Path | None:
    """The model's own folder, or that of its current commit in the Hub's cache; None if there is none.

    A file `also` is there if the Hub has it.
    """
    from huggingface_hub import hf_hub_download

    if Path(model.name).is_dir():
        return Path(model.name)
    limit_network()
    try:
        folder = Path(hf_hub_download(model.name, "config.json", revision=model.revision)).parent
    except Exception:  # whoever loads the model says what is wrong
        return None
    if also:
        with contextlib.suppress(Exception):  # as above
            hf_hub_download(model.name, also, revision=model.revision)
    return folder

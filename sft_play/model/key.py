"""What the config and the tokenizer of a model are made from, told without loading either. No torch."""

import hashlib
from pathlib import Path

from sft_play.config.schema import ModelConfig
from sft_play.hub import limit_network
from sft_play.model.published import asked_before_the_hub

WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".npz",
}  # fmt: skip
TEMPLATES = "additional_chat_templates"  # the only folder in a model's folder that tokenizers read


def model_key(model: ModelConfig) -> str | None:
    """Equal keys mean equal configs and tokenizers; None if that cannot be told.

    It cannot for code of the model's own, nor while the model is not on this machine, or cannot be read. The
    Hub is asked for a newer config.json, as transformers would.
    """
    if model.trust_remote_code or asked_before_the_hub(model):
        return None
    folder = Path(model.name) if Path(model.name).is_dir() else _cached_folder(model)
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


def _cached_folder(model: ModelConfig) -> Path | None:
    """The folder of the model's current commit in the Hub's cache; None if there is none."""
    from huggingface_hub import hf_hub_download

    limit_network()
    try:
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision)).parent
    except Exception:  # noqa: BLE001 - whoever loads the model says what is wrong
        return None

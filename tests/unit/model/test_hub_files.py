"""A base model in the cache of the Hub that is damaged, or names files that may hold code."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.build import load_base

MODEL, COMMIT = ModelConfig(name="org/tiny"), "c" * 40


@pytest.fixture
def cached(tiny_model, tmp_path, monkeypatch) -> Path:
    """The tiny model as huggingface_hub keeps it: names in a snapshot link to blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "own"))
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        name = hashlib.sha256(content).hexdigest()
        if file.suffix != ".safetensors":  # git's name of a small file
            name = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        (repository / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def load(model: ModelConfig = MODEL, **settings):
    device = torch.device("cpu")
    return load_base(
        model, dtype="float32", attn_implementation="sdpa", device=device, quantize=False, **settings
    )


def test_weights_in_the_cache_that_are_cut_are_refused(cached):
    assert load().config.hidden_size == 64
    blob = (cached / "model.safetensors").resolve()
    os.truncate(blob, blob.stat().st_size - 1)
    with pytest.raises(ConfigError, match="org/tiny"):
        load()


def test_an_index_in_the_cache_may_list_only_safetensors_beside_it(cached):
    (cached / "model.safetensors").unlink()
    (cached / "pytorch_model.bin").write_bytes(b"pickled")
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}})
    (cached / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="'org/tiny' are not loaded: .* lists 'pytorch_model.bin'"):
        load()

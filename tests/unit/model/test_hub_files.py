"""A base model in the cache of the Hub is compared with the hashes that its files are named by."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model import base_files as hub_files
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


def flip_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_damaged_file_in_the_cache_is_named_before_it_is_loaded(cached, name):
    assert load().config.hidden_size == 64
    flip_bit(cached / name, -1)
    with pytest.raises(
        ConfigError, match=f"model.name: {name} of 'org/tiny' is damaged .*hf download org/tiny"
    ):
        load()
    assert load(checks_files=False).config.hidden_size == 64  # as the other ranks of a machine
    flip_bit(cached / name, -1)
    assert load().config.hidden_size == 64


def test_a_file_is_hashed_once_and_again_when_somebody_wrote_to_it(cached, monkeypatch):
    hashed = []
    is_as_published = hub_files._is_as_published
    monkeypatch.setattr(
        hub_files, "_is_as_published", lambda one: (hashed.append(one.hash), is_as_published(one))[1]
    )
    for _ in range(2):
        hub_files.require_as_published(MODEL)
    files = [path for path in cached.iterdir() if path.suffix in hub_files.USED]
    assert len(hashed) == len(files) > 3
    os.utime((cached / "config.json").resolve())
    hub_files.require_as_published(MODEL)
    assert hashed[len(files) :] == [(cached / "config.json").resolve().name]


def test_a_damaged_file_in_a_folder_that_was_downloaded_is_named(cached, tmp_path):
    folder = shutil.copytree(cached, tmp_path / "folder")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    note = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\n{digest}\n1700000000.0\n")
    model = ModelConfig(name=str(folder))
    assert load(model).config.hidden_size == 64
    flip_bit(folder / "model.safetensors", -1)
    with pytest.raises(ConfigError, match=r"model.safetensors of .* is damaged.*another hash.*\.metadata$"):
        load(model)
    note.unlink()
    assert load(model).config.hidden_size == 64


def test_an_index_in_the_cache_may_list_only_safetensors_beside_it(cached):
    (cached / "model.safetensors").unlink()
    (cached / "pytorch_model.bin").write_bytes(b"pickled")
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}})
    (cached / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="'org/tiny' are not loaded: .* lists 'pytorch_model.bin'"):
        load()


def test_what_has_no_published_hash_is_not_checked(cached):
    weights = cached / "model.safetensors"
    flip_bit(weights, -1)
    with pytest.raises(ConfigError, match=r"model.safetensors of 'org/tiny' is damaged"):
        hub_files.require_as_published(MODEL)
    blob = weights.resolve()
    weights.unlink()
    blob.rename(weights)  # a cache without links, as on Windows
    hub_files.require_as_published(MODEL)
    hub_files.require_as_published(ModelConfig(name="org/other"))


def test_a_cache_that_cannot_be_written_costs_only_the_memory_of_what_was_checked(cached, tmp_path):
    (tmp_path / "own").write_text("a file where the folder would be")
    hub_files.require_as_published(MODEL)
    flip_bit(cached / "config.json", 3)
    with pytest.raises(ConfigError, match=r"config.json of 'org/tiny' is damaged"):
        hub_files.require_as_published(MODEL)


def test_the_memory_holds_nothing_that_was_damaged(cached, tmp_path):
    flip_bit(cached / "config.json", 3)
    with pytest.raises(ConfigError):
        hub_files.require_as_published(MODEL)
    assert not (tmp_path / "own" / "hub-files").exists()
    flip_bit(cached / "config.json", 3)
    hub_files.require_as_published(MODEL)
    assert len(list((tmp_path / "own" / "hub-files").iterdir())) > 3

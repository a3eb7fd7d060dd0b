"""The key of a model is another one whenever its config or its tokenizer may be."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.build import load_base
from sft_play.model.load import published_dtype
from sft_play.model.weights import files
from sft_play.model.weights.base_files import base_files
from sft_play.model.weights.files import (
    INDEX,
    compare_with_index,
    files_digest,
    foreign_weights,
    missing_shards,
    model_key,
    require_possible,
    stored_types,
    weight_files,
)

COMMIT = "c" * 40


@pytest.fixture
def folder(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_every_file_that_is_no_weight_counts(folder):
    seen = {files_digest(folder)}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        seen.add(files_digest(folder))
    for name in ("chat_template.jinja", "vocab.bpe", "additional_chat_templates/tools.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("new")
        seen.add(files_digest(folder))
    (folder / "vocab.bpe").unlink()
    seen.add(files_digest(folder))
    assert len(seen) == 8
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "checkpoints").mkdir()
    assert files_digest(folder) in seen


def test_settings_of_the_model_count(folder):
    settings = [{}, {"max_seq_len": 64}, {"new_tokens": ["<a>"]}, {"revision": "main"}]
    keys = {model_key(ModelConfig(name=str(folder), **changes)) for changes in settings}
    assert len(keys) == 4 and None not in keys


def test_code_of_its_own_has_no_key(folder):
    assert model_key(ModelConfig(name=str(folder), trust_remote_code=True)) is None


def test_a_folder_that_cannot_be_read_has_no_key(folder, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    assert model_key(ModelConfig(name=str(folder)))
    monkeypatch.setattr(files.hashlib, "file_digest", fail)
    assert model_key(ModelConfig(name=str(folder))) is None


def test_a_model_that_is_not_here_has_no_key():
    assert model_key(ModelConfig(name="org/not-downloaded")) is None
    assert model_key(ModelConfig(name="Qwen/Qwen3-8B")) is None  # its config alone is known


def test_a_commit_in_the_cache_of_the_hub_has_a_key_of_its_own(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, keys = tmp_path / "models--org--tiny", set()
    (repository / "refs").mkdir(parents=True)
    for commit in (COMMIT, "d" * 40):
        shutil.copytree(tiny_model, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        keys.add(model_key(ModelConfig(name="org/tiny")))
    assert len(keys) == 2 and None not in keys
    assert model_key(ModelConfig(name="org/tiny", revision=COMMIT)) not in keys  # as it is asked for


def test_the_types_of_weights_are_read_from_their_files(folder):
    model, file = ModelConfig(name=str(folder)), folder / "model.safetensors"
    [(dtype, elements)] = stored_types(model).items()
    assert dtype == "F32" and published_dtype(model) == "float32"
    weights = load_file(file)
    head = weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.bfloat16)
    save_file(weights, file)
    assert stored_types(model) == {"BF16": head.numel(), "F32": elements - head.numel()}
    assert published_dtype(model) == ("bfloat16" if 2 * head.numel() > elements else "float32")
    file.write_bytes(file.read_bytes()[:-1])
    assert stored_types(model) == stored_types(ModelConfig(name="nobody/none")) == {}
    assert published_dtype(model) == "float32"  # as config.json says


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c", "https://hub/a/b"])
def test_a_model_that_is_nowhere_is_named_without_asking_the_hub(name):
    with pytest.raises(ConfigError, match="neither a folder here nor a name on the Hub"):
        require_possible(ModelConfig.model_construct(name=name))


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "01-ai/Yi_6B.v1", "builtin:tiny", "."])
def test_a_model_that_may_be_somewhere_is_not_refused(name):
    require_possible(ModelConfig(name=name))
    with pytest.raises(ConfigError, match="neither a folder here nor"):
        require_possible(ModelConfig.model_construct(name=f"./{name}/nowhere"))


FOREIGN = [
    "pytorch_model.bin",
    "../other/model.safetensors",
    "/model.safetensors",
    "sub/x.safetensors",
    "",
    None,
]


def list_weights(folder, name) -> None:
    """Has the index of a folder name a file as that of all weights."""
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))


@pytest.mark.parametrize("name", FOREIGN)
def test_an_index_may_list_only_safetensors_of_its_own_folder(folder, tmp_path, name):
    """Nothing opens the others: not the loader, and not what looks at the files before it."""
    shutil.copytree(folder, tmp_path / "other")
    list_weights(folder, name)
    model = ModelConfig(name=str(folder))
    readers = [weight_files, missing_shards, compare_with_index]
    for read in [*readers, lambda _: stored_types(model), lambda _: base_files(model), lambda _: load(model)]:
        with pytest.raises(ConfigError, match=f"not loaded: {INDEX} lists '{name}'"):
            read(folder)


def load(model: ModelConfig):
    return load_base(model, dtype="float32", attn_implementation="sdpa", device="cpu", quantize=False)


def test_an_index_that_lists_files_beside_it_is_read(folder):
    list_weights(folder, "weights.safetensors")
    assert weight_files(folder) == ["weights.safetensors"] and missing_shards(folder) == []


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "other.safetensors.index.json", "sub/model.safetensors", 5]
)
def test_a_config_may_not_name_other_weights_either(folder, name):
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"transformers_weights": name}))
    with pytest.raises(ConfigError, match=f"config.json names '{name}' in transformers_weights"):
        load(ModelConfig(name=str(folder)))
    for own in ("model.safetensors", INDEX, None):
        (folder / "config.json").write_text(json.dumps(tree | {"transformers_weights": own}))
        assert foreign_weights(folder) is None

"""The base model in a folder is compared with its index, and with what a run began with."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from sft_play import manifest
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model import base_files
from sft_play.model.base_files import keep_base_files, require_same_base
from sft_play.model.build import load_base
from sft_play.model.files import INDEX
from sft_play.runlog import RunDir
from tests.unit.model.test_hub_files import flip_bit


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


@pytest.fixture(params=["whole", "in shards"])
def model(tiny_model, tmp_path, request) -> ModelConfig:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    if request.param == "in shards":
        (folder / "model.safetensors").unlink()
        LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="50KB")
        assert (folder / INDEX).is_file()
    return ModelConfig(name=str(folder))


def load(model: ModelConfig):
    return load_base(
        model, dtype="float32", attn_implementation="sdpa", device=torch.device("cpu"), quantize=False
    )


def weights(model: ModelConfig) -> list[Path]:
    return sorted(Path(model.name).glob("*.safetensors"))


def test_a_flipped_bit_or_a_missing_file_of_the_base_is_named(model, run):
    keep_base_files(model, run)
    require_same_base(model, run)
    for file in (weights(model)[-1], Path(model.name) / "config.json"):
        flip_bit(file, -3)
        with pytest.raises(ConfigError, match=rf"model.name: {file.name} in .* is not the one that run was"):
            require_same_base(model, run)
        flip_bit(file, -3)
        require_same_base(model, run)
    weights(model)[0].unlink()
    with pytest.raises(ConfigError, match="is missing; it was there"):
        require_same_base(model, run)


def test_a_model_of_the_hub_and_a_run_of_an_earlier_version_are_not_compared(model, run):
    require_same_base(model, run)
    keep_base_files(ModelConfig(name="org/name"), run)
    require_same_base(model, run)
    keep_base_files(model, run)
    flip_bit(weights(model)[0], -3)
    require_same_base(ModelConfig(name="org/name"), run)
    with pytest.raises(ConfigError, match="is not the one that run was"):
        require_same_base(model, run)


def test_a_file_is_hashed_once_and_again_when_somebody_wrote_to_it(model, run, monkeypatch):
    hashed = []
    original = manifest.hash_files
    monkeypatch.setattr(
        base_files, "hash_files", lambda folder, names: (hashed.extend(names), original(folder, names))[1]
    )
    for _ in range(2):
        keep_base_files(model, run)
    assert hashed == [*(file.name for file in weights(model)), "config.json"]
    os.utime(weights(model)[0])
    keep_base_files(model, run)
    assert hashed[len(weights(model)) + 1 :] == [weights(model)[0].name]


@pytest.mark.parametrize("model", ["in shards"], indirect=True)
def test_an_index_that_lists_other_weights_than_the_files_have_is_refused(model, capsys):
    assert load(model).config.hidden_size == 64
    path = Path(model.name) / INDEX
    index = json.loads(path.read_text())
    name = index["weight_map"]["lm_head.weight"]
    other = next(file for file in index["weight_map"].values() if file != name)
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"lm_head.weight": other}}))
    with pytest.raises(ConfigError, match=f"{other} has no weight lm_head.weight, which {INDEX} lists there"):
        load(model)
    path.write_text(json.dumps(index | {"metadata": {"total_size": 1}}))
    assert load(model).config.hidden_size == 64
    size = sum(tensor.nbytes for file in weights(model) for tensor in load_file(file).values())
    assert f"the weights have {size} bytes in all, but {INDEX} says 1" in " ".join(
        capsys.readouterr().out.split()
    )
    path.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ConfigError, match="lists no weights"):
        load(model)

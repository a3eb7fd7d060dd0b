"""The base model in a folder is compared with its index, and with what a run began with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.build import load_base
from sft_play.model.weights.base_files import keep_base_files, require_same_base
from sft_play.model.weights.files import INDEX
from sft_play.runlog import RunDir
from sft_play.units import MIB
from tests.unit.test_manifest import flip_bit


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


def test_a_model_of_the_hub_and_a_run_that_kept_nothing_are_not_compared(model, run):
    require_same_base(model, run)
    keep_base_files(ModelConfig(name="org/name"), run)
    require_same_base(model, run)
    keep_base_files(model, run)
    flip_bit(weights(model)[0], -3)
    require_same_base(ModelConfig(name="org/name"), run)
    with pytest.raises(ConfigError, match="is not the one that run was"):
        require_same_base(model, run)


def test_of_large_weights_the_first_and_the_last_mib_are_read(model, run):
    file = weights(model)[0]
    file.write_bytes(bytes(3 * MIB))
    keep_base_files(model, run)
    for place in (MIB, 2 * MIB - 1):
        flip_bit(file, place)
        require_same_base(model, run)
    for place in (MIB - 1, 2 * MIB):
        flip_bit(file, place)
        with pytest.raises(ConfigError, match="is not the one that run was"):
            require_same_base(model, run)
        flip_bit(file, place)


def test_of_a_run_of_an_earlier_version_the_sizes_are_compared(model, run):
    file = weights(model)[0]
    whole = {"bytes": file.stat().st_size, "sha256": ["0" * 64]}
    run.write_json(run.base, {"files": {file.name: whole}})
    require_same_base(model, run)
    run.write_json(run.base, {"files": {file.name: whole | {"bytes": 1}}})
    with pytest.raises(ConfigError, match="is not the one that run was"):
        require_same_base(model, run)


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

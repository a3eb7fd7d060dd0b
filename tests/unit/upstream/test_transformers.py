"""What transformers does in our way gives what it gives in its own."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3MoeConfig
from transformers.utils import import_utils

from sft_play.upstream.transformers import _reading_once, loaded_as_saved, saved_as_it_is
from tests.vision_models import config_of, random_model

MOE = dict(
    hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    num_experts=4, vocab_size=64, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("as_it_is", [False, True])
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_moe"])
def test_a_model_takes_weights_by_the_names_that_its_files_have(kind, as_it_is, tmp_path):
    if kind == "gemma3":
        made, loader = random_model(config_of(kind)), AutoModelForImageTextToText
    else:
        made, loader = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MOE)), AutoModelForCausalLM
    made.save_pretrained(tmp_path)
    saved, model = load_file(tmp_path / "model.safetensors"), loader.from_pretrained(tmp_path)
    assert saved.keys() - model.state_dict().keys()
    if as_it_is:
        with saved_as_it_is(model):
            model.save_pretrained(tmp_path / "own")
        saved = load_file(tmp_path / "own" / "model.safetensors")
        assert not saved.keys() - model.state_dict().keys() and "save_pretrained" not in vars(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    with loaded_as_saved(model):
        found = model.load_state_dict(saved, False)
    assert not found.unexpected_keys and "load_state_dict" not in vars(model)
    expected = made.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_what_models_export_is_the_same_if_their_files_are_read_once(monkeypatch):
    models = Path(transformers.__file__).parent / "models"
    folders = [str(models / name) for name in ("auto", "gemma3", "llama", "qwen3_vl")]
    for name in ("fetch__all__", "create_import_structure_from_path"):
        monkeypatch.setattr(import_utils, name, getattr(import_utils, name))  # put back afterwards
    own = [import_utils.create_import_structure_from_path.__wrapped__(folder) for folder in folders]
    with _reading_once(import_utils):
        pass
    assert [import_utils.create_import_structure_from_path(folder) for folder in folders] == own
    assert any(
        "LlamaForCausalLM" in names for found in own for each in found.values() for names in each.values()
    )

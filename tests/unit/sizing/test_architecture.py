"""An architecture is loaded once; what the planner asks about it is then known without a library."""

import json
import shutil

import pytest

from benchmarks.small_models import WIDE, small_config
from sft_play.cache import recall
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model import load
from sft_play.sizing.facts import step_facts
from sft_play.sizing.facts.architecture import Architecture, planning_architecture, text_of
from sft_play.sizing.facts.model_facts import model_facts, module_facts
from sft_play.sizing.step import JoinedRows, StepSpec

ASKED = [
    (model_facts,),
    (module_facts,),
    (step_facts.attention, "auto", "cuda", (8, 0), "bfloat16"),
    (step_facts.attention_kernel, StepSpec(mode="lora", device="cuda", batch=JoinedRows(128))),
    (step_facts.attention_kernel, StepSpec(mode="lora")),
    (step_facts.also_trained, 2, ("embed_tokens",)),
]


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def refuse(*_):
    raise AssertionError("the config was loaded")


def test_every_answer_is_kept_and_the_same_the_second_time():
    config = small_config("llama", WIDE)
    first = [Architecture.of(config).ask(*asked) for asked in ASKED]
    again = Architecture(text_of(config), refuse)
    assert [again.ask(*asked) for asked in ASKED] == first
    for other in (
        (step_facts.attention, "auto", "cuda", (7, 5), "float16"),
        (step_facts.also_trained, 3, ("embed_tokens",)),
        (step_facts.attention_kernel, StepSpec(mode="full")),
    ):
        with pytest.raises(AssertionError, match="loaded"):
            again.ask(*other)


def test_another_architecture_is_asked_anew():
    config = small_config("llama", WIDE)
    width = Architecture.of(config).facts.hidden_size
    wider = small_config("llama", WIDE)
    wider.hidden_size = 2 * width
    assert Architecture.of(wider).facts.hidden_size == 2 * width


def test_facts_of_the_config_are_known_without_its_modules(monkeypatch):
    monkeypatch.setattr("sft_play.model.architecture.shape.empty_model", refuse)
    assert Architecture.of(small_config("llama", WIDE)).facts.position_limit


def test_an_error_is_not_kept():
    named = (step_facts.also_trained, 0, ("none",))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no module of LlamaForCausalLM is named 'none'"):
            Architecture.of(small_config("llama", WIDE)).ask(*named)
    assert recall("also_trained", Architecture.of(small_config("llama", WIDE)).text, *named[1:]) is None


def test_code_of_a_models_own_is_asked_every_time():
    class OwnConfig(type(small_config("llama", WIDE))):
        pass

    own = OwnConfig(hidden_size=64)
    assert Architecture.of(own).facts.hidden_size == 64
    with pytest.raises(AssertionError, match="loaded"):
        _ = Architecture(text_of(own), refuse).facts


def test_the_same_model_in_two_folders_is_one_architecture(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    texts = {planning_architecture(ModelConfig(name=str(place)))[0].text for place in (folder, copy)}
    assert len(texts) == 1 and str(folder) not in texts.pop()


@pytest.mark.parametrize("named", ["folder", "Qwen/Qwen3-8B"])
def test_an_architecture_is_known_the_second_time(folder, named, monkeypatch):
    model = ModelConfig(name=str(folder) if named == "folder" else named)
    first, notes = planning_architecture(model)
    width = first.facts.hidden_size
    monkeypatch.setattr(load, "planning_config", refuse)
    again, same_notes = planning_architecture(model)
    assert (again.text, same_notes, again.facts.hidden_size) == (first.text, notes, width)


def test_a_changed_model_is_loaded_again(folder, monkeypatch):
    model = ModelConfig(name=str(folder))
    first, _ = planning_architecture(model)
    known, _ = planning_architecture(model)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"num_hidden_layers": 3}))
    assert planning_architecture(model)[0].config.num_hidden_layers == 3
    with pytest.raises(ConfigError, match="changed while the run was planned"):
        _ = known.config  # found before the change, needed after it

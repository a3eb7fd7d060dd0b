"""Each shipped architecture has the published number of parameters, and needs no network."""

import socket

import pytest
import yaml

from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.model.architecture.published import MODELS_FILE, hub_name, published_models
from sft_play.model.architecture.shape import empty_model
from sft_play.model.load import planning_config

FILE = yaml.safe_load(MODELS_FILE.read_text())
ENTRIES = {entry["name"]: entry for entry in FILE["models"]}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def parameters_of(config) -> int:
    return sum(parameter.numel() for parameter in empty_model(config).parameters())


@pytest.mark.thorough
def test_each_model_has_the_published_number_of_parameters(no_network):
    wrong = []
    for name, entry in ENTRIES.items():
        config, notes = planning_config(ModelConfig(name=name))
        built = parameters_of(config)
        if abs(built - entry["parameters"]) > entry.get("rounded_to", 0) / 2:
            wrong.append(f"{name}: {built:,} parameters, published {entry['parameters']:,}")
        if f"architecture of {name} as of" not in notes[0] or "the Hub was not asked" not in notes[0]:
            wrong.append(f"{name}: {notes[0]}")
    assert not wrong, "\n".join(wrong)


def test_without_a_tokenizer_each_new_token_is_assumed_to_need_a_row(no_network):
    plain, notes = planning_config(ModelConfig(name="Qwen/Qwen3-8B"))
    larger, same_notes = planning_config(ModelConfig(name="Qwen/Qwen3-8B", new_tokens=("<a>", "<b>")))
    assert larger.vocab_size == plain.vocab_size + 2 and same_notes == notes


def test_every_number_has_a_dated_source():
    used = {entry[key] for entry in ENTRIES.values() for key in ("source", "parameters_source")}
    assert used == set(FILE["sources"])
    for source in FILE["sources"].values():
        assert source["url"].startswith("https://") and source["date"].year >= 2025


def test_no_name_is_there_twice_also_without_its_organization():
    names = [name for entry in ENTRIES.values() for name in (entry["name"], *entry.get("same", ()))]
    short = [name.rpartition("/")[2].lower() for name in names]
    assert len(set(short)) == len(short) == len(published_models()) >= 120
    assert len(ENTRIES) >= 60


def test_the_access_to_a_gated_model_is_explained(no_network):
    _, notes = planning_config(ModelConfig(name="meta-llama/Llama-3.1-8B-Instruct"))
    page = "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct"
    assert (
        notes[1]
        == f"to train it, accept its license at {page}, then run `.venv/bin/hf auth login` or set HF_TOKEN"
    )
    assert len(planning_config(ModelConfig(name="Qwen/Qwen3-8B"))[1]) == 1


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct"),
        ("gemma-3-4b", "google/gemma-3-4b-it"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("someone/own-model", "someone/own-model"),
    ],
)
def test_a_short_name_is_found(typed, name):
    assert hub_name(typed) == name


def test_a_folder_is_not_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert hub_name("qwen3-8b") == "qwen3-8b"


def test_an_unknown_short_name_lists_the_closest():
    with pytest.raises(ConfigError, match="MODEL=qwen3-9b is unknown; closest: Qwen/Qwen3-8B"):
        hub_name("qwen3-9b")


def test_a_file_on_this_machine_comes_before_the_published_one(tiny_model, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((tiny_model / "config.json").read_text())
    (tmp_path / "models--Qwen--Qwen3-8B" / "refs").mkdir()
    (tmp_path / "models--Qwen--Qwen3-8B" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config, notes = planning_config(ModelConfig(name="Qwen/Qwen3-8B"))
    assert config.hidden_size == 64 and not notes


def test_a_revision_is_looked_up_on_the_hub():
    with pytest.raises(ConfigError, match="the config of 'Qwen/Qwen3-8B' cannot be loaded"):
        planning_config(ModelConfig(name="Qwen/Qwen3-8B", revision="v2"))

"""The real client of the Hub against a stand-in for its API."""

import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from sft_play.commands.merge import merge
from sft_play.commands.push import push
from sft_play.errors import CheckpointError, ConfigError
from sft_play.manifest import files_in, hash_files, write_manifest
from sft_play.runlog import RunDir
from sft_play.upstream import huggingface_hub as limits
from sft_play.upstream.patching import undone
from tests.unit.commands.hub_stand_in import Hub, Repository, start
from tests.unit.finished_run import FinishedRun, random_run

REPO = "user/order-lora"
ADAPTER_FILES = {
    "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    from transformers import AutoTokenizer

    finished = random_run(tiny_model, tmp_path_factory.mktemp("push"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(finished.run.adapter)
    (finished.run.adapter / "README.md").write_text("---\ntags: [sft]\n---\n# The card\n")
    write_manifest(finished.run.adapter, {}, hash_files(finished.run.adapter, files_in(finished.run.adapter)))
    return finished


@pytest.fixture
def finished(trained, tmp_path):
    """A copy with all that a run directory has, and that nobody else should see."""
    run = RunDir(tmp_path / "runs" / "order")
    shutil.copytree(trained.run.path, run.path)
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "log.txt", ".env"):
        (run.adapter / name).write_text("secret")
    (run.adapter / "checkpoint-1").mkdir()
    (run.adapter / "checkpoint-1" / "adapter_model.safetensors").write_text("secret")
    run.log.write_text("secret")
    return FinishedRun(trained.config, run)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    found = Hub()
    server = start(found)
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", found.token)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    with undone():
        yield found
    server.shutdown()
    server.server_close()


def test_an_adapter_goes_into_a_private_repository_in_one_commit(finished, hub, capsys):
    result = push(finished.config, finished.run, REPO)
    repository = hub.repositories[REPO]
    assert repository.private and repository.commits == ["order, trained with SFT-Play"]
    assert set(repository.files) == set(result["files"]) == ADAPTER_FILES
    assert repository.files["README.md"].decode().endswith("# The card\n")
    weights = (finished.run.adapter / "adapter_model.safetensors").read_bytes()
    assert repository.files["adapter_model.safetensors"] == weights
    said = " ".join(capsys.readouterr().out.split())
    assert "pushed 6 files (" in said and f"{hub.address}/{REPO} (private)" in said


def test_neither_the_state_of_training_nor_folders_of_this_machine_are_published(finished, hub):
    push(finished.config, finished.run, REPO)
    published = b"".join(hub.repositories[REPO].files.values()) + b"".join(hub.objects.values())
    base = finished.config.model.name
    assert b"secret" not in published and base.encode() not in published
    assert Path(base).name.encode() in hub.repositories[REPO].files["adapter_config.json"]


def test_the_merged_model_goes_with_its_own_files(finished, hub):
    with pytest.raises(CheckpointError, match="has no merged model yet; run `make merge RUN=.*` first"):
        push(finished.config, finished.run, REPO, part="merged")
    assert not hub.asked
    merge(finished.config, finished.run)
    push(finished.config, finished.run, REPO, part="merged", public=True)
    repository = hub.repositories[REPO]
    assert not repository.private
    assert set(repository.files) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert finished.config.model.name.encode() not in b"".join(repository.files.values())


def test_a_card_is_written_if_there_is_none(finished, hub):
    (finished.run.adapter / "README.md").unlink()
    push(finished.config, finished.run, REPO)
    assert b"A LoRA adapter for" in hub.repositories[REPO].files["README.md"]


def test_what_changes_is_pushed_again_and_the_repository_stays_private(finished, hub):
    push(finished.config, finished.run, REPO)
    (finished.run.adapter / "README.md").write_text("# Another card")
    assert push(finished.config, finished.run, REPO, public=True)["private"]
    assert hub.repositories[REPO].files["README.md"] == b"# Another card"
    assert hub.asked.count("POST /api/repos/create") == 1


def test_a_public_repository_needs_public(finished, hub):
    hub.repositories[REPO] = Repository(private=False)
    with pytest.raises(ConfigError, match=f"REPO={REPO} exists and is public; add PUBLIC=1"):
        push(finished.config, finished.run, REPO)
    assert not hub.repositories[REPO].files
    assert not push(finished.config, finished.run, REPO, public=True)["private"]


def test_without_a_token_the_next_command_is_named(finished, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        ConfigError, match="needs a Hugging Face access token.*run `.venv/bin/hf auth login` or set HF_TOKEN"
    ):
        push(finished.config, finished.run, REPO)
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "user/", "https://huggingface.co/u/n", "user/na me", "../x"]
)
def test_a_malformed_repository_is_refused(finished, hub, name):
    with pytest.raises(ConfigError, match="is not the name of a repository; expected: REPO=user/name"):
        push(finished.config, finished.run, name)
    assert not hub.asked


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda hub: setattr(hub, "token", "hf_another"),
            "does not accept the access token; run `.venv/bin/hf auth login`",
        ),
        (lambda hub: setattr(hub, "may_write", False), "the access token has no write permission there"),
        (lambda hub: setattr(hub, "fails_at", "/commit/"), "the Hub answered 500: .*out of order"),
    ],
)
def test_a_hub_that_refuses_is_one_sentence_and_nothing_is_published(finished, hub, spoil, words):
    spoil(hub)
    with pytest.raises(ConfigError, match=f"REPO={REPO}: .*{words}.*Nothing was published"):
        push(finished.config, finished.run, REPO)
    assert not any(repository.files for repository in hub.repositories.values())


def test_a_hub_that_is_not_there_is_one_sentence(finished, hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(
        ConfigError, match="the Hub cannot be reached .*Nothing was published; run the command again"
    ):
        push(finished.config, finished.run, REPO)


def test_a_silent_hub_is_given_up_on(finished, hub, monkeypatch):
    monkeypatch.setattr(limits, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="the Hub cannot be reached .*did not answer"):
            push(finished.config, finished.run, REPO)


def test_offline_mode_is_one_sentence(finished, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the Hub cannot be reached .*offline"):
        push(finished.config, finished.run, REPO)


def test_damaged_weights_are_not_published(finished, hub):
    file = finished.run.adapter / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="adapter_model.safetensors has changed"):
        push(finished.config, finished.run, REPO)
    assert not hub.asked


def test_a_card_with_a_token_in_it_is_not_published(finished, hub):
    (finished.run.adapter / "README.md").write_text(f"use hf_{'a' * 30}")
    with pytest.raises(
        ConfigError, match=r"README.md contains an access token \(hf_...\), which would be published"
    ):
        push(finished.config, finished.run, REPO)
    assert not hub.asked


def test_a_card_whose_metadata_is_wrong_is_said(finished, hub):
    (finished.run.adapter / "README.md").write_text("---\nbad: [\n---\n")
    with pytest.raises(ConfigError, match="the metadata is no YAML.*correct README.md"):
        push(finished.config, finished.run, REPO)
    assert not hub.repositories[REPO].files

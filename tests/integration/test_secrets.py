"""A run leaves no token and no file that others can read."""

import logging
import os
import sys
import warnings

import pytest
import transformers

from tests.integration.cli import sft

pytestmark = pytest.mark.integration

HUGGING_FACE = "hf_" + "pLaNtEd" * 5
WANDB = "abcdef0123456789" * 2 + "abcdef01"  # known by its variable alone


@pytest.fixture
def talkative_library(monkeypatch):
    """Libraries that print, log and warn about what they connect with, while the model is trained."""
    real = transformers.Trainer.create_optimizer

    def create_optimizer(self, *args):
        for secret in (os.environ["HF_TOKEN"], os.environ["WANDB_API_KEY"]):
            os.write(1, f"from C++: {secret}\n".encode())
            sys.stderr.write(f"Authorization: Bearer {secret}\n")
            logging.getLogger("huggingface_hub").warning("retrying with %s", secret)
            warnings.warn(f"key {secret} is old", stacklevel=1)
        return real(self, *args)

    monkeypatch.setattr(transformers.Trainer, "create_optimizer", create_optimizer)


@pytest.mark.thorough
def test_no_file_of_a_run_has_a_token_or_can_be_read_by_others(
    finished, one_thread, talkative_library, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", HUGGING_FACE)
    monkeypatch.setenv("WANDB_API_KEY", WANDB)
    before = os.umask(0o077)
    try:
        words = ("train.max_steps=2", f"output.dir={tmp_path / 'runs'}")
        done = sft("train", "--config", finished.config, *words)
    finally:
        os.umask(before)
    assert done.code == 0, done.err
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    text = {path: path.read_bytes() for path in files}
    assert b"from C++: ***" in b"".join(text.values())  # the library was heard
    for secret in (HUGGING_FACE, WANDB):
        assert [path for path in files if secret.encode() in text[path]] == []
        assert secret not in done.out + done.err
    assert [path for path in (tmp_path / "runs").rglob("*") if path.stat().st_mode & 0o077] == []


def test_logs_are_for_their_owner_alone(finished):
    assert finished.run.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--config", "configs/demo.yaml", "data.train_path=https://user:PASS@host/a.jsonl"),
        ("plan", "--model", "https://user:PASS@host/model", "--gpu", "L4"),
        ("report", "https://user:PASS@host/run"),
        ("train", "--config", "https://user:PASS@host/a.yaml"),
        ("train", "https://user:PASS@host/a.yaml"),
        ("dapt-docx", "--input", "https://user:PASS@host/a", "--output", "x.jsonl"),
    ],
)
def test_a_password_in_an_address_is_never_shown(words):
    done = sft(*words)
    assert done.code == (8 if words[0] == "report" else 2), done.err
    assert "PASS" not in done.out + done.err


def test_a_token_on_the_command_line_is_refused_without_being_shown(finished):
    done = sft("train", "--config", finished.config, f"model.token={HUGGING_FACE}")
    assert done.code == 2 and HUGGING_FACE not in done.out + done.err
    assert (
        "override 1: contains an access token (hf_...); remove it and set it in the environment" in done.err
    )

"""Tokens are recognized by form and by value, and masked without moving a byte."""

import os
import re
import time
from pathlib import Path

import pytest

from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.runlog import RunDir
from sft_play.secrets import find_secret, redact, redact_file
from sft_play.ui.console import quiet_libraries, set_console, warn

# not written in one piece, so that scanners do not take them for real ones
TOKENS = [
    "hf_" + "aB3" * 12,
    "wandb_v1_" + "aB3" * 12,
    "sk-proj-" + "aB3" * 12,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 10,
    "AKIA" + "A1B2" * 4,
]
KEY = "0123456789abcdef0123456789abcdef01234567"  # of W&B: only its variable tells it from a commit
HARMLESS = [
    "use_cls_token: true",
    "hf_cache/models",
    "max_new_tokens=256",
    KEY,
    "data/sk-learn-conversations-of-the-second-round.jsonl",
    "Qwen/Qwen3-8B",
    "tokenizer_config.json",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_found_and_masked_wherever_it_stands(token):
    for around in ("{}", "token={}", "Bearer {}\n", '{{"key": "{}"}}', "https://u:{}@host"):
        text = around.format(token)
        what = find_secret(text, {})
        assert what and token not in what, text
        assert redact(text, {}) == around.format("*" * len(token))


def test_what_only_resembles_a_token_is_left_alone():
    taken = [text for text in HARMLESS if find_secret(text, {"HOME": "/root"}) or redact(text, {}) != text]
    assert not taken, taken


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "TOKEN"]
)
def test_the_value_of_a_secret_variable_is_a_secret_in_any_form(name):
    environment = {name: KEY, "TOKENIZERS_PARALLELISM": "somewhere", "PATH": "elsewhere"}
    assert find_secret(f"x{KEY}y", environment) == f"the value of {name}"
    assert redact(f"x{KEY}y somewhere elsewhere", environment) == f"x{'*' * 40}y somewhere elsewhere"


def test_a_value_that_is_too_short_to_be_a_secret_is_none():
    assert find_secret("step 1234567", {"HF_TOKEN": "1234567"}) is None


IN_ADDRESSES = [
    ("https://user:{}@host/a.jsonl", "PASS"),
    ("https://user:{}@host:8080", "p@ss:w%rd"),
    ("runs/https:/user:{}@host/a does not exist", "PASS"),  # as a Path has it
    ("ConnectError: http://:{}@proxy:3128 refused", "short"),
    ("s3://key:{}@bucket", "a+b="),
    ("https://{}@host/x", "token"),
    ("https://bucket.host/a.parquet?X-Amz-Date=2026&X-Amz-Signature={}&x=1", "abc123"),
    ('{{"path": "https://host/a?access_token={}"}}', "abc%2F"),
    ("redis://user:{}@host", "pässwort"),
]


@pytest.mark.parametrize(("text", "secret"), IN_ADDRESSES)
def test_a_password_in_an_address_is_found_and_masked(text, secret):
    assert find_secret(text.format(secret), {}) == "a password or a token in an address"
    assert redact(text.format(secret), {}) == text.format("*" * len(secret.encode()))


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8080/@scope/package", "https://host/a@b:c@d", "git+ssh://git@host/a.git", "user:x@host",
        '{"a":"http://host:80","b":"me@host"}', "https://host/?page=2&next=3", "file:///home/me@work/a.jsonl",
    ],
)  # fmt: skip
def test_an_address_without_a_password_is_left_alone(text):
    assert find_secret(text, {}) is None and redact(text, {}) == text


def test_long_texts_without_addresses_take_no_time():
    began = time.process_time()
    for text in ("a" * 10**6, "://" * 10**5, "?" * 10**5 + "token" * 10**4, "://a:" * 10**5 + "@"):
        redact(text, {})
    assert time.process_time() - began < 5


def test_the_longer_of_two_secrets_is_masked_whole():
    environment = {"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh12345678"}
    assert redact("<abcdefgh12345678>", environment) == f"<{'*' * 16}>"


def test_a_log_is_masked_in_place_while_another_process_appends_to_it(tmp_path):
    log = tmp_path / "log.txt"
    before = f"ü first\nget {TOKENS[0]}\n".encode() + b"\xff raw\n"
    log.write_bytes(before)
    with log.open("ab") as other:
        redact_file(log, {})
        other.write(b"last\n")
    masked = b"*" * len(TOKENS[0])
    assert log.read_bytes() == before.replace(TOKENS[0].encode(), masked) + b"last\n"


def test_a_value_that_is_not_ascii_is_masked_byte_by_byte(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("<pässwörter>", encoding="utf-8")
    redact_file(log, {"DB_PASSWORD": "pässwörter"})
    assert log.read_text(encoding="utf-8") == f"<{'*' * 12}>"


def test_a_log_that_does_not_exist_needs_no_masking(tmp_path):
    redact_file(tmp_path / "log.txt")
    assert not list(tmp_path.iterdir())


def test_what_libraries_print_is_masked_when_the_command_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("SFT_PLAY_VERBOSE", raising=False)
    with quiet_libraries(tmp_path / "log.txt"):
        os.write(2, f"connecting with {KEY} and {TOKENS[0]}\n".encode())
    assert (tmp_path / "log.txt").read_text() == f"connecting with {'*' * 40} and {'*' * len(TOKENS[0])}\n"


def test_results_are_written_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEY)
    RunDir(tmp_path).write_json(tmp_path / "summary.json", {"error": f"401 for {KEY}", "steps": 3})
    assert KEY not in (tmp_path / "summary.json").read_text()


def config(folder: Path, text: str = "") -> Path:
    file = folder / "run.yaml"
    file.write_text(f"model: {{name: m}}\ndata: {{train_path: t}}\n{text}")
    return file


@pytest.mark.parametrize("token", TOKENS)
def test_a_config_with_a_token_is_refused_without_showing_it(tmp_path, token):
    with pytest.raises(
        ConfigError, match=r"run\.yaml, line 3: contains an access token .* in the environment"
    ) as error:
        load_config(config(tmp_path, f"# token: {token}\n"))
    assert token not in str(error.value)


def test_an_included_config_is_searched_too(tmp_path):
    config(tmp_path, f"output: {{dir: {TOKENS[0]}}}\n")
    (tmp_path / "over.yaml").write_text("include: run.yaml\n")
    with pytest.raises(ConfigError, match=r"run\.yaml, line 3"):
        load_config(tmp_path / "over.yaml")


@pytest.mark.parametrize("key", ["model.name", "data.train_path", "output.dir"])
def test_a_config_with_a_password_in_an_address_is_refused_without_showing_it(tmp_path, key):
    with pytest.raises(
        ConfigError, match="override 1: contains a password or a token in an address"
    ) as error:
        load_config(config(tmp_path), [f"{key}=https://user:PASS@host/x"])
    assert "PASS" not in str(error.value)


def test_a_warning_shows_no_password(capsys):
    set_console(None)
    warn("the Hub is not reachable: http://me:PASS@proxy:3128")
    assert "http://me:****@proxy:3128" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["model.token={}", "{}", "data.system_prompt='key: {}'"])
def test_an_override_with_a_token_is_refused_without_showing_it(tmp_path, override):
    with pytest.raises(ConfigError, match="override 2: contains an access token") as error:
        load_config(config(tmp_path), ["train.seed=1", override.format(TOKENS[0])])
    assert not re.search("aB3", str(error.value))


def test_the_value_of_a_variable_is_refused_in_a_config(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(ConfigError, match="contains the value of WANDB_API_KEY"):
        load_config(config(tmp_path), [f"model.revision={KEY}"])

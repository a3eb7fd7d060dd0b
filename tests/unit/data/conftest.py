"""A tokenizer that is trained in milliseconds, and files of rows."""

import json
import string

import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare

SPECIAL = [
    "<|endoftext|>",
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
SENTENCES = [
    "What is two plus two? It is four.",
    "And three plus two? Five it is.",
    "You are brief. Hello there, friend!",
]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Nothing that another test has tokenized is found."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


def _train(kind: str):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<|endoftext|>"))
    if kind == "bytes":  # as GPT-2, Llama 3, Qwen
        raw.pre_tokenizer, raw.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # as Llama 2, Mistral, Gemma: a word carries the space before it
        raw.pre_tokenizer, raw.decoder = (
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            decoders.Metaspace(prepend_scheme="first"),
        )
        alphabet = sorted(set(string.ascii_letters + "".join(SENTENCES) + "#:\n\"'<>_/|[]{}.0123456789"))
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(SENTENCES * 3, trainer)
    return raw


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def raw_tokenizer(request):
    return _train(request.param)


@pytest.fixture(scope="session")
def byte_tokenizer():
    return _train("bytes")


def _wrap(raw, template=None, **special):
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def make_tokenizer(byte_tokenizer):
    """`make_tokenizer(template, raw=None, eos_token=...)`."""
    return lambda template=None, raw=None, **special: _wrap(raw or byte_tokenizer, template, **special)


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows as JSONL and returns the path; text and bytes are written as they are."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            path.write_text(
                rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
            )
        return path

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def run(cache, write_rows, make_tokenizer):
    """`run(rows, max_seq_len=..., **data settings)` prepares rows with a fresh tokenizer."""

    def run(train, max_seq_len="auto", seed=0, model_limit=None, tokenizer=None, day=None, **data):
        config = RunConfig.model_validate(
            {
                "model": {"name": "toy", "max_seq_len": max_seq_len},
                "data": {"train_path": str(write_rows(train)), **data},
                "train": {"seed": seed},
            }
        )
        tokenizer = tokenizer or make_tokenizer()
        return prepare(config, tokenizer, model_limit=model_limit, progress=False, day=day)

    return run

"""Raw text: documents joined with the end token and cut, every token learned once."""

import numpy as np
import pytest

from sft_play.config.schema import RunConfig
from sft_play.data import reading
from sft_play.data.length import block_tokens
from sft_play.data.prepare import prepare
from sft_play.data.reading import read_rows, sections
from sft_play.data.sources import open_source
from sft_play.errors import ConfigError, DataError
from sft_play.parts import IGNORED

pytestmark = pytest.mark.usefixtures("own_cache")

WORDS = "What is two plus three? It is five. Hello there, friend!"


@pytest.fixture
def run(make_tokenizer):
    def run(path, task="cpt", max_seq_len=32, model_limit=None, tokenizer=None, **data):
        tree = {
            "model": {"name": "toy", "max_seq_len": max_seq_len},
            "data": {"train_path": str(path), "task": task, "val_fraction": 0.0, **data},
        }
        config = RunConfig.model_validate(tree)
        return prepare(config, tokenizer or make_tokenizer(), model_limit=model_limit, progress=False)

    return run


def joined(dataset):
    return [token for ids in dataset["input_ids"] for token in ids]


def test_documents_are_joined_with_the_end_token_and_cut_and_no_token_is_lost(
    run, write_rows, make_tokenizer
):
    texts = [f"{number} {WORDS} " * (1 + number % 3) for number in range(40)]
    data = run(write_rows([{"text": text} for text in texts]))
    tokenizer = make_tokenizer()
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert joined(data.train) == expected
    assert set(data.train["length"][:-1]) == {32} and data.train["length"][-1] <= 32
    for row in data.train:
        assert row["labels"] == [IGNORED, *row["input_ids"][1:]]
    stats = data.stats["train"]
    assert stats["conversations"] == 40 and stats["tokens"] == len(expected)
    assert stats["supervised_tokens"] == len(expected) - stats["rows"]
    assert data.max_seq_len == 32 and not any("rewrites" in warning for warning in data.stats["warnings"])


def test_a_tokenizer_that_writes_begin_and_end_tokens_writes_them_once_a_document(
    run, write_rows, byte_tokenizer, make_tokenizer, monkeypatch
):
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    monkeypatch.setattr(reading, "SECTION_CHARACTERS", 60)
    raw = deepcopy(byte_tokenizer)
    ids = {token: raw.token_to_id(token) for token in ("<s>", "</s>")}
    raw.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=list(ids.items()))
    tokenizer = make_tokenizer(raw=raw, bos_token="<s>", eos_token="</s>")
    data = run(write_rows([{"text": f"{WORDS}\n" * 3}, {"text": "five"}]), tokenizer=tokenizer)
    found = joined(data.train)
    assert found.count(ids["<s>"]) == found.count(ids["</s>"]) == 2
    assert data.stats["train"]["conversations"] == 4
    assert tokenizer.decode(found) == f"<s>{WORDS}\n{WORDS}\n{WORDS}\n</s><s>five</s>"


def test_held_out_documents_are_joined_by_themselves(run, write_rows, make_tokenizer):
    texts = [f"{number} {WORDS}" for number in range(40)]
    data = run(write_rows([{"text": text} for text in texts]), val_fraction=0.25)
    decoded = [
        make_tokenizer().decode(joined(rows)).split("<|endoftext|>")[:-1] for rows in (data.train, data.val)
    ]
    assert [len(part) for part in decoded] == [30, 10] and sorted(decoded[0] + decoded[1]) == sorted(texts)
    assert list(data.conversations("val")) == []


def test_chat_and_raw_text_are_mixed_each_in_its_way(write_rows, make_tokenizer):
    chats = [{"question": f"{number}?", "answer": "It is five."} for number in range(20)]
    chat, text = write_rows(chats), write_rows([{"text": WORDS}] * 20, "text.jsonl")
    tree = {
        "model": {"name": "toy", "max_seq_len": 64},
        "data": {
            "task": "mixed", "val_fraction": 0.0, "supervise": "last",
            "sources": [{"path": str(chat)}, {"path": str(text), "weight": 2}],
        },
    }  # fmt: skip
    data = prepare(RunConfig.model_validate(tree), make_tokenizer(), progress=False)
    first, second = data.stats["train"]["sources"]
    assert first["rows"] == 20 and first["supervised_tokens"] < first["tokens"] / 2
    assert second["supervised_tokens"] == second["tokens"] - second["rows"]
    rows = [row for row in data.train if row["length"] == 64]
    assert len(rows) == second["rows"] - 1 and data.max_seq_len == 64


def test_auto_cuts_raw_text_at_2048_tokens_or_at_what_the_model_supports(write_rows):
    config = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "t", "task": "cpt"}})
    assert [block_tokens(config.model, limit) for limit in (None, 131072, 512)] == [2048, 2048, 512]
    asked = config.model_copy(update={"model": config.model.model_copy(update={"max_seq_len": 8192})})
    assert block_tokens(asked.model, 8192) == 8192


def test_asking_for_as_many_tokens_as_the_model_supports_is_not_auto(run, write_rows):
    path = write_rows([{"text": WORDS * 300}])
    auto, asked = (run(path, max_seq_len=limit, model_limit=4096) for limit in ("auto", 4096))
    assert (auto.stats["train"]["lengths"]["max"], asked.stats["train"]["lengths"]["max"]) == (2048, 4096)


def test_rows_of_one_token_are_refused_since_nothing_could_be_learned(write_rows, make_tokenizer):
    data = {"train_path": str(write_rows([{"text": "What is two plus two?"}] * 20)), "task": "cpt"}
    config = RunConfig.model_validate({"model": {"name": "toy", "max_seq_len": 1}, "data": data})
    with pytest.raises(ConfigError, match="max_seq_len=1 cuts raw text into rows of one token"):
        prepare(config, make_tokenizer(), progress=False)


def test_a_format_of_conversations_is_refused_for_text_files(write_rows, make_tokenizer):
    path = write_rows("What is two plus two?", "notes.txt")
    for task in ("sft", "cpt", "mixed"):
        data = {"train_path": str(path), "task": task, "format": "messages"}
        config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data})
        with pytest.raises(ConfigError, match=r"notes.txt is a text file, which has no messages rows"):
            prepare(config, make_tokenizer(), progress=False)


def test_sections_end_at_lines_or_words_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(reading, "SECTION_CHARACTERS", 50)
    text = "\n".join(f"{'word ' * (number % 23)}{number}" for number in range(60)) + "x" * 170
    for size in (7, 1000, len(text)):
        blocks = [text[start : start + size] for start in range(0, len(text), size)]
        found = list(sections(blocks))
        assert "".join(section for section, _ in found) == text
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
        assert max(len(section) for section, _ in found) <= 50
    assert list(sections(["  \n", " "])) == []
    assert list(sections(["a" * 50, "\n" * 90])) == [("a" * 50, True)]


def test_a_long_file_is_read_in_sections_that_know_their_line(tmp_path, run, monkeypatch, make_tokenizer):
    monkeypatch.setattr(reading, "SECTION_CHARACTERS", 100)
    file = tmp_path / "book.txt"
    text = "".join(f"{number} {WORDS}\n" for number in range(30))
    file.write_text(text)
    rows = list(read_rows(open_source(str(file), "train")))
    assert [row.begins for row in rows] == [True] + [False] * (len(rows) - 1)
    assert all(row.data["text"].startswith(f"{row.line - 1} ") for row in rows)
    data = run(file)
    assert make_tokenizer().decode(joined(data.train)) == text + "<|endoftext|>"
    held = run(file, val_fraction=0.2)  # of one document, sections are held out
    assert len(held.val) and held.stats["train"]["tokens"] + held.stats["val"]["tokens"] == len(
        joined(data.train)
    )


@pytest.mark.parametrize(
    ("rows", "name", "task", "said"),
    [
        (
            [{"question": "q", "answer": "a"}] * 20,
            "a.jsonl",
            "cpt",
            "has question_answer rows, but data.task=cpt",
        ),
        ("hello", "a.txt", "sft", "a.txt is raw text, but data.task=sft"),
        ("hello", "a.md", "sft", "Set data.task=cpt"),
    ],
)
def test_data_that_does_not_fit_the_task_is_refused_with_the_task_that_does(
    write_rows, run, rows, name, task, said
):
    with pytest.raises(ConfigError, match=said) as error:
        run(write_rows(rows, name), task)
    assert str(error.value).startswith("data.train_path: ")


def test_blank_documents_are_dropped_and_a_blank_file_is_an_error(run, write_rows):
    data = run(write_rows([{"text": " "}, *[{"text": WORDS}] * 20]))
    assert data.stats["train"]["dropped"] == {"blank text": 1}
    with pytest.raises(DataError, match="has no rows"):
        run(write_rows(" \n ", "blank.txt"))


def test_several_processes_cut_the_same_rows(run, write_rows):
    path = write_rows([{"text": f"{number} {WORDS}"} for number in range(1500)])
    one, two = run(path, num_workers=1), run(path, num_workers=2, limit=1500)
    assert joined(one.train) == joined(two.train) and one.cache_path != two.cache_path
    assert np.array_equal(one.train["length"], two.train["length"])

import io
import json

import pytest
from rich.console import Console

from sft_play.config.schema import RunConfig
from sft_play.data import show
from sft_play.data.prepare import prepare
from sft_play.errors import ConfigError, DataError, StorageError
from sft_play.ui.console import set_console

ROWS = [{"question": f"What is {i}?", "answer": f"It is [{i}]."} for i in range(40)]


@pytest.fixture
def config(write_rows):
    path = write_rows([*ROWS, {"question": "q", "answer": ""}])
    return RunConfig.model_validate({"model": {"name": "toy"}, "data": {"train_path": str(path)}})


@pytest.fixture
def screen():
    """A console of which the text can be read."""

    def make(**kwargs):
        made = Console(file=io.StringIO(), width=120, highlight=False, **kwargs)
        set_console(made)
        return made

    yield make
    set_console(None)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_shows_counts_reasons_and_warnings(config, make_tokenizer, screen):
    data = prepare(config, make_tokenizer(), progress=False)
    made = screen()
    made.print(show.table(data))
    text = made.file.getvalue()
    supervised = 100 * data.stats["train"]["supervised_tokens"] / data.stats["train"]["tokens"]
    for expected in (
        "dropped from train: 1 row (blank assistant turn)",
        f"{supervised:.1f}%",
        "99th percentile",
        "the shipped plain.jinja",
    ):
        assert expected in text
    assert "warning: only" not in text


def test_samples_come_from_each_source(write_rows, make_tokenizer, screen):
    paths = [str(write_rows(ROWS[:20], "a.jsonl")), str(write_rows(ROWS[20:], "b.jsonl"))]
    settings = {"sources": [{"path": path} for path in paths]}
    tokenizer = make_tokenizer()
    data = prepare(
        RunConfig.model_validate({"model": {"name": "toy"}, "data": settings}), tokenizer, progress=False
    )
    made = screen(soft_wrap=True)
    show.print_samples(data, tokenizer, 2)
    heads = [line for line in made.file.getvalue().splitlines() if line.startswith("row ")]
    assert [line.partition(":")[0] for line in heads] == [
        f"row {n} of {path}" for path in paths for n in (1, 2)
    ]
    for line in ("What is 0?", "What is 20?"):
        assert line in made.file.getvalue()


def test_samples_mark_supervised_tokens_with_brackets_or_with_colour(config, make_tokenizer, screen):
    tokenizer = make_tokenizer()
    data = prepare(config, tokenizer, progress=False)
    plain, coloured = screen(), None
    show.print_samples(data, tokenizer, 2)
    text = plain.file.getvalue()
    assert "between {+ and +}" in text
    assert "### Assistant:\n{+It is [" in text
    assert text.count("<|endoftext|>+}") == 2
    coloured = screen(force_terminal=True, color_system="standard")
    show.print_samples(data, tokenizer, 1)
    assert "\x1b[1;32mIt is [" in coloured.file.getvalue()
    assert "{+" not in coloured.file.getvalue()


def test_the_three_steps_write_what_the_next_one_reads(config, make_tokenizer, tmp_path):
    processed, styled, rendered = (
        tmp_path / "out" / f"{name}.jsonl" for name in ("processed", "styled", "rendered")
    )
    assert show.process(config, processed) == {"written": 40, "dropped: blank assistant turn": 1}
    assert read(processed)[0]["messages"][1] == {"role": "assistant", "content": "It is [0]."}
    assert show.style(processed, styled, "Be brief.") == {"written": 40}
    assert read(styled)[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    left = "unchanged (plain text, or with a system message of their own)"
    assert show.style(styled, tmp_path / "again.jsonl", "Be long.") == {"written": 40, left: 40}
    tokenizer = make_tokenizer()
    assert show.render(config, tokenizer, styled, rendered) == {"written": 40}
    first = read(rendered)[0]
    assert first["text"].startswith("### System:\nBe brief.\n\n### User:\nWhat is 0?")
    assert first["learned"] == ["It is [0].<|endoftext|>"]
    assert first["source"].endswith("styled.jsonl:1")


def test_the_rendered_text_is_the_text_of_the_tokens(config, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    data = prepare(config, tokenizer, progress=False)
    show.process(config, tmp_path / "p.jsonl")
    show.render(config, tokenizer, tmp_path / "p.jsonl", tmp_path / "r.jsonl")
    known = {row["text"] for row in read(tmp_path / "r.jsonl")}
    assert {tokenizer.decode(ids) for ids in data.train["input_ids"]} < known


def test_a_blank_style_is_refused_and_a_failed_step_leaves_no_file(config, write_rows, tmp_path):
    with pytest.raises(ConfigError, match="make style STYLE="):
        show.style(write_rows(ROWS), tmp_path / "styled.jsonl", " ")
    bad = write_rows([*ROWS, {"question": 5, "answer": "a"}], "bad.jsonl")
    with pytest.raises(DataError, match=r"bad.jsonl:41: question is 5"):
        show.style(bad, tmp_path / "styled.jsonl", "x")
    assert not list(tmp_path.glob("*styled*"))


def test_a_file_that_cannot_be_written_is_one_sentence(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file/p.jsonl: "):
        show.process(config, tmp_path / "file" / "p.jsonl")

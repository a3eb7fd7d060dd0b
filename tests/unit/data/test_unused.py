"""What a row holds beside what is trained on: refused, or named with its count."""

import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from sft_play.errors import DataError
from sft_play.rows.formats import FORMATS, convert, detect_format
from sft_play.rows.json_files import Row
from sft_play.rows.unused import unused_keys

USER, ANSWER = {"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "Four."}
MESSAGES = {"messages": [USER, ANSWER]}
THINKS = {"messages": [USER, {**ANSWER, "reasoning_content": "Two and two.\nIt is even."}]}
SHOWS_NO_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWS_IT_LAST = SHOWS_NO_REASONING.replace(
    "{{ m.content }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
)


@pytest.fixture
def warnings_of(write_rows, make_tokenizer, tmp_path, monkeypatch):
    """`warnings_of(rows, template=...)`: the warnings about keys, reasoning and media."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))

    def found(rows, template=None, **data):
        data = {"train_path": str(write_rows(rows)), "val_fraction": 0, **data}
        config = RunConfig.model_validate({"model": {"name": "toy"}, "data": data})
        stats = prepare(config, make_tokenizer(template), progress=False).stats
        words = ("not used", "reasoning", "<image>")
        return [line for line in stats["warnings"] if any(one in line for one in words)]

    return found


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({**MESSAGES, "videos": ["cat.mp4"]}, "videos is a list"),
        ({**MESSAGES, "audios": ["cat.wav"]}, "audios is a list"),
        ({"instruction": "q", "output": "a", "audio": "cat.wav"}, "audio is 'cat.wav'"),
        ({"messages": [{**USER, "videos": ["cat.mp4"]}, ANSWER]}, r"messages\[0\].videos is a list"),
    ],
)
def test_rows_with_video_or_audio_are_refused(data, key):
    row = Row(data, "f.jsonl", 7)
    with pytest.raises(DataError, match=rf"^f.jsonl:7: {key}.*not supported.*remove the key") as caught:
        convert(row, detect_format(row))
    assert "\n" not in str(caught.value)


def test_empty_lists_of_images_are_no_images():
    row = Row({**MESSAGES, "images": [], "videos": None, "image": "", "audio": False}, "f.jsonl", 7)
    assert not isinstance(convert(row, "messages"), str)


def test_placeholders_of_media_that_a_row_lacks_are_counted(warnings_of):
    shown = {"instruction": "<image>\nWhat is this?", "output": "a cat"}
    plain = {"instruction": "What is <img>?", "output": "an element"}
    (line,) = warnings_of([shown, plain, shown])
    assert line.startswith("data.train_path: 2 rows with <image>, <video> or <audio> in the text: ")
    assert "trained as plain text" in line and warnings_of([plain]) == []
    (line,) = warnings_of([{"messages": [USER, {**ANSWER, "content": "Hear: <audio>"}]}])
    assert "1 row with" in line


def test_each_format_says_which_of_its_keys_are_read():
    every = {"tools": [{}], "system": "s", "input": "i", "history": [["q", "a"]], "source": "s"}
    for known in FORMATS.values():
        data = dict.fromkeys(known.keys, "x") | every
        assert unused_keys(data, known.keys, known.others) == every.keys() - set(known.others)
    listed = {"prompt": [USER], "completion": [ANSWER], "system": "s"}
    known = FORMATS["prompt_completion"]
    assert unused_keys(listed, known.keys, known.others) == {"system"}


def test_a_system_prompt_beside_messages_and_an_old_function_call_are_named_with_their_counts(warnings_of):
    call = {**ANSWER, "function_call": {"name": "add", "arguments": "{}"}}
    rows = [{**MESSAGES, "system": "Be brief.", "id": 3}] * 2 + [{"messages": [USER, call], "system": ""}]
    assert warnings_of(rows) == [
        "data.train_path: keys of its 3 rows that are not used: "
        "id (2 rows), system (2 rows), messages[].function_call (1 row)"
    ]
    assert warnings_of([MESSAGES, {**MESSAGES, "tools": []}]) == []


def test_of_many_unused_keys_the_most_frequent_are_named(warnings_of):
    rows = [{**MESSAGES, f"key{number}": "x", "score": 0.5} for number in range(30)]
    (line,) = warnings_of(rows)
    assert line.count("(1 row)") == 9 and "score (30 rows)" in line and line.endswith(", 21 more")


def test_reasoning_that_the_template_leaves_out_is_named_with_what_to_do(warnings_of):
    (line,) = warnings_of([THINKS, MESSAGES, THINKS], SHOWS_NO_REASONING)
    assert line.startswith("data.train_path: 2 conversations with reasoning that the chat template does not")
    assert "data.chat_template=plain" in line
    assert warnings_of([THINKS, MESSAGES], SHOWS_NO_REASONING, chat_template="plain") == []
    assert warnings_of([MESSAGES], SHOWS_NO_REASONING) == []


def test_reasoning_that_is_left_out_of_history_only_is_no_reason_to_warn(warnings_of):
    twice = {"messages": [*THINKS["messages"], *THINKS["messages"]]}
    assert warnings_of([twice], SHOWS_IT_LAST) == []
    assert warnings_of([twice], SHOWS_IT_LAST, supervise="last") == []
    assert len(warnings_of([twice], SHOWS_NO_REASONING)) == 1

"""Rows that are not valid are all named at once, or left out and listed."""

import json

import pytest

from sft_play.data.bad_rows import SHOWN
from sft_play.errors import DataError

GOOD = [json.dumps({"question": f"{i} What?", "answer": f"{i} Four."}) for i in range(40)]
WITH_BAD = "\n".join(
    [
        "garbage",
        *GOOD[:2],
        '{"question": "", "answer": "a"}',
        *GOOD[2:4],
        "[1]",
        '{"question": "What?"}',
        *GOOD[4:],
        '{"question": "cut',
    ]
)
REJECTING = (
    "{% for m in messages %}{% if 'Six' in m.content %}{{ raise_exception('no sixes') }}{% endif %}"
    + (
        "{{ m.role + ': ' + m.content + '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
)


def said(run, train, **settings):
    with pytest.raises(DataError) as caught:
        run(train, **settings)
    return str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_are_named_in_one_error(run, workers):
    message = said(run, WITH_BAD, num_workers=workers)
    first, *lines, last = message.split("\n")
    assert first == "data.train_path: 5 of 45 rows are not valid:"
    places = [line.partition(" ")[0].removesuffix(":").rpartition(":")[2] for line in map(str.strip, lines)]
    assert places == ["1", "4", "7", "8", "45"]
    assert "not valid JSON" in lines[0]
    assert "question is an empty string" in lines[1]
    assert "found a list" in lines[2]
    assert "key 'answer' is missing" in lines[3]
    assert "is the file truncated?" in lines[4]
    assert last == 'Correct them, or leave them out: ARGS="data.bad_rows=drop"'


def test_a_row_of_messages_that_are_none_is_one_of_them(run):
    rows = [
        {"messages": ["text"]},
        *(
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "a"}]}
            for i in range(40)
        ),
    ]
    message = said(run, "\n".join(map(json.dumps, rows)))
    assert "1 of 41 rows is not valid" in message and "messages[0] is 'text'" in message


def test_of_many_the_first_are_named_and_all_are_counted(run):
    message = said(run, "\n".join([*GOOD, *["{}"] * 500]))
    assert message.startswith("data.train_path: 500 of 540 rows are not valid; the first 20:\n")
    (line,) = message.split("\n")[1:-1]  # their cause is said once
    places = ", ".join(str(number) for number in range(41, 41 + SHOWN))
    assert f"rows.jsonl:{places}: " in line and "key 'question' is missing" in line
    none = "\n".join(['{"question": "", "answer": "Four."}'] * 30)
    assert said(run, none).endswith("Correct them; there are no other rows")


def test_those_that_the_template_rejects_are_named_with_the_others(run, make_tokenizer):
    train = "\n".join([GOOD[0], "garbage", *(GOOD[1].replace("Four", "Six"),) * 2, *GOOD[2:]])
    lines = said(run, train, tokenizer=make_tokenizer(REJECTING)).split("\n")  # two for the same reason
    assert [
        line.count("garbage") + line.count("no sixes") + line.count("not valid JSON") for line in lines
    ] == [0, 1, 1, 0]


def test_dropped_ones_are_counted_and_listed_and_the_rest_is_as_without_them(run):
    without = run("\n".join(GOOD))
    data = run(WITH_BAD, bad_rows="drop")
    assert data.train["input_ids"] == without.train["input_ids"]
    assert data.stats["train"]["dropped"] == {"not valid": 5}
    (warning,) = [each for each in data.stats["warnings"] if "not valid" in each]
    listed = data.cache_path / "bad_rows.txt"
    assert warning == f"5 rows left out as not valid: see {listed}"
    assert [line.partition(": ")[0].rpartition(":")[2] for line in listed.read_text().splitlines()] == [
        "1",
        "4",
        "7",
        "8",
        "45",
    ]


def test_data_of_bad_rows_alone_cannot_be_used(run):
    message = said(run, "garbage\n" * 3)
    assert "not valid JSON" in message
    message = said(run, "{}\n" * 3, format="question_answer", bad_rows="drop")
    assert "none of the 3 rows is usable (not valid: 3)" in message


def test_those_of_all_paths_are_named_in_one_error(run, write_rows):
    other = write_rows("\n".join([GOOD[0], "{}"]), "val.jsonl")
    message = said(run, WITH_BAD, val_path=str(other))
    assert message.startswith("data.train_path, data.val_path: 6 of 47 rows are not valid:\n")
    assert "val.jsonl:2: key 'question' is missing" in message

"""The forms of pictures in rows, as marks in texts and references beside them."""

import base64

import pytest

from sft_play.errors import DataError
from sft_play.rows.formats import FORMATS, convert, detect_format
from sft_play.rows.images import MARK
from sft_play.rows.json_files import Row
from sft_play.rows.unused import unused_keys

ANSWER = {"role": "assistant", "content": "A cat."}
URL = "https://example.org/cat.jpg"


def converted(data):
    row = Row(data, "rows.jsonl", 3)
    return convert(row, detect_format(row))


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


TEXT = {"type": "text", "text": "What is it?"}
MARKED = f"{MARK}What is it?"
FORMS = {
    "OpenAI": (asked({"type": "image_url", "image_url": {"url": URL}}, TEXT), MARKED, [URL]),
    "OpenAI, its URL as a text": (asked({"type": "image_url", "image_url": URL}, TEXT), MARKED, [URL]),
    "Qwen": (asked({"type": "image", "image": "cat.jpg"}, TEXT), MARKED, ["cat.jpg"]),
    "transformers": (asked({"type": "image", "path": "cat.jpg"}, TEXT), MARKED, ["cat.jpg"]),
    "TRL": (
        {**asked(TEXT, {"type": "image"}, {"type": "image"}), "images": ["a.png", {"bytes": b"b"}]},
        f"What is it?{MARK}{MARK}",
        ["a.png", b"b"],
    ),
    "LLaMA-Factory": (
        {"messages": [{"role": "user", "content": "Is <image> it?"}, ANSWER], "images": ["a.png"]},
        f"Is {MARK} it?",
        ["a.png"],
    ),
    "LLaMA-Factory, Alpaca": (
        {"instruction": "<image>What?", "input": "Or <image>", "output": "It.", "images": ["a.png", "b.png"]},
        f"{MARK}What?\n\nOr {MARK}",
        ["a.png", "b.png"],
    ),
    "LLaVA": (
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}],
        },
        f"{MARK}\nq",
        ["a.png"],
    ),
    "ms-swift, without a place": (
        {"question": "q", "answer": "a", "images": ["a.png"]},
        f"{MARK}q",
        ["a.png"],
    ),
    "Ollama": (
        {"messages": [{"role": "user", "content": "q", "images": ["a.png", "b.png"]}, ANSWER]},
        f"{MARK}{MARK}q",
        ["a.png", "b.png"],
    ),
    "a column of datasets.Image": (
        {"question": "q", "answer": "a", "image": {"bytes": b"png", "path": "x.png"}},
        f"{MARK}q",
        [b"png"],
    ),
    "a prompt of parts": (
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}],
            "completion": [ANSWER],
            "image": "a.png",
        },
        MARKED,
        ["a.png"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_as_marks_and_references(name):
    data, text, found = FORMS[name]
    known = FORMATS[detect_format(Row(data, "rows.jsonl", 3))]
    assert unused_keys(data, known.keys, known.others) == set()
    first, *rest = converted(data).messages
    assert (first["content"], first["images"]) == (text, found)
    assert not any("images" in message for message in rest)


def test_pictures_of_several_turns_stay_in_their_order():
    turn = {"role": "user", "content": "Now <image>?"}
    row = converted({"messages": [turn, ANSWER, turn, ANSWER], "images": ["a.png", "b.png"]})
    assert [message.get("images") for message in row.messages] == [["a.png"], None, ["b.png"], None]


def test_parts_and_a_list_of_a_message_keep_their_order():
    content = [{"type": "text", "text": "<image> and "}, {"type": "image", "image": "b.png"}]
    row = converted({"messages": [{"role": "user", "content": content, "images": ["a.png"]}, ANSWER]})
    assert row.messages[0]["images"] == ["a.png", "b.png"]
    assert row.messages[0]["content"] == f"{MARK} and {MARK}"


def test_a_tag_in_a_row_without_pictures_is_text():
    row = converted({"question": "What is <image>?", "answer": "A tag."})
    assert row.messages[0] == {"role": "user", "content": "What is <image>?"}


def test_a_row_is_written_as_it_can_be_read_again():
    data, _, _ = FORMS["TRL"]
    row = converted(data)
    written = row.as_row()
    assert written["messages"][0]["content"] == "What is it?<image><image>"
    assert written["messages"][0]["images"][0] == "a.png"
    assert base64.b64decode(written["messages"][0]["images"][1].partition(",")[2]) == b"b"
    again = converted(written)
    assert again.messages[0]["content"] == row.messages[0]["content"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"question": "<image>", "answer": "a", "images": ["a", "b"]},
            "lists 2 images beside 1 <image> in its texts",
        ),
        (
            {**asked({"type": "image"}, TEXT), "images": ["a", "b"]},
            'lists 2 images beside 1 {"type": "image"} parts',
        ),
        (asked({"type": "image"}, TEXT), 'lists 0 images beside 1 {"type": "image"} parts'),
        (
            {"messages": [{"role": "user", "content": "<image>", "images": ["a", "b"]}, ANSWER]},
            "messages[0].images has 2 images, but its text has 1 <image>",
        ),
        (
            {"question": "q", "answer": "a", "images": [5]},
            "images[0] is 5; expected the path or URL of an image",
        ),
        ({"question": "q", "answer": "a", "image": {"path": ""}}, "image is an object"),
        ({"text": "t", "images": ["a.png"]}, "images belong to messages, not to plain text"),
        (asked({"type": "video", "video": "a.mp4"}, TEXT), "video and audio are not supported"),
    ],
)
def test_what_does_not_match_is_said_with_file_and_line(data, said):
    with pytest.raises(DataError) as caught:
        converted(data)
    assert str(caught.value).startswith("rows.jsonl:3: ") and said in str(caught.value)

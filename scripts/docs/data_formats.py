"""The example rows of docs/reference/data-formats.md, as they are trained on."""

import json
from itertools import chain
from typing import Any

from sft_play.builtin.models import byte_level_tokenizer
from sft_play.data.chat import Chat, make_chat
from sft_play.data.show import marked
from sft_play.data.template import use_template
from sft_play.data.tokens import encode
from sft_play.rows.formats import FORMATS, Conversation, convert
from sft_play.rows.json_files import Row

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
ASKED = {"role": "user", "content": "2+2?"}
# What is shown, its data.format, and the row
EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((known.title, name, known.example) for name, known in FORMATS.items()),
    (
        "several turns, one of them not learned",
        "messages",
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": "5", "train": False},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "No, 4."},
            ]
        },
    ),
    (
        "reasoning",
        "messages",
        {"messages": [ASKED, {"role": "assistant", "reasoning_content": "Count.", "content": "4"}]},
    ),
    (
        "a tool",
        "messages",
        {
            "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "sunny"},
                {"role": "assistant", "content": "Sunny."},
            ],
            "tools": [TOOL],
        },
    ),
)


def data_formats() -> str:
    """The table of formats, with the keys that identify each and those that it may have besides."""
    rows = ["| format | `data.format` | keys of a row | keys that it may have |", "|---|---|---|---|"]
    for name, known in FORMATS.items():
        chosen = f"`{name}`" + ("" if known.detected else ", never detected")
        keys, others = (", ".join(f"`{key}`" for key in keys) for keys in (known.keys, known.others))
        rows.append(f"| {known.title} | {chosen} | {keys} | {others} |")
    return "\n".join(rows)


def examples() -> str:
    """Example rows by the text that they become, with what carries loss between {+ and +}."""
    texts = (json.dumps(row) for _, _, row in EXAMPLES)
    tokenizer = byte_level_tokenizer(chain(texts, ["plain"]), 512, 512)
    use_template(tokenizer, "plain")
    chat = make_chat(tokenizer, "assistant")
    trained: dict[str, list[tuple[str, str]]] = {}
    for what, name, row in EXAMPLES:
        title = f"**{what[0].upper()}{what[1:]}** (`{name}`)"
        trained.setdefault(_trained(chat, name, row), []).append((title, json.dumps(row)))
    return "\n\n".join(_block(text, alike) for text, alike in trained.items())


def _trained(chat: Chat, name: str, row: dict[str, Any]) -> str:
    conversation = convert(Row(row, "example", 1), name)
    assert isinstance(conversation, Conversation)
    (rows,) = encode(chat, [conversation])
    (tokens,) = rows
    return marked(list(tokens.input_ids), list(tokens.labels), chat.tokenizer, colour=False).plain.strip()


def _block(text: str, alike: list[tuple[str, str]]) -> str:
    titles, rows = zip(*alike, strict=True)
    return "\n".join((", ".join(titles), "", "```", *rows, "", text, "```"))

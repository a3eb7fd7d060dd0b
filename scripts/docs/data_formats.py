"""The example rows of docs/guides/data.md, as they are trained on."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from sft_play.builtin.models import byte_level_tokenizer
from sft_play.data.chat import Chat, make_chat
from sft_play.data.formats import Conversation, convert
from sft_play.data.rows import Row
from sft_play.data.show import marked
from sft_play.data.template import use_template
from sft_play.data.tokens import encode

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
ASKED = {"role": "user", "content": "2+2?"}
# What is shown, its data.format, and the row
EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("OpenAI", "messages", {"messages": [ASKED, {"role": "assistant", "content": "4"}]}),
    (
        "ShareGPT",
        "sharegpt",
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    ),
    ("Alpaca", "alpaca", {"instruction": "Add.", "input": "2, 2", "output": "4"}),
    ("prompt and completion", "prompt_completion", {"prompt": "2+2?", "completion": "4"}),
    ("question and answer", "question_answer", {"system": "Be brief.", "question": "2+2?", "answer": "4"}),
    (
        "user and assistant",
        "system_user_assistant",
        {"system": "Be brief.", "user": "2+2?", "assistant": "4"},
    ),
    ("preference", "preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
    ("text", "text", {"text": "Two and two are four."}),
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


def examples() -> str:
    """Each example row, and the text that it becomes, with what carries loss between {+ and +}."""
    texts = (json.dumps(row) for _, _, row in EXAMPLES)
    tokenizer = byte_level_tokenizer(chain(texts, ["plain"]), 512, 512)
    use_template(tokenizer, "plain")
    chat = make_chat(tokenizer, "assistant")
    return "\n\n".join(chain.from_iterable(_shown(chat, *example) for example in EXAMPLES))


def _shown(chat: Chat, what: str, name: str, row: dict[str, Any]) -> Iterator[str]:
    conversation = convert(Row(row, "example", 1), name)
    assert isinstance(conversation, Conversation)
    (rows,) = encode(chat, [conversation])
    for tokens in rows:
        text = marked(list(tokens.input_ids), list(tokens.labels), chat.tokenizer, colour=False).plain
        yield f"**{what[0].upper()}{what[1:]}** (`{name}`)\n\n```\n{json.dumps(row)}\n\n{text.strip()}\n```"

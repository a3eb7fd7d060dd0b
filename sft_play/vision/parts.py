"""Messages as a chat template takes them: some take texts, some lists of parts, those for images both."""

from collections.abc import Sequence
from functools import cache

from sft_play.rows.images import MARK, Message
from sft_play.upstream.transformers import compiled_template

WORD = "question"
PARTS = [{"type": "image"}, {"type": "text", "text": WORD}]


@cache
def takes(template: str) -> tuple[bool, bool]:
    """Whether a template renders texts, and lists of parts; those without a word of images are not tried.

    Some of the others, such as that of SmolVLM, write nothing for a text.
    """
    if "image" not in template:
        return True, False
    text, parts = (_rendered(template, content) for content in (WORD, PARTS))
    return WORD in text or WORD not in parts, WORD in parts and "'type'" not in parts


def _rendered(template: str, content: object) -> str:
    try:
        return compiled_template(template).render(messages=[{"role": "user", "content": content}])
    except Exception:  # a template makes Python raise anything
        return ""


def for_template(messages: Sequence[Message], template: str) -> list[Message]:
    """The messages with parts in place of marks, or of any text, where the template takes them."""
    texts, parts = takes(template)
    if not parts:
        return list(messages)
    return [_in_parts(message) if "images" in message or not texts else message for message in messages]


def _in_parts(message: Message) -> Message:
    parts: list[dict[str, str]] = []
    for index, text in enumerate(message["content"].split(MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    rest = {key: value for key, value in message.items() if key != "images"}
    return {**rest, "content": parts or [{"type": "text", "text": ""}]}

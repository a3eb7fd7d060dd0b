"""What a row holds that is not trained on: video and audio are refused, other keys are counted."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sft_play.rows.strict_json import without_nulls

MEDIA = ("videos", "video", "audios", "audio")
PLACEHOLDER = re.compile("<(?:image|video|audio)>")  # in the text, of LLaMA-Factory and ms-swift

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Whether a message carries loss: axolotl's key, OpenAI's, and LLaMA-Factory's.
TRAIN_KEYS = ("train", "weight", "loss_weight")
OF_MESSAGES = {"tool_calls", "tool_call_id", "name", "images", "image", *REASONING_KEYS, *TRAIN_KEYS}
OPENAI, SHAREGPT = ("role", "content"), ("from", "value")


def message_keys(message: Mapping[str, Any]) -> tuple[str, str]:
    """The keys of a message's role and text: OpenAI's or ShareGPT's."""
    return SHAREGPT if "from" in message and "role" not in message else OPENAI


def media_key(data: Mapping[str, Any]) -> str | None:
    """The first key of a row or a message that holds video or audio."""
    found = {key: data[key] for key in MEDIA if key in data and not _is_empty(data[key])}
    # numbers and booleans, such as `"video": false`, are none
    return next((key for key, value in found.items() if not isinstance(value, bool | int | float)), None)


def has_placeholder(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the text of a message stands for an image, a video or a sound, which the row lacks."""
    return any(PLACEHOLDER.search(message["content"]) for message in messages)


def has_null_parts(data: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    """Whether a tool, or an argument of a call in messages under `keys`, has a null, which is left out."""
    parts = [data.get("tools")]
    for key in (*keys, "prompt"):
        if isinstance(messages := data.get(key), list):
            parts += [message.get("tool_calls") for message in messages if isinstance(message, dict)]
    return any(part and part != without_nulls(part) for part in parts)


def unused_keys(data: Mapping[str, Any], keys: tuple[str, ...], others: tuple[str, ...]) -> set[str]:
    """The keys of a row that hold something and are not read; those of messages as "messages[].key".

    `keys` identify its format, which reads `others` too.
    """
    used = {*keys, *others}
    if isinstance(data.get("prompt"), list):
        used.discard("system")
    found = {key for key, value in data.items() if key not in used and not _is_empty(value)}
    for key in keys:
        messages = data.get(key)
        for message in messages if isinstance(messages, list) else ():
            read = OF_MESSAGES.union(message_keys(message))
            found |= {
                f"{key}[].{inner}"
                for inner, value in message.items()
                if inner not in read and not _is_empty(value)
            }
    return found


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)

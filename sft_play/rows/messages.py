"""Values of raw rows -> messages as chat templates take them, or what is wrong with them, by its key."""

import json
from itertools import cycle
from typing import Any

from sft_play.rows.images import Message, with_pictures, without_pictures
from sft_play.rows.invalid import InvalidRow, found_text, invalid
from sft_play.rows.strict_json import parse, without_nulls
from sft_play.rows.unused import REASONING_KEYS, TRAIN_KEYS, media_key, message_keys

# Role names found in public datasets -> the role names of chat templates.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "function_call": "assistant",
}


def alternating(*texts: str) -> tuple[Message, ...]:
    """Messages with these texts, of the user and the assistant in turn."""
    roles = cycle(("user", "assistant"))
    return tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=False))


def require_no_video(data: dict[str, Any], prefix: str = "") -> None:
    """Refuses a row or a message with video or audio."""
    found = media_key(data)
    if found:
        raise InvalidRow(
            f"{prefix}{found} is {found_text(data[found])}; video and audio are not supported. To train "
            f"without them, remove the key '{found}', and placeholders such as <video> from the text"
        )


def checked_text(value: object, key: str, *, may_be_blank: bool = False) -> str:
    """The value, if it is a text that can be written; else InvalidRow."""
    if not isinstance(value, str) or not (may_be_blank or value.strip()):
        raise invalid(key, value, "a string" if may_be_blank else "a non-blank string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRow(
                f"{key} has an unpaired surrogate ({value[error.start]!r}) at character {error.start}"
            ) from None
    return value


def content_of(value: object, key: str, *, may_be_blank: bool) -> str:
    """A string, or a list of {"type": "text", "text": ...} parts, which are concatenated.

    LLaMA-Factory writes "value" in place of "text".
    """
    if not isinstance(value, list):
        return checked_text(value, key, may_be_blank=may_be_blank)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(
                f"{key}[{index}]",
                part,
                '{"type": "text", "text": ...}; video and audio are not supported',
            )
        name = "value" if "value" in part and "text" not in part else "text"
        parts.append(checked_text(part.get(name), f"{key}[{index}].{name}", may_be_blank=True))
    return checked_text("".join(parts), key, may_be_blank=may_be_blank)


def as_json_text(value: object) -> str:
    """A value as a JSON text, as templates write it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def json_if_text(value: object, key: str) -> Any:
    """What a text of JSON holds, or the value itself if it is no text; InvalidRow if it is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise InvalidRow(f"{key} is a string but not valid JSON: {error}") from None


def _tool_call(value: Any, key: str) -> Message:
    """The call as chat templates expect it: {"type": "function", "function": {"name", "arguments": object}}.

    OpenAI stores the arguments as a JSON string.
    """
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(key, value, '{"type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = json_if_text(function.get("arguments") or {}, f"{key}.function.arguments")
    if not isinstance(arguments, dict):
        raise invalid(f"{key}.function.arguments", arguments, "an object")
    called = {"name": function["name"], "arguments": arguments}
    checked_text(as_json_text(called), f"{key}.function")
    call: Message = {"type": "function", "function": called}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call


def _split_parts(content: list[Any], key: str) -> tuple[list[Any], str | None, list[Any]]:
    """LLaMA-Factory's list content: its text parts, its reasoning, and its tool calls."""
    text, reasoning, calls = [], [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{key}[{index}].value"
        if kind == "reasoning":
            reasoning.append(checked_text(part.get("value"), where, may_be_blank=True))
        elif kind == "tool_call":
            calls.append(json_if_text(without_nulls(part.get("value")), where))
        else:
            text.append(part)
    return text, "".join(reasoning) or None, calls


def _is_trained(value: dict[str, Any], key: str, role: str) -> bool:
    """Whether the message may carry loss, as one of TRAIN_KEYS says; by default it may."""
    flags = {name: value[name] for name in TRAIN_KEYS if value.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise invalid(f"{key}.{name}", flag, "true or false" if name == "train" else "0 or 1")
        if flag and role != "assistant":
            raise InvalidRow(
                f"{key}.{name} is {found_text(flag)} on a message of role {role}, but only assistant "
                "messages carry loss; remove the key (data.supervise=all puts loss on all messages)"
            )
    if len({bool(flag) for flag in flags.values()}) > 1:
        raise InvalidRow(f"{key}: {' and '.join(flags)} contradict each other; keep one")
    return all(flags.values())


def _message(value: object, key: str) -> Message:
    """One message, with OpenAI's keys (role, content) or ShareGPT's (from, value)."""
    if not isinstance(value, dict):
        raise invalid(key, value, 'an object such as {"role": "user", "content": "..."}')
    require_no_video(value, f"{key}.")
    role_key, content_key = message_keys(value)
    name = value.get(role_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise invalid(f"{key}.{role_key}", name, f"one of {', '.join(ROLES)}")
    content, calls = value.get(content_key), without_nulls(value.get("tool_calls"))
    images: Message = {}
    if name == "function_call":  # ShareGPT puts the call in place of the text
        call = json_if_text(content, f"{key}.{content_key}")
        content, calls = "", call if isinstance(call, list) else [call]
    reasoning = next((value[name] for name in REASONING_KEYS if value.get(name)), None)
    if isinstance(content, list):
        content, images = without_pictures(content, f"{key}.{content_key}")
        content, inline_reasoning, inline_calls = _split_parts(content, f"{key}.{content_key}")
        reasoning, calls = reasoning or inline_reasoning, calls or inline_calls
    if calls and not isinstance(calls, list):
        raise invalid(f"{key}.tool_calls", calls, "a list")
    if content is None and calls:
        content = ""
    # A blank question is an error in the data; a blank answer only drops the row (see `_unusable`).
    text = content_of(content, f"{key}.{content_key}", may_be_blank=role != "user")
    message: Message = {"role": role, "content": text, **images}
    message = with_pictures(message, value, f"{key}.")
    if reasoning is not None:
        message["reasoning_content"] = checked_text(reasoning, f"{key}.reasoning_content")
    message |= {
        name: checked_text(value[name], f"{key}.{name}")
        for name in ("name", "tool_call_id")
        if value.get(name) is not None
    }
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{key}.tool_calls[{i}]") for i, call in enumerate(calls)]
    # `convert` turns this key into Conversation.untrained: templates do not see it
    return message if _is_trained(value, key, role) else {**message, "train": False}


def messages_of(value: object, key: str) -> list[Message]:
    """The messages of a list, each with a role and a content; InvalidRow names the one that is wrong."""
    if not isinstance(value, list) or not value:
        raise invalid(key, value, "a list of messages")
    return [_message(item, f"{key}[{index}]") for index, item in enumerate(value)]

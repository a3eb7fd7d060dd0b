"""Raw rows of any format -> conversations; errors name file, line, key, what was found, what is allowed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any

from sft_play.data.reading import Row
from sft_play.data.rows import require_shallow
from sft_play.data.unused import REASONING_KEYS, TRAIN_KEYS, media_key, message_keys
from sft_play.errors import DataError, kind_of

Message = dict[str, Any]

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


NO_ASSISTANT, BLANK_ASSISTANT, BLANK_TEXT = "no assistant turn", "blank assistant turn", "blank text"


@dataclass(frozen=True)
class Conversation:
    """One training row: messages, or plain text (then `messages` is empty)."""

    messages: tuple[Message, ...]
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    source: str = ""  # `file:line` of the raw row
    context: int = 0
    """Number of leading messages that are the prompt of a prompt/completion row: they carry no loss."""
    untrained: tuple[int, ...] = ()
    """Indices of the messages that the row itself excludes from the loss (`train: false`)."""
    begins: bool = True  # of plain text: whether it is the beginning of a document, not a later section
    ends: bool = True  # of plain text: whether the document ends with it

    def as_row(self) -> dict[str, Any]:
        """The row in the messages format (text or prompt/completion where needed), for a JSONL file."""
        if self.text is not None:
            return {"text": self.text}
        messages = [
            {**message, "train": False} if index in self.untrained else message
            for index, message in enumerate(self.messages)
        ]
        row: dict[str, Any] = {"messages": messages}
        if self.context:
            row = {"prompt": messages[: self.context], "completion": messages[self.context :]}
        return {**row, "tools": self.tools} if self.tools else row


def _found(value: Any) -> str:
    if value is None:
        return "missing or null"
    if isinstance(value, str) and not value.strip():
        return "an empty string"
    if isinstance(value, str):
        return f"{value[:40]!r}"
    text = json.dumps(value, default=str)
    if isinstance(value, list | dict):
        return f"{kind_of(value)} ({text[:40]})"
    return text[:60]


class _InvalidRow(Exception):
    """What is wrong with a row; `convert` puts file and line in front of it."""


def _invalid(key: str, value: Any, allowed: str) -> _InvalidRow:
    return _InvalidRow(f"{key} is {_found(value)}; expected {allowed}")


def _require_text_only(data: dict[str, Any], prefix: str = "") -> None:
    """Refuses a row or a message with images, video or audio."""
    found = media_key(data)
    if found:
        raise _InvalidRow(
            f"{prefix}{found} is {_found(data[found])}; images, video and audio are not supported. To train "
            f"on the text alone, remove the key '{found}', and placeholders such as <image> from the text"
        )


def _text(value: Any, key: str, *, may_be_blank: bool = False) -> str:
    if not isinstance(value, str) or not (may_be_blank or value.strip()):
        raise _invalid(key, value, "a string" if may_be_blank else "a non-blank string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _InvalidRow(
                f"{key} has an unpaired surrogate ({value[error.start]!r}) at character {error.start}"
            ) from None
    return value


def _content(value: Any, key: str, *, may_be_blank: bool) -> str:
    """A string, or a list of {"type": "text", "text": ...} parts, which are concatenated.

    LLaMA-Factory writes "value" in place of "text".
    """
    if not isinstance(value, list):
        return _text(value, key, may_be_blank=may_be_blank)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _invalid(
                f"{key}[{index}]",
                part,
                '{"type": "text", "text": ...}; images and audio are not supported',
            )
        name = "value" if "value" in part and "text" not in part else "text"
        parts.append(_text(part.get(name), f"{key}[{index}].{name}", may_be_blank=True))
    return _text("".join(parts), key, may_be_blank=may_be_blank)


def _json_if_text(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return require_shallow(json.loads(value), value)
    except (ValueError, RecursionError) as error:
        raise _InvalidRow(f"{key} is a string but not valid JSON: {error}") from None


def _tool_call(value: Any, key: str) -> Message:
    """The call as chat templates expect it: {"type": "function", "function": {"name", "arguments": object}}.

    OpenAI stores the arguments as a JSON string.
    """
    function = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(key, value, '{"type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = _json_if_text(function.get("arguments") or {}, f"{key}.function.arguments")
    if not isinstance(arguments, dict):
        raise _invalid(f"{key}.function.arguments", arguments, "an object")
    call: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call


def _split_parts(content: list[Any], key: str) -> tuple[list[Any], str | None, list[Any]]:
    """LLaMA-Factory's list content: its text parts, its reasoning, and its tool calls."""
    text, reasoning, calls = [], [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{key}[{index}].value"
        if kind == "reasoning":
            reasoning.append(_text(part.get("value"), where, may_be_blank=True))
        elif kind == "tool_call":
            calls.append(_json_if_text(part.get("value"), where))
        else:
            text.append(part)
    return text, "".join(reasoning) or None, calls


def _is_trained(value: dict[str, Any], key: str, role: str) -> bool:
    """Whether the message may carry loss, as one of TRAIN_KEYS says; by default it may."""
    flags = {name: value[name] for name in TRAIN_KEYS if value.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise _invalid(f"{key}.{name}", flag, "true or false" if name == "train" else "0 or 1")
        if flag and role != "assistant":
            raise _InvalidRow(
                f"{key}.{name} is {_found(flag)} on a message of role {role}, but only assistant messages "
                "carry loss; remove the key (data.supervise=all puts loss on all messages)"
            )
    if len({bool(flag) for flag in flags.values()}) > 1:
        raise _InvalidRow(f"{key}: {' and '.join(flags)} contradict each other; keep one")
    return all(flags.values())


def _message(value: Any, key: str) -> Message:
    """One message, with OpenAI's keys (role, content) or ShareGPT's (from, value)."""
    if not isinstance(value, dict):
        raise _invalid(key, value, 'an object such as {"role": "user", "content": "..."}')
    _require_text_only(value, f"{key}.")
    role_key, content_key = message_keys(value)
    name = value.get(role_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise _invalid(f"{key}.{role_key}", name, f"one of {', '.join(ROLES)}")
    content, calls = value.get(content_key), value.get("tool_calls")
    if name == "function_call":  # ShareGPT puts the call in place of the text
        call = _json_if_text(content, f"{key}.{content_key}")
        content, calls = "", call if isinstance(call, list) else [call]
    reasoning = next((value[name] for name in REASONING_KEYS if value.get(name)), None)
    if isinstance(content, list):
        content, inline_reasoning, inline_calls = _split_parts(content, f"{key}.{content_key}")
        reasoning, calls = reasoning or inline_reasoning, calls or inline_calls
    if calls and not isinstance(calls, list):
        raise _invalid(f"{key}.tool_calls", calls, "a list")
    if content is None and calls:
        content = ""
    # A blank question is an error in the data; a blank answer only drops the row (see `_unusable`).
    text = _content(content, f"{key}.{content_key}", may_be_blank=role != "user")
    message: Message = {"role": role, "content": text}
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning, f"{key}.reasoning_content")
    message |= {
        name: _text(value[name], f"{key}.{name}")
        for name in ("name", "tool_call_id")
        if value.get(name) is not None
    }
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{key}.tool_calls[{i}]") for i, call in enumerate(calls)]
    # `convert` turns this key into Conversation.untrained: templates do not see it
    return message if _is_trained(value, key, role) else {**message, "train": False}


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _invalid(key, value, "a list of messages")
    return [_message(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _turn(role: str, data: dict[str, Any], key: str) -> Message:
    return {"role": role, "content": _content(data.get(key), key, may_be_blank=role != "user")}


def _system(data: dict[str, Any]) -> list[Message]:
    return [_turn("system", data, "system")] if data.get("system") else []


def _after_system(data: dict[str, Any], messages: list[Message], key: str) -> list[Message]:
    """Messages after the row's system prompt, which must be the same as one that they begin with."""
    given = _system(data)
    if not given or not given[0]["content"].strip():
        return messages
    own = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if own and own != given[0]["content"].strip():
        raise _invalid("system", data["system"], f"{_found(own)}, which is {key}[0], or none")
    return given + messages[own is not None :]


def _from_messages(data: dict[str, Any]) -> tuple[list[Message], int]:
    return _messages(data.get("messages"), "messages"), 0


def _from_sharegpt(data: dict[str, Any]) -> tuple[list[Message], int]:
    return _after_system(data, _messages(data.get("conversations"), "conversations"), "conversations"), 0


def _from_alpaca(data: dict[str, Any]) -> tuple[list[Message], int]:
    question = _text(data.get("instruction"), "instruction")
    if data.get("input"):
        question += "\n\n" + _text(data["input"], "input", may_be_blank=True)
    turns, history = _system(data), data.get("history") or []
    if not isinstance(history, list):
        raise _invalid("history", history, "a list of pairs [instruction, answer]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _invalid(f"history[{index}]", pair, "a pair [instruction, answer]")
        turns.append({"role": "user", "content": _text(pair[0], f"history[{index}][0]")})
        turns.append({"role": "assistant", "content": _text(pair[1], f"history[{index}][1]")})
    return [*turns, {"role": "user", "content": question.rstrip()}, _turn("assistant", data, "output")], 0


def _from_pair(question: str, answer: str, data: dict[str, Any]) -> tuple[list[Message], int]:
    return [*_system(data), _turn("user", data, question), _turn("assistant", data, answer)], 0


def _from_prompt_completion(data: dict[str, Any]) -> tuple[list[Message], int]:
    if not isinstance(data.get("prompt"), list):
        return _from_pair("prompt", "completion", data)
    context = _messages(data["prompt"], "prompt")
    return context + _messages(data.get("completion"), "completion"), len(context)


def _from_preference(data: dict[str, Any]) -> tuple[list[Message], int]:
    """The chosen answer with its prompt, which a list of messages may begin with; the prompt is context."""
    chosen, prompt = data["chosen"], data.get("prompt")
    answer = _messages(chosen, "chosen") if isinstance(chosen, list) else [_turn("assistant", data, "chosen")]
    if answer[0]["role"] != "assistant":
        return _after_system(data, answer, "chosen"), 0
    if isinstance(prompt, list):
        context = _messages(prompt, "prompt")
        return context + answer, len(context)
    return [*_system(data), _turn("user", data, "prompt"), *answer], 0


Reader = Callable[[dict[str, Any]], tuple[list[Message], int]]

MORE = ("tools", "system")
# Format -> the keys that identify it, those that are read too, and its reader. Detection uses this order;
# "text" has no messages, and its source is for people (make dapt-docx writes it).
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Reader | None]] = {
    "messages": (("messages",), ("tools",), _from_messages),
    "sharegpt": (("conversations",), MORE, _from_sharegpt),
    "alpaca": (("instruction", "output"), (*MORE, "input", "history"), _from_alpaca),
    "prompt_completion": (("prompt", "completion"), MORE, _from_prompt_completion),
    "question_answer": (("question", "answer"), MORE, partial(_from_pair, "question", "answer")),
    "system_user_assistant": (("user", "assistant"), MORE, partial(_from_pair, "user", "assistant")),
    "preference": (("chosen", "rejected"), (*MORE, "prompt"), _from_preference),
    "text": (("text",), ("source",), None),
}
UNDETECTED = "preference"  # leaving out the rejected answers is for the user to decide
RENAME = "say what a format's keys are called here: data.columns.prompt=<key> data.columns.completion=<key>"


def detect_format(row: Row) -> str:
    """The first format whose keys the row has.

    Raises:
        DataError: the keys match no format; lists the known ones.
    """
    name = _format_of(set(row.data))
    if name == UNDETECTED:
        raise DataError(
            f"{row.where}: the row has a chosen and a rejected answer. To train on the chosen ones and leave "
            f"out the rejected ones, set data.format={name}; learning from both (DPO) is not supported"
        )
    if name:
        return name
    meant = _format_of({key.strip().lower() for key in row.data})
    hint = f"write them as {', '.join(FORMATS[meant][0])}" if meant else RENAME
    formats = "\n".join(f"  {name}: {', '.join(keys)}" for name, (keys, *_) in FORMATS.items())
    raise DataError(
        f"{row.where}: no format has the keys {', '.join(row.data) or '(none)'}; {hint}. "
        f"The formats and their keys:\n{formats}"
    )


def with_format(rows: Iterator[Row], setting: str, what: str) -> tuple[str, Iterator[Row]]:
    """The format of rows, which is that of the first one if `setting` is auto, and all rows.

    Raises:
        DataError: `what` has no rows, or the first one has no known format.
    """
    first = next(rows, None)
    if first is None:
        raise DataError(f"{what} has no rows")
    return detect_format(first) if setting == "auto" else setting, chain([first], rows)


def _format_of(found: set[str]) -> str | None:
    """The first format whose keys are all there."""
    return next((name for name, (keys, *_) in FORMATS.items() if found.issuperset(keys)), None)


def _unusable(messages: list[Message]) -> str | None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return NO_ASSISTANT
    for message in answers:
        is_blank = not (message["content"].strip() or message.keys() & {"tool_calls", "reasoning_content"})
        if is_blank and message.get("train", True):  # one that carries no loss is context
            return BLANK_ASSISTANT
    return None


def convert(row: Row, name: str, system_prompt: str | None = None) -> Conversation | str:
    """The row, of the format `name`, as a conversation, or why it is dropped: there is nothing to train on.

    Rows without a system message get `system_prompt`.

    Raises:
        DataError: the row does not match the format.
    """
    keys, _, reader = FORMATS[name]
    try:
        _require_text_only(row.data)
        if reader is None:
            text = _text(row.data.get("text"), "text", may_be_blank=True)
            plain = Conversation((), text=text, source=row.where, begins=row.begins, ends=row.ends)
            return plain if text.strip() else BLANK_TEXT
        missing = [key for key in keys if key not in row.data]
        if missing:
            raise _InvalidRow(
                f"key '{missing[0]}' is missing; format {name} needs {', '.join(keys)} "
                f"(found {', '.join(row.data)})"
            )
        messages, context = reader(row.data)
        tools = _json_if_text(row.data.get("tools") or None, "tools")
        is_schema_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        if tools is not None and not is_schema_list:
            raise _invalid("tools", tools, "a list of JSON schemas")
    except _InvalidRow as problem:
        raise DataError(f"{row.where}: {problem}") from None
    if messages[0]["role"] == "system" and not messages[0]["content"].strip():
        messages, context = messages[1:], max(context - 1, 0)
    if system_prompt and not any(message["role"] == "system" for message in messages):
        messages, context = [{"role": "system", "content": system_prompt}, *messages], context + bool(context)
    reason = _unusable(messages[context:])
    untrained = tuple(index for index, message in enumerate(messages) if not message.pop("train", True))
    return reason or Conversation(
        tuple(messages), tools=tools or None, source=row.where, context=context, untrained=untrained
    )

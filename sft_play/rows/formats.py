"""Raw rows of any format -> conversations; errors name file, line, key, what was found, what is allowed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from sft_play.errors import DataError
from sft_play.rows.images import KEYS as IMAGES
from sft_play.rows.images import as_written, placed, require_none
from sft_play.rows.invalid import InvalidRow, found_text, invalid
from sft_play.rows.json_files import Row
from sft_play.rows.messages import (
    Message,
    as_json_text,
    checked_text,
    content_of,
    json_if_text,
    messages_of,
    require_no_video,
)
from sft_play.rows.strict_json import without_nulls

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

    def as_row(self) -> dict[str, object]:
        """The row in the messages format (text or prompt/completion where needed), for a JSONL file."""
        if self.text is not None:
            return {"text": self.text}
        messages = [
            {**message, "train": False} if index in self.untrained else message
            for index, message in enumerate(map(as_written, self.messages))
        ]
        row: dict[str, object] = {"messages": messages}
        if self.context:
            row = {"prompt": messages[: self.context], "completion": messages[self.context :]}
        return {**row, "tools": self.tools} if self.tools else row


def _turn(role: str, data: dict[str, Any], key: str) -> Message:
    return {"role": role, "content": content_of(data.get(key), key, may_be_blank=role != "user")}


def _system(data: dict[str, Any]) -> list[Message]:
    return [_turn("system", data, "system")] if data.get("system") else []


def _after_system(data: dict[str, Any], messages: list[Message], key: str) -> list[Message]:
    """Messages after the row's system prompt, which must be the same as one that they begin with."""
    given = _system(data)
    if not given or not given[0]["content"].strip():
        return messages
    own = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if own and own != given[0]["content"].strip():
        raise invalid("system", data["system"], f"{found_text(own)}, which is {key}[0], or none")
    return given + messages[own is not None :]


def _from_messages(data: dict[str, Any]) -> tuple[list[Message], int]:
    return messages_of(data.get("messages"), "messages"), 0


def _from_sharegpt(data: dict[str, Any]) -> tuple[list[Message], int]:
    return _after_system(data, messages_of(data.get("conversations"), "conversations"), "conversations"), 0


def _from_alpaca(data: dict[str, Any]) -> tuple[list[Message], int]:
    question = checked_text(data.get("instruction"), "instruction")
    if data.get("input"):
        question += "\n\n" + checked_text(data["input"], "input", may_be_blank=True)
    turns, history = _system(data), data.get("history") or []
    if not isinstance(history, list):
        raise invalid("history", history, "a list of pairs [instruction, answer]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise invalid(f"history[{index}]", pair, "a pair [instruction, answer]")
        turns.append({"role": "user", "content": checked_text(pair[0], f"history[{index}][0]")})
        turns.append({"role": "assistant", "content": checked_text(pair[1], f"history[{index}][1]")})
    return [*turns, {"role": "user", "content": question.rstrip()}, _turn("assistant", data, "output")], 0


def _from_pair(question: str, answer: str, data: dict[str, Any]) -> tuple[list[Message], int]:
    return [*_system(data), _turn("user", data, question), _turn("assistant", data, answer)], 0


def _from_prompt_completion(data: dict[str, Any]) -> tuple[list[Message], int]:
    if not isinstance(data.get("prompt"), list):
        return _from_pair("prompt", "completion", data)
    context = messages_of(data["prompt"], "prompt")
    return context + messages_of(data.get("completion"), "completion"), len(context)


def _from_preference(data: dict[str, Any]) -> tuple[list[Message], int]:
    """The chosen answer with its prompt, which a list of messages may begin with; the prompt is context."""
    chosen, prompt = data["chosen"], data.get("prompt")
    answer = (
        messages_of(chosen, "chosen") if isinstance(chosen, list) else [_turn("assistant", data, "chosen")]
    )
    if answer[0]["role"] != "assistant":
        return _after_system(data, answer, "chosen"), 0
    if isinstance(prompt, list):
        context = messages_of(prompt, "prompt")
        return context + answer, len(context)
    return [*_system(data), _turn("user", data, "prompt"), *answer], 0


Reader = Callable[[dict[str, Any]], tuple[list[Message], int]]


@dataclass(frozen=True)
class Format:
    """One way to write rows; what settings allow, `infer` answers and the guide lists follow from FORMATS."""

    title: str
    keys: tuple[str, ...]
    """The keys that identify it; `others` are read too."""
    others: tuple[str, ...]
    reader: Reader | None
    """Row -> messages, and how many of them are a prompt; None: raw text, which has none."""
    example: dict[str, Any]
    prompt: str | None = None
    """What `infer` continues: the key of all messages, or of a question beside its `answer`."""
    answer: str | None = None
    detected: bool = True


MORE = ("tools", "system", *IMAGES)
# Detection uses this order. The source of a text is for people (make dapt-docx writes it); leaving out the
# rejected answers is for the user to decide.
FORMATS = {
    "messages": Format(
        "OpenAI", ("messages",), ("tools", *IMAGES), _from_messages, prompt="messages",
        example={"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    ),
    "sharegpt": Format(
        "ShareGPT", ("conversations",), MORE, _from_sharegpt, prompt="conversations",
        example={"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    ),
    "alpaca": Format(
        "Alpaca", ("instruction", "output"), (*MORE, "input", "history"), _from_alpaca,
        prompt="instruction", answer="output",
        example={"instruction": "Add.", "input": "2, 2", "output": "4"},
    ),
    "prompt_completion": Format(
        "prompt and completion", ("prompt", "completion"), MORE, _from_prompt_completion,
        prompt="prompt", answer="completion", example={"prompt": "2+2?", "completion": "4"},
    ),
    "question_answer": Format(
        "question and answer", ("question", "answer"), MORE, partial(_from_pair, "question", "answer"),
        prompt="question", answer="answer",
        example={"system": "Be brief.", "question": "2+2?", "answer": "4"},
    ),
    "system_user_assistant": Format(
        "user and assistant", ("user", "assistant"), MORE, partial(_from_pair, "user", "assistant"),
        prompt="user", answer="assistant", example={"system": "Be brief.", "user": "2+2?", "assistant": "4"},
    ),
    "preference": Format(
        "preference", ("chosen", "rejected"), (*MORE, "prompt"), _from_preference, detected=False,
        example={"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    ),
    "text": Format("text", ("text",), ("source",), None, example={"text": "Two and two are four."}),
}  # fmt: skip
PROMPTS = {known.prompt: name for name, known in FORMATS.items() if known.prompt}
_KEYS = {key for known in FORMATS.values() for key in known.keys}
OPTIONAL = {key for known in FORMATS.values() for key in known.others} - _KEYS  # that no format needs
RENAME = "say what a format's keys are called here: data.columns.prompt=<key> data.columns.completion=<key>"


def detect_format(row: Row) -> str:
    """The first format whose keys the row has.

    Raises:
        DataError: the keys match no format; lists the known ones. Or the row could not be read.
    """
    row.require_read()
    name = _format_of(set(row.data))
    if name and not FORMATS[name].detected:
        raise DataError(
            f"{row.where}: the row has a chosen and a rejected answer. To train on the chosen ones and leave "
            f"out the rejected ones, set data.format={name}; learning from both (DPO) is not supported"
        )
    if name:
        return name
    meant = _format_of({key.strip().lower() for key in row.data})
    hint = f"write them as {', '.join(FORMATS[meant].keys)}" if meant else RENAME + _quoting(row.data)
    formats = "\n".join(f"  {name}: {', '.join(known.keys)}" for name, known in FORMATS.items())
    raise DataError(
        f"{row.where}: no format has the keys {', '.join(row.data) or '(none)'}; {hint}. "
        f"The formats and their keys:\n{formats}"
    )


def _quoting(keys: Iterable[str]) -> str:
    """How to type a key that a shell, or ARGS=, would split at a space."""
    spaced = next((key for key in keys if " " in key), None)
    return f"; a key with a space in quotes: 'data.columns.prompt={spaced}'" if spaced else ""


def with_format(rows: Iterator[Row], setting: str, what: str) -> tuple[str, Iterator[Row]]:
    """The format of rows, which is that of the first readable one if `setting` is auto, and all rows.

    Raises:
        DataError: `what` has no rows, or none that can be read, or the first one has no known format.
    """
    unread = list[Row]()
    for first in rows:
        if not first.problem or setting != "auto":
            name = detect_format(first) if setting == "auto" else setting
            return name, chain(unread, [first], rows)
        unread.append(first)
    if unread:
        unread[0].require_read()
    raise DataError(f"{what} has no rows")


def _format_of(found: set[str]) -> str | None:
    """The first format whose keys are all there."""
    return next((name for name, known in FORMATS.items() if found.issuperset(known.keys)), None)


def tools_of(value: object) -> list[dict[str, Any]] | None:
    """The tools that a row offers, of its key "tools"; None without any.

    Raises:
        InvalidRow: they are no list of objects.
    """
    tools = json_if_text(without_nulls(value or None), "tools")
    is_schema_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_schema_list:
        raise invalid("tools", tools, "a list of JSON schemas")
    if tools:
        checked_text(as_json_text(tools), "tools")
    return tools or None


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
        DataError: the row does not match the format, or could not be read.
    """
    row.require_read()
    keys, reader = FORMATS[name].keys, FORMATS[name].reader
    try:
        require_no_video(row.data)
        if reader is None:
            require_none(row.data)
            text = checked_text(row.data.get("text"), "text", may_be_blank=True)
            plain = Conversation((), text=text, source=row.where, begins=row.begins, ends=row.ends)
            return plain if text.strip() else BLANK_TEXT
        missing = [key for key in keys if key not in row.data]
        if missing:
            raise InvalidRow(
                f"key '{missing[0]}' is missing; format {name} needs {', '.join(keys)} "
                f"(found {', '.join(row.data) or 'no keys'})"
            )
        messages, context = reader(row.data)
        messages = placed(messages, row.data)
        tools = tools_of(row.data.get("tools"))
    except InvalidRow as problem:
        raise DataError(f"{row.where}: {problem}") from None
    if messages[0]["role"] == "system" and not messages[0]["content"].strip():
        messages, context = messages[1:], max(context - 1, 0)
    if system_prompt and not any(message["role"] == "system" for message in messages):
        messages, context = [{"role": "system", "content": system_prompt}, *messages], context + bool(context)
    reason = _unusable(messages[context:])
    untrained = tuple(index for index, message in enumerate(messages) if not message.pop("train", True))
    return reason or Conversation(
        tuple(messages), tools=tools, source=row.where, context=context, untrained=untrained
    )

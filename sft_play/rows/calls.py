"""Answers as they are compared and shown: calls of tools as calls, and without the reasoning before them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.rows.messages import Message

Call = tuple[str, dict[str, Any]]  # name and arguments

THINKS = re.compile(r"\s*(?:<(?:think|thinking|reasoning)>|\[THINK\])")
THOUGHT = re.compile(r"</(?:think|thinking|reasoning)>|\[/THINK\]")  # what opened it may be in the prompt
# A name right before its arguments: `get_weather{...}` (Mistral), `functions.get_weather:0{...}` (Kimi).
NAMED = re.compile(r"(?:functions\.)?([\w.-]*\w)(?::\d+)?(?:<[^>]*>|[^\w{}\"'<])*(?:json\s*)?\Z")
# Arguments as elements: <function=f><parameter=a>1</parameter> (Qwen3-Coder), <arg_key>a</arg_key> (GLM).
BLOCK = re.compile(
    r"<(?:\w+:)?(?:function=|invoke name=\")(?P<name>[\w.-]+)\"?>"
    r"(?P<inside>.*?)</(?:\w+:)?(?:function|invoke)>"
    r"|<tool_call>\s*(?P<glm>[\w.-]+)\s*(?P<keys>(?:<arg_key>.*?)?)</tool_call>",
    re.DOTALL,
)
PARAMETER = re.compile(
    r"<(?:\w+:)?parameter(?:=| name=\")(?P<key>[^>\"]+)\"?>\n?(?P<value>.*?)\n?</(?:\w+:)?parameter>"
    r"|<arg_key>(?P<glm>.*?)</arg_key>\s*<arg_value>(?P<said>.*?)</arg_value>",
    re.DOTALL,
)
LONGEST_NAME = 200  # of a function, with what stands between it and its arguments
SHOWN_MESSAGES, SHOWN_CHARACTERS = 3, 100  # of the history of a prompt


def without_reasoning(text: str) -> str:
    """What follows the reasoning; "" if a text does not come to its end, and all of it if there is none."""
    if end := THOUGHT.search(text):
        return text[end.end() :].strip()
    return "" if THINKS.match(text) else text.strip()


def reasoning_of(text: str) -> str:
    """The reasoning that a text begins with; "" if there is none, or no end of it."""
    end = THOUGHT.search(text)
    return THINKS.sub("", text[: end.start()], count=1).strip() if end else ""


def calls_of_message(message: Mapping[str, Any]) -> list[Call]:
    """The calls of a message."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def calls_text(calls: Sequence[Call]) -> str:
    """A line a call, the same for calls and arguments in any order: `get_weather({"city": "Paris"})`."""
    lines = (f"{name}({json.dumps(given, ensure_ascii=False, sort_keys=True)})" for name, given in calls)
    return "\n".join(sorted(lines))


def compared_text(answer: str, wanted: Sequence[Call]) -> str:
    """What of an answer is compared: its calls, if calls are wanted and it has some, else its text."""
    text = without_reasoning(answer)
    found = calls_of(text, wanted) if wanted else []
    return calls_text(found) if found else text


def calls_of(text: str, wanted: Sequence[Call]) -> list[Call]:
    """The calls in a text, as JSON or as elements; a number that was wanted as a text is read as one."""
    found = [_call_of(match, wanted) for match in BLOCK.finditer(text)]
    return found or list(_json_calls(text))


def _call_of(block: re.Match[str], wanted: Sequence[Call]) -> Call:
    name, known = block["name"] or block["glm"], dict[str, Any]()
    for called, given in wanted:
        known |= given if called == name else {}
    arguments = {}
    for part in PARAMETER.finditer(block["inside"] or block["keys"] or ""):
        key, text = (part["key"], part["value"]) if part["key"] else (part["glm"], part["said"])
        arguments[key] = text if known.get(key) == text else _parsed(text)
    return name, arguments


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json_calls(text: str) -> Iterator[Call]:
    decoder, place, end = json.JSONDecoder(), text.find("{"), 0
    while place >= 0:
        try:
            value, after = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, after = {}, place + 1
        value = value["function"] if isinstance(value.get("function"), dict) else value
        called = NAMED.search(text[max(end, place - LONGEST_NAME) : place])
        if name := value.get("name", value.get("tool_name")):
            given = value.get("arguments", value.get("parameters")) or {}
            yield str(name), _parsed(given) if isinstance(given, str) else given
            end = after
        elif after > place + 1 and called:
            yield called[1], value
            end = after
        else:
            after = place + 1  # calls may be within
        place = text.find("{", after)


def history_text(messages: Sequence[Message]) -> str:
    """A prompt as it is shown: its question, with what was said before it in short; no system prompt."""
    turns = [(str(one.get("role")), _said(one)) for one in messages if one.get("role") != "system"]
    if len(turns) < 2:
        return turns[0][1] if turns else ""
    *earlier, (role, last) = turns
    lines = [f"({len(earlier) - SHOWN_MESSAGES} earlier messages)"] if len(earlier) > SHOWN_MESSAGES else []
    for speaker, text in earlier[-SHOWN_MESSAGES:]:
        line = " ".join(text.split())
        lines.append(f"{speaker}: {line[:SHOWN_CHARACTERS]}{' ...' * (len(line) > SHOWN_CHARACTERS)}")
    return "\n".join([*lines, f"{role}: {last}"])


def _said(message: Message) -> str:
    """The text of a message and its calls."""
    text = without_reasoning(str(message.get("content") or ""))
    return "\n".join(filter(None, (text, calls_text(calls_of_message(message)))))

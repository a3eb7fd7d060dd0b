"""Selects and renders chat templates; templates are untrusted code and run in the sandbox of transformers.

The sandbox limits neither time nor memory; `data/limits.py` does.
"""

import json
import math
import multiprocessing
import re
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime, time
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from sft_play.data import limits
from sft_play.data.limits import TemplateOverrun, require_length, within_limits
from sft_play.errors import ConfigError, DataError
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import Message, alternating
from sft_play.upstream.transformers import compiled_template
from sft_play.vision.parts import for_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = Path(__file__).parent / "templates"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MARKER = re.compile(r"<[^<>\s]{1,40}>")  # what templates use as control tokens: <|im_end|>, <end_of_turn>
WRITES_DAY = "strftime_now"  # a function that transformers gives to templates
TRIAL_SECONDS = 30  # by the clock
MAX_TEMPLATE_BYTES = 1_000_000
SHOWN_ROLES, SHOWN_CHARACTERS = 20, 1000  # in messages


def use_template(tokenizer: "PreTrainedTokenizerBase", setting: str) -> str:
    """Sets the tokenizer's chat template as data.chat_template asks; returns a short description of it.

    The tokenizer is modified, so that a saved model generates with the template that it was trained with.

    Raises:
        ConfigError: there is no such template, or this tokenizer cannot be used with it.
    """
    if setting == "auto":
        if tokenizer.chat_template:
            return "the tokenizer's own"
        setting = "plain"
    if setting == "chatml" and not set(CHATML_TOKENS) <= set(tokenizer.get_vocab()):
        raise ConfigError(
            f"data.chat_template=chatml needs the tokens {' and '.join(CHATML_TOKENS)}, which this tokenizer "
            f"does not have. Add them with model.new_tokens={json.dumps(CHATML_TOKENS)}, or use "
            "data.chat_template=plain"
        )
    tokenizer.chat_template = template_text(setting)
    return f"the shipped {setting}.jinja" if setting in shipped_templates() else setting


def shipped_templates() -> list[str]:
    """The names of the templates that come with this package."""
    return sorted(file.stem for file in SHIPPED.glob("*.jinja"))


def template_text(setting: str) -> str:
    """The chat template of a setting other than "auto": a shipped one, or a file.

    Raises:
        ConfigError: there is no such template.
    """
    shipped = shipped_templates()
    path = SHIPPED / f"{setting}.jinja" if setting in shipped else Path(setting).expanduser()
    if not path.is_file():
        allowed = ", ".join(["auto", *shipped])
        raise ConfigError(
            f"data.chat_template: {path} is not a file; allowed: {allowed}, or the path of a Jinja file"
        )
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"data.chat_template: {path} has {path.stat().st_size} bytes; the limit is {MAX_TEMPLATE_BYTES}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: {path} cannot be read: {error}") from None


def _apply(
    tokenizer: "PreTrainedTokenizerBase", talks: Sequence[Sequence[Message]], tools: Any, prompt: bool
) -> list[str]:
    def call() -> list[str]:
        template = tokenizer.get_chat_template(None, tools)
        flatten_globals(template)
        listed = [for_template(messages, template) for messages in talks]
        return tokenizer.apply_chat_template(  # type: ignore[return-value]
            listed, tools=tools, add_generation_prompt=prompt, tokenize=False
        )

    return [require_length(text) for text in within_limits(call)]


def flatten_globals(template: str) -> None:
    """Saves a third of each rendering: Jinja copies a template's globals, by default a ChainMap, key by key.

    It compiles the template, which is safe only `within_limits`.
    """
    compiled = compiled_template(template)
    compiled.globals = dict(compiled.globals)


def writes_the_day(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template, or one of several, writes the day on which it is rendered."""
    return any(WRITES_DAY in text for text in _templates(tokenizer))


def render_as_of(tokenizer: "PreTrainedTokenizerBase", day: date) -> None:
    """Lets chat templates write this day in place of today until the command is over, also in its workers."""

    def strftime_now(format: str) -> str:
        return datetime.combine(day, time()).strftime(format)

    for text in _templates(tokenizer):
        if WRITES_DAY in text:
            with suppress(Exception):  # `check_template` says what is wrong with a broken one
                within_limits(partial(compiled_template, text)).globals[WRITES_DAY] = strftime_now


def _templates(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    template = tokenizer.chat_template
    return list(template.values()) if isinstance(template, dict) else [template or ""]


def day_warning(day: date) -> str:
    """What it means that `writes_the_day`, of rows that were rendered on this day."""
    return (
        f"the chat template writes today's date: all rows are rendered as of {day:%d %b %Y}, even if the run "
        "is resumed later. So the model learns this one date, but is given the current one at inference; to "
        "avoid that, set data.chat_template to a copy of the template without "
        f"{WRITES_DAY}"
    )


def render(
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    messages: Sequence[Message],
    *,
    prompt: bool = False,
) -> str:
    """Renders the first `messages` of a conversation, and the generation prompt if `prompt`.

    Raises:
        DataError: the template rejects the messages; names the row.
    """
    try:
        return _apply(tokenizer, [messages], conversation.tools, prompt)[0]
    except Exception as error:  # a template makes Python raise anything
        raise cannot_render(conversation, messages, error) from None


def render_together(
    tokenizer: "PreTrainedTokenizerBase", firsts: Sequence[tuple[Conversation, int]], *, prompt: bool = False
) -> list[str]:
    """Renders the first so many messages of each conversation; one call for many takes a third of the time.

    Raises:
        DataError: the template rejects one; names the row.
    """
    texts = []
    for tools, alike in groupby(firsts, key=lambda first: first[0].tools):
        group = [(conversation, conversation.messages[:count]) for conversation, count in alike]
        try:
            texts += _apply(tokenizer, [messages for _, messages in group], tools, prompt)
        except Exception:  # one of them is wrong, or all together took more than a row may
            texts += [render(tokenizer, *one, prompt=prompt) for one in group]
    return texts


def render_example(tokenizer: "PreTrainedTokenizerBase", *texts: str, prompt: bool = False) -> str | None:
    """A conversation of `texts`, of the user and the assistant in turn; None if the template rejects it."""
    messages = alternating(*texts)
    try:
        return render(tokenizer, Conversation(messages), messages, prompt=prompt)
    except DataError:
        return None


def split_markers(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The markers between turns that the tokenizer splits into several tokens, as in "<|im_end|>".

    Empty if the template rejects a question and its answer.
    """
    found = dict.fromkeys(MARKER.findall(render_example(tokenizer, "question", "answer") or ""))
    return [marker for marker in found if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) > 1]


def split_warning(markers: Sequence[str]) -> str:
    """What to do about the markers that `split_markers` found."""
    listed = json.dumps(list(markers), ensure_ascii=False)
    return (
        f"the tokenizer splits {', '.join(markers)} of the chat template into several tokens; to make each "
        f"one a token, set model.new_tokens={listed}"
    )


def cannot_render(conversation: Conversation, messages: Sequence[Message], error: BaseException) -> DataError:
    """The error to raise if the template raised `error`; names the row."""
    roles = ", ".join(message["role"] for message in messages[:SHOWN_ROLES])
    return DataError(
        f"{conversation.source}: the chat template cannot render this conversation (roles: {roles}): "
        f"{str(error)[:SHOWN_CHARACTERS]}\n"
        "Change the row, or use another template: data.chat_template=plain"
    )


def check_template(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, origin: str) -> None:
    """Renders one conversation in a child process, with the time and memory limits that the sandbox lacks.

    Raises:
        ConfigError: the template is broken or malicious, or renders nothing.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_trial, args=(tokenizer, conversation, sender), daemon=True)
    child.start()
    sender.close()
    problem: str | None = f"it ran for more than {limits.ROW_SECONDS:g} s on one row"
    try:
        if receiver.poll(TRIAL_SECONDS):
            problem = receiver.recv()
    except EOFError:
        child.join()
        if child.exitcode != -signal.SIGXCPU:
            problem = "it crashed the process that rendered it (out of memory?)"
    finally:
        child.kill()
        child.join()
        receiver.close()
    if problem:
        raise ConfigError(f"data.chat_template: {origin} cannot be used: {problem}")


def _trial(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, sender: Connection) -> None:
    seconds = math.ceil(limits.ROW_SECONDS) + 1  # also ends an operation that signals do not interrupt
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = None
    try:
        if not _apply(tokenizer, [conversation.messages], conversation.tools, prompt=False)[0].strip():
            problem = f"it renders {conversation.source} as an empty string"
    except TemplateSyntaxError as error:
        problem = f"syntax error on line {error.lineno}: {error.message}"
    except SyntaxError as error:
        problem = f"it cannot be compiled: {error.msg}"
    except (SecurityError, OverflowError) as error:
        problem = f"it violates the sandbox: {error}"
    except TemplateOverrun as error:
        problem = str(error)
    except Exception:  # it may reject only this row: `render` raises an error that names it
        problem = None
    sender.send(problem)

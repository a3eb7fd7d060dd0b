"""Selects and renders chat templates; templates are untrusted code and run in the sandbox of transformers.

The sandbox limits neither time nor memory; `within_limits` does.
"""

import math
import multiprocessing
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from sft_play.data.formats import Conversation, Message
from sft_play.errors import ConfigError, DataError
from sft_play.units import MIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")

SHIPPED = Path(__file__).parent / "templates"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
ROW_SECONDS, ROW_BYTES, ROW_CHARACTERS = 5.0, 512 * MIB, 2**26  # CPU time, memory and text of one rendering
AGAIN_SECONDS = 0.5  # the signal is repeated: Python drops an exception that is raised within a destructor
TRIAL_SECONDS = 30  # by the clock
MAX_TEMPLATE_BYTES = 1_000_000
SHOWN_ROLES, SHOWN_CHARACTERS = 20, 1000  # in messages
STATM = "/proc/self/statm"


class TemplateOverrun(RuntimeError):
    """A template took more time or memory for a row than it may."""


# What a template can raise: its own errors, and any that Python raises inside it.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    SyntaxError,
)


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
    if setting in {file.stem for file in SHIPPED.glob("*.jinja")}:
        if setting == "chatml" and not set(CHATML_TOKENS) <= set(tokenizer.get_vocab()):
            raise ConfigError(
                f"data.chat_template=chatml needs the tokens {' and '.join(CHATML_TOKENS)}, which this "
                "tokenizer does not have. Use data.chat_template=plain"
            )
        tokenizer.chat_template = (SHIPPED / f"{setting}.jinja").read_text(encoding="utf-8")
        return f"the shipped {setting}.jinja"
    tokenizer.chat_template = _read_template(Path(setting).expanduser())
    return setting


def _read_template(path: Path) -> str:
    shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.jinja")))
    if not path.is_file():
        raise ConfigError(
            f"data.chat_template: {path} is not a file; allowed: auto, {shipped}, or the path of a Jinja file"
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
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Any, prompt: bool
) -> str:
    def call() -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        )

    return require_length(within_limits(call))


def require_length(text: str) -> str:
    """The text itself.

    Raises:
        TemplateOverrun: it is too long.
    """
    if len(text) > ROW_CHARACTERS:
        raise TemplateOverrun(f"it writes more than {ROW_CHARACTERS:,} characters")
    return text


def within_limits(call: Callable[[], Result]) -> Result:
    """What `call` returns, within ROW_SECONDS of CPU time and ROW_BYTES of additional memory.

    A single operation that takes long, such as 9**9**9, is not interrupted. In threads other than the main
    one, and without /proc, only some of the limits hold.

    Raises:
        TemplateOverrun: it takes more.
    """
    before = _limit_memory()
    timed = threading.current_thread() is threading.main_thread()
    if timed:
        handler = signal.signal(signal.SIGPROF, _overrun)
        signal.setitimer(signal.ITIMER_PROF, ROW_SECONDS, AGAIN_SECONDS)
    try:
        return call()
    except MemoryError:
        raise TemplateOverrun(f"it uses more than {ROW_BYTES // MIB} MiB of memory on one row") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
        if before is not None:
            resource.setrlimit(resource.RLIMIT_AS, before)


def _overrun(number: int, frame: object) -> None:
    raise TemplateOverrun(f"it ran for more than {ROW_SECONDS:g} s on one row")


def _limit_memory() -> tuple[int, int] | None:
    """Limits this process to ROW_BYTES more than it has; returns the earlier limits, None if it cannot."""
    try:
        with open(STATM, "rb", buffering=0) as file:  # noqa: PTH123 - called for each turn of each row
            used = int(file.read(32).split(maxsplit=1)[0]) * resource.getpagesize()
    except OSError:
        return None
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (used + ROW_BYTES, *before) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    return before


def render(
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    messages: Sequence[Message],
    *,
    prompt: bool = False,
) -> str:
    """Renders `messages` with the tokenizer's chat template.

    Args:
        tokenizer: with its chat template set.
        conversation: supplies the tools, and the name of the row for errors.
        messages: the first messages of the conversation.
        prompt: add the generation prompt.

    Raises:
        DataError: the template rejects the messages; names the row.
    """
    try:
        return _apply(tokenizer, messages, conversation.tools, prompt)
    except RENDER_ERRORS as error:
        raise cannot_render(conversation, messages, error) from None


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
    problem: str | None = f"it ran for more than {ROW_SECONDS:g} s on one row"
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
    seconds = math.ceil(ROW_SECONDS) + 1  # also ends an operation that signals do not interrupt
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = None
    try:
        if not _apply(tokenizer, conversation.messages, conversation.tools, prompt=False).strip():
            problem = f"it renders {conversation.source} to an empty string"
    except TemplateSyntaxError as error:
        problem = f"syntax error on line {error.lineno}: {error.message}"
    except SyntaxError as error:
        problem = f"it cannot be compiled: {error.msg}"
    except (SecurityError, OverflowError) as error:
        problem = f"it violates the sandbox: {error}"
    except TemplateOverrun as error:
        problem = str(error)
    except RENDER_ERRORS:
        pass  # it may reject only this row; `render` then raises an error that names it
    sender.send(problem)

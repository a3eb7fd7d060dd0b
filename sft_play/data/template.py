"""Which chat template is used, and rendering with it. A template is a stranger's program: it runs in transformers' sandbox."""

import multiprocessing
import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from sft_play.data.formats import Conversation, Message
from sft_play.errors import ConfigError, DataError
from sft_play.units import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = Path(__file__).parent / "templates"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
TRIAL_SECONDS, TRIAL_BYTES = 20, 1 * GIB
MAX_TEMPLATE_BYTES = 1_000_000

# What a template can raise: its own refusals, and whatever Python raises inside of it.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def use_template(tokenizer: "PreTrainedTokenizerBase", setting: str) -> str:
    """Sets the tokenizer's chat template as data.chat_template asks, and says in a few words which one it is.

    The tokenizer is changed, so that what is saved beside the model generates with the template it was trained with.

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
                f"data.chat_template=chatml needs the tokens {' and '.join(CHATML_TOKENS)}, which this tokenizer lacks. "
                "Use data.chat_template=plain"
            )
        tokenizer.chat_template = (SHIPPED / f"{setting}.jinja").read_text(encoding="utf-8")
        return f"the shipped {setting}.jinja"
    tokenizer.chat_template = _read_template(Path(setting).expanduser())
    return setting


def _read_template(path: Path) -> str:
    shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.jinja")))
    if not path.is_file():
        raise ConfigError(f"data.chat_template: {path} is no file; allowed are auto, {shipped}, or the path of a Jinja file")
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"data.chat_template: {path} has {path.stat().st_size} bytes; at most {MAX_TEMPLATE_BYTES} are allowed"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: {path} cannot be read: {error}") from None


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Any, prompt: bool) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False))


def render(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, messages: Sequence[Message], *, prompt: bool = False
) -> str:
    """The text of `messages` (a beginning of the conversation's); with `prompt` up to where the assistant would go on.

    Raises:
        DataError: the template refuses them; names the row.
    """
    try:
        return _apply(tokenizer, messages, conversation.tools, prompt)
    except RENDER_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{conversation.source}: the chat template cannot show this conversation (roles: {roles}): {error}\n"
            "Change the row, or choose another template: data.chat_template=plain"
        ) from None


def check_template(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, origin: str) -> None:
    """Renders one conversation in a child process with limits on time and memory, which the sandbox does not have.

    Raises:
        ConfigError: the template is broken, hostile, or renders nothing.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_trial, args=(tokenizer, conversation, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        problem = ours.recv() if ours.poll(TRIAL_SECONDS) else f"it ran for more than {TRIAL_SECONDS} s on one row"
    except EOFError:
        problem = "it ended the process that rendered it (out of memory?)"
    finally:
        child.kill()
        child.join()
        ours.close()
    if problem:
        raise ConfigError(f"data.chat_template: {origin} cannot be used: {problem}")


def _trial(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, answer: Connection) -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + TRIAL_BYTES, used + TRIAL_BYTES))
    problem = None
    try:
        if not _apply(tokenizer, conversation.messages, conversation.tools, prompt=False).strip():
            problem = f"it renders {conversation.source} to nothing"
    except TemplateSyntaxError as error:
        problem = f"syntax error in line {error.lineno}: {error.message}"
    except (SecurityError, OverflowError) as error:
        problem = f"it does what a template must not do: {error}"
    except MemoryError:
        problem = f"it takes more than {TRIAL_BYTES // GIB} GiB of memory on one row"
    except RENDER_ERRORS:
        pass  # It may only dislike this row: `render` says so with the row's name.
    answer.send(problem)

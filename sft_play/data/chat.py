"""Conversations -> token ids and labels: exactly what the assistant says is learned, up to and with its end-of-turn token.

Where an answer stands in the text is found by rendering: the messages before it with the generation prompt are what the
model will be given, so what the template writes after that is what it has to say. A template with {% generation %} marks
says it itself. The text is tokenised once, whole; token offsets carry the places over.

Some templates show a turn differently once it is history (Qwen3 leaves out its <think> block). Learned from the history,
such a turn would teach the model something that it never has to write. It becomes a row of its own instead, which ends with
this turn: `[u1 a1 u2 a2]` gives `u1 a1` and `u1 a1' u2 a2`, with a1 and a2 learned and a1' not.

TRL's training templates are not used: they are found by comparing the template with a stored copy, letter by letter, and
those that change what is shown would train on another text than the model is given afterwards.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sft_play.data.formats import Conversation, Message
from sft_play.data.template import RENDER_ERRORS, render
from sft_play.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
CUT_MARGIN = 64  # tokens at the end of a cut text that may differ from those of the whole text
WORD = re.compile(r"\w+")

Span = tuple[int, int]


@dataclass(frozen=True)
class Tokens:
    """One row as the model gets it; a label of IGNORED is not learned, and the first never is."""

    input_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A text and the parts of it that are learned, as character spans."""

    text: str
    learned: tuple[Span, ...]
    add_eos: bool = False
    """The template ends a turn without a token of its own, so the end-of-sequence token is put after the text."""


@dataclass(frozen=True)
class Chat:
    """How conversations become tokens: what `encode` needs besides them."""

    tokenizer: "PreTrainedTokenizerBase"
    supervise: str
    """data.supervise: assistant, last or all."""
    end_tokens: tuple[str, ...]
    """The texts that can end a turn: every token that was added to the vocabulary, such as "<|im_end|>" or "</s>"."""
    max_tokens: int | None = None
    """Of a row with more tokens than this, no more of its text is tokenised than it takes to know that."""


def make_chat(tokenizer: "PreTrainedTokenizerBase", supervise: str, max_tokens: int | None = None) -> Chat:
    """Checks that the tokenizer can say which characters a token came from.

    Raises:
        ConfigError: it cannot.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.name: {type(tokenizer).__name__} does not report character offsets, without which answers cannot be told "
            "from prompts. A model folder with tokenizer.json has a tokenizer that does"
        )
    added = {token for token in tokenizer.get_added_vocab() if token.strip()} | {str(tokenizer.eos_token)}
    return Chat(tokenizer, supervise, tuple(sorted(added)), max_tokens)


def prompt_and_answer(conversation: Conversation) -> tuple[list[Message], str]:
    """The messages before the last answer, and its text: what is generated from, and compared with."""
    last = max(index for index, message in enumerate(conversation.messages) if message["role"] == "assistant")
    return list(conversation.messages[:last]), conversation.messages[last]["content"]


def encode(chat: Chat, conversations: Sequence[Conversation]) -> list[list[Tokens]]:
    """Rows of each conversation: one, or several where the template rewrites earlier turns, or none with nothing to learn.

    Raises:
        DataError: names the row that the template cannot show, or whose answers cannot be found in the rendered text.
    """
    layouts = [[] if row.text is not None else layout(chat, row) for row in conversations]
    flat = iter(_tokenise(chat, [part for parts in layouts for part in parts]))
    encoded = [[next(flat) for _ in parts] for parts in layouts]
    texts = [number for number, row in enumerate(conversations) if row.text is not None]
    for number, tokens in zip(texts, _tokenise_text(chat, [str(conversations[n].text) for n in texts]), strict=True):
        encoded[number] = [tokens]
    return encoded


def layout(chat: Chat, conversation: Conversation) -> list[Layout]:
    """The text of a conversation and where it is learned; see the head of this file for when there are several."""
    messages = conversation.messages
    if chat.supervise == "all":
        text = render(chat.tokenizer, conversation, messages)
        end = _end_of_turn(chat, text)
        return [Layout(text[:end], ((0, end),), add_eos=not text[:end].endswith(chat.end_tokens))]
    turns = _learned_turns(conversation)
    if not turns:
        return []
    if chat.supervise == "last":
        turns = turns[-1:]
    template = chat.tokenizer.get_chat_template(None, conversation.tools)
    return _layouts_by_marks(chat, conversation, turns) if "endgeneration" in template else _layouts(chat, conversation, turns)


def _learned_turns(conversation: Conversation) -> list[int]:
    """Assistant turns that answer something: a greeting before the first question is context, as is a given prompt."""
    roles = [message["role"] for message in conversation.messages]
    first = max(roles.index("user") if "user" in roles else 1, conversation.context, 1)
    return [index for index, role in enumerate(roles) if role == "assistant" and index >= first]


def _layouts(chat: Chat, conversation: Conversation, turns: list[int]) -> list[Layout]:
    """Goes back from the last turn; a turn that the text at hand shows differently opens a text of its own."""
    found: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        own = render(chat.tokenizer, conversation, conversation.messages[: turn + 1])
        end = _end_in(chat, own, found[-1][0]) if found else None
        if end is None:
            end = _end_of_turn(chat, own)
            found.append((own[:end], []))
        start = _start_of_answer(chat, conversation, turn, own)
        _check_shown(conversation, turn, own[start:end])
        found[-1][1].append((start, end))
    ends = chat.end_tokens
    return [Layout(text, tuple(reversed(spans)), add_eos=not text.endswith(ends)) for text, spans in reversed(found)]


def _start_of_answer(chat: Chat, conversation: Conversation, turn: int, text: str) -> int:
    prompt = render(chat.tokenizer, conversation, conversation.messages[:turn], prompt=True)
    for start in (prompt, prompt.rstrip()):  # Some templates end the prompt in a space that they do not write themselves.
        if text.startswith(start):
            return len(start)
    same = len(os.path.commonprefix([prompt, text]))
    raise DataError(
        f"{conversation.source}: messages[{turn}] cannot be learned with this chat template: the prompt that the model will be "
        f"given ends in {prompt[same:][-60:]!r}, where the template shows the answer as {text[same:][:60]!r}.\n"
        "Choose a template that shows both alike (data.chat_template=<file>; TRL has such files in trl/chat_templates/"
        "*_training.jinja), or one of plain, chatml"
    )


def _check_shown(conversation: Conversation, turn: int, text: str) -> None:
    """Templates made for pictures may want a list of parts as content, and leave out text without a word."""
    answer = conversation.messages[turn]["content"]
    words = WORD.findall(answer[-200:])
    if words and words[-1] not in text:
        raise DataError(
            f"{conversation.source}: the chat template does not show the text of messages[{turn}] ({answer[:60]!r}); it gives "
            f"{text[-60:]!r}.\nChoose another template: data.chat_template=plain, or a file"
        )


def _end_of_turn(chat: Chat, text: str) -> int:
    """Where the turn that ends `text` ends, without the template's white space after the end token.

    Without an end token that white space is all there is to learn from when to stop, so it stays.
    """
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(chat.end_tokens) else len(text)


def _end_in(chat: Chat, own: str, text: str) -> int | None:
    """Where the turn that ends `own` ends in the longer `text`; None if `text` shows it differently."""
    eos = str(chat.tokenizer.eos_token)
    stripped = own.rstrip()
    if not text.startswith(stripped) and stripped.endswith(eos):  # Phi-3 closes the whole conversation with one more token.
        own = stripped.removesuffix(eos)
        stripped = own.rstrip()
    if not text.startswith(stripped):
        return None
    return min(_end_of_turn(chat, own), len(os.path.commonprefix([own, text])))


def _layouts_by_marks(chat: Chat, conversation: Conversation, turns: list[int]) -> list[Layout]:
    """{% generation %} says what the assistant writes; the end token is added where the marks leave it out.

    The places are taken as characters: transformers' own token mask loses a turn whose first character is no token's.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = conversation.messages[: turns[-1] + 1]
    arguments: dict[str, Any] = {
        "conversations": [list(messages)],
        "tools": conversation.tools,
        "chat_template": chat.tokenizer.get_chat_template(None, conversation.tools),
        "return_assistant_tokens_mask": True,
        **chat.tokenizer.special_tokens_map,
    }
    try:
        rendered: Any = render_jinja_template(**arguments)
    except RENDER_ERRORS:
        render(chat.tokenizer, conversation, messages)  # Says what is wrong, with the row's name.
        raise
    text, spans = rendered[0][0], [(start, end) for start, end in rendered[1][0] if end > start]
    _check_shown(conversation, turns[-1], text)
    if len(turns) < sum(message["role"] == "assistant" for message in messages):
        before = _end_in(chat, render(chat.tokenizer, conversation, messages[: turns[0]]), text)
        if before is None:
            raise DataError(
                f"{conversation.source}: the chat template shows what stands before messages[{turns[0]}] differently once that "
                "answer follows, so it cannot be told which of its marks are to be learned. Use data.supervise=assistant"
            )
        spans = [(start, end) for start, end in spans if start >= before]
    spans = [(start, _end_of_mark(chat, text, start, end)) for start, end in spans]
    if not spans:
        return []
    text = text[: spans[-1][1]]
    return [Layout(text, tuple(spans), add_eos=not text.endswith(chat.end_tokens))]


def _end_of_mark(chat: Chat, text: str, start: int, end: int) -> int:
    stripped = start + len(text[start:end].rstrip())
    if text[start:stripped].endswith(chat.end_tokens):
        return stripped
    closing = next((token for token in chat.end_tokens if text.rstrip().endswith(token) and text.startswith(token, end)), "")
    return end + len(closing)


def _beginning(chat: Chat, text: str) -> str:
    """The text, or of one that is far too long as much as surely has more than max_tokens tokens.

    A row of megabytes would otherwise take gigabytes to tokenise, only to be dropped or cut.
    """
    size = 32 * (chat.max_tokens or len(text))
    while size < len(text):
        ids = chat.tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > (chat.max_tokens or 0) + CUT_MARGIN:
            return text[:size]
        size *= 4
    return text


def _tokenise(chat: Chat, layouts: Sequence[Layout]) -> list[Tokens]:
    if not layouts:
        return []
    texts = [_beginning(chat, part.text) for part in layouts]
    batch = chat.tokenizer(
        texts,
        add_special_tokens=False,  # the template writes them
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    rows = []
    for part, text, ids, offsets in zip(layouts, texts, batch["input_ids"], batch["offset_mapping"], strict=True):
        add_eos = part.add_eos and len(text) == len(part.text)
        rows.append(_with_labels(np.array(ids, np.int32), label_mask(np.array(offsets), part.learned), chat, add_eos))
    return rows


def label_mask(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens are learned: those with a character in one of the spans. `offsets` is [tokens, 2].

    A token that begins in the prompt's last space and ends in the answer's first word is learned with the word.
    Tokens of no width (a tokenizer may put some before a word) go with the place where they stand.

    Example: tokens "Hi", " there", "!" of "Hi there!" with span (3, 9) give [False, True, True].
    """
    begins, ends = offsets.reshape(-1, 2).T
    learned = np.zeros(len(begins), bool)
    for start, end in spans:
        learned |= (begins < end) & np.where(ends > begins, ends > start, begins >= start)
    return learned


def _tokenise_text(chat: Chat, texts: Sequence[str]) -> list[Tokens]:
    """Plain text: everything is learned, and the tokenizer's own special tokens stand where it puts them."""
    if not texts:
        return []
    rows = []
    for ids in chat.tokenizer([_beginning(chat, text) for text in texts], verbose=False)["input_ids"]:
        closed = bool(ids) and ids[-1] == chat.tokenizer.eos_token_id
        rows.append(_with_labels(np.array(ids, np.int32), np.ones(len(ids), bool), chat, add_eos=not closed))
    return rows


def _with_labels(ids: np.ndarray, learned: np.ndarray, chat: Chat, add_eos: bool) -> Tokens:
    if add_eos:
        ids = np.append(ids, np.int32(chat.tokenizer.eos_token_id))
        learned = np.append(learned, True)
    labels = np.where(learned, ids, np.int32(IGNORED))
    labels[:1] = IGNORED  # nothing stands before the first token that it could be told from
    return Tokens(ids, labels.astype(np.int32))

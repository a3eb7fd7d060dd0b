"""Conversations -> rendered texts, and where in them the answers are that carry loss.

To locate an answer in the text, the messages before it are rendered with the generation prompt. That is the
prompt at inference time, so whatever the template writes after it is what the model has to produce. A
template with {% generation %} tags marks the answers itself. `tokens.py` maps these spans to tokens.

Some templates render a turn differently once it is history (Qwen3 drops its <think> block). Training on the
history would teach the model text that it never has to produce. Such a turn becomes a row of its own that
ends with it: `[u1 a1 u2 a2]` gives `u1 a1` and `u1 a1' u2 a2`, with loss on a1 and a2 but not on a1'.

TRL's training templates are not used. TRL selects one by comparing the tokenizer's template with a stored
copy, character by character, and some of them render different text than the model sees at inference time.
"""

import os
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sft_play.data.boundaries import answer_start
from sft_play.data.control_tokens import MARKS, ControlTokens, control_tokens, without_marks
from sft_play.data.limits import require_length, within_limits
from sft_play.data.spans import Pieces, Span
from sft_play.data.template import cannot_render, flatten_globals, render, render_example, render_together
from sft_play.errors import ConfigError, DataError
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import Message
from sft_play.vision.families import TEXT_ALONE, Recipe
from sft_play.vision.parts import for_template
from sft_play.vision.types import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD, WHITE_SPACE = re.compile(r"\w+"), re.compile(r"\s*")
HIDDEN_REASONING = "with reasoning that the chat template does not render"
UNSTOPPED = "with answers that no token ends before the next turn"

# Yields turns of a conversation, and is sent the text that ends with each and the prompt for it.
Renderings = Generator[tuple["Conversation", int], tuple[str, str], list["RenderedRow"]]


@dataclass(frozen=True)
class RenderedRow:
    """A rendered text, with the character spans that carry loss."""

    text: str
    supervised: tuple[Span, ...]
    add_eos: bool = False  # append the end-of-sequence token, because the template has no end-of-turn token
    spelled: tuple[Span, ...] = ()  # control tokens of the row's own texts, to be spelled as ordinary text
    unstopped: bool = False  # whether an answer before the last one ends without a token that stops it
    messages: int = 0  # how many of the conversation it has
    pictures: tuple[Picture, ...] = ()  # of these, once their texts are in it


@dataclass(frozen=True)
class Chat:
    """Settings for rendering and tokenizing conversations."""

    tokenizer: "PreTrainedTokenizerBase"
    supervise: str  # data.supervise: assistant, last or all
    end_tokens: tuple[str, ...]
    """Texts that can end a turn: every token added to the vocabulary, such as "<|im_end|>" or "</s>"."""
    max_tokens: int | None = None
    """Longer rows are tokenized only as far as needed to know that they are longer."""
    learn_tool_calls: bool = True  # whether assistant turns that call tools carry loss
    pieces: Pieces | None = None  # saves time with many rows
    controls: ControlTokens | None = None  # None: texts are not searched for control tokens
    recipe: Recipe | str = TEXT_ALONE  # how the model takes pictures, or why it takes none


def make_chat(
    tokenizer: "PreTrainedTokenizerBase",
    supervise: str,
    max_tokens: int | None = None,
    *,
    learn_tool_calls: bool = True,
) -> Chat:
    """The settings for a tokenizer; texts are not searched for control tokens.

    Raises:
        ConfigError: the tokenizer does not report character offsets.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.name: {type(tokenizer).__name__} does not report character offsets, which are needed to "
            "separate answers from prompts. Use a model with a fast tokenizer (its folder has tokenizer.json)"
        )
    added = {token for token in tokenizer.get_added_vocab() if token.strip()} | {str(tokenizer.eos_token)}
    return Chat(tokenizer, supervise, tuple(sorted(added)), max_tokens, learn_tool_calls)


def with_control_tokens(chat: Chat, setting: str, *, renders: bool = True) -> Chat:
    """The settings with those of data.control_tokens; `renders`: a chat template, which has been tried."""
    question = render_example(chat.tokenizer, "question") if renders else None
    return replace(chat, controls=control_tokens(chat.tokenizer, setting, question))


def marked(chat: Chat, conversation: Conversation) -> Conversation:
    """The conversation for the template, with marks around control tokens that are to be spelled."""
    return chat.controls.marked(conversation) if chat.controls else conversation


def render_rows(chat: Chat, conversations: Sequence[Conversation]) -> list[list[RenderedRow]]:
    """The rendered rows of each conversation; the module docstring explains when there are several.

    Raises:
        DataError: a row cannot be rendered; names one.
    """
    found = _advance_together(chat, [_renderings(chat, marked(chat, row)) for row in conversations])
    return [list(map(_without_marks, rows)) for rows in found]


def _without_marks(row: RenderedRow) -> RenderedRow:
    if not MARKS.search(row.text):
        return row
    text, supervised, spelled = without_marks(row.text, row.supervised)
    return replace(row, text=text, supervised=supervised, spelled=spelled)


def _advance_together(chat: Chat, renderings: Sequence[Renderings]) -> list[list[RenderedRow]]:
    """What each of these returns, while all that they wait for is rendered in one call."""
    found: list[list[RenderedRow]] = [[] for _ in renderings]
    answers: dict[int, Any] = dict.fromkeys(range(len(renderings)))  # None starts a generator
    while answers:
        asked = {}
        for index, answer in answers.items():
            try:
                asked[index] = renderings[index].send(answer)
            except StopIteration as done:
                found[index] = done.value
        texts = render_together(chat.tokenizer, [(row, turn + 1) for row, turn in asked.values()])
        prompts = render_together(chat.tokenizer, list(asked.values()), prompt=True)
        answers = dict(zip(asked, zip(texts, prompts, strict=True), strict=True))
    return found


def _renderings(chat: Chat, conversation: Conversation) -> Renderings:
    if conversation.text is not None:
        return []
    if chat.supervise == "all":
        return [_render_whole(chat, conversation)]
    turns = supervised_turns(chat, conversation)
    if not turns:
        return []
    template = chat.tokenizer.get_chat_template(None, conversation.tools)
    if "endgeneration" in template:
        return _render_with_tags(chat, conversation, turns)
    return (yield from _render_by_prefix(chat, conversation, turns))


def _render_whole(chat: Chat, conversation: Conversation) -> RenderedRow:
    if conversation.untrained:
        raise DataError(
            f"{conversation.source}: messages[{conversation.untrained[0]}] is excluded from the loss, "
            "but data.supervise=all puts loss on every token; set data.supervise to assistant or last"
        )
    text = render(chat.tokenizer, conversation, conversation.messages)
    end = _end_of_turn(chat, text)
    add_eos, count = not text[:end].endswith(chat.end_tokens), len(conversation.messages)
    return RenderedRow(text[:end], ((0, end),), add_eos=add_eos, messages=count)


def supervised_turns(chat: Chat, conversation: Conversation) -> list[int]:
    """Indices of the assistant turns that carry loss; a greeting before the first question is context."""
    excluded = set(conversation.untrained)
    if not chat.learn_tool_calls:
        excluded |= {i for i, message in enumerate(conversation.messages) if "tool_calls" in message}
    roles = [message["role"] for message in conversation.messages]
    first = max(roles.index("user") if "user" in roles else 1, conversation.context, 1)
    turns = [
        index
        for index, role in enumerate(roles)
        if role == "assistant" and index >= first and index not in excluded
    ]
    return turns[-1:] if chat.supervise == "last" else turns


def asked_turns(chat: Chat, conversation: Conversation) -> list[int]:
    """Indices of the answers that are asked for in an evaluation: the last one, and those that call tools."""
    turns = supervised_turns(chat, conversation)
    return [turn for turn in turns if turn == turns[-1] or "tool_calls" in conversation.messages[turn]]


def answer_text(chat: Chat, conversation: Conversation, turn: int) -> str | None:
    """What the chat template has a model write for messages[turn], without the token that ends it.

    None if that does not follow a prompt.
    """
    until = conversation.messages[: turn + 1]
    try:
        own = render(chat.tokenizer, conversation, until)
        prompt = render(chat.tokenizer, conversation, until[:-1], prompt=True)
        start = _start_of_answer(chat, conversation, turn, own, prompt)
    except DataError:
        return None
    end = _end_of_turn(chat, own)
    return own[start:end].removesuffix(_end_token(chat, own, start, end))


def _render_by_prefix(chat: Chat, conversation: Conversation, turns: list[int]) -> Renderings:
    """Goes back from the last turn; a turn that the current text renders differently starts another row."""
    found: list[tuple[str, list[Span], int]] = []
    for turn in reversed(turns):
        own, prompt = yield conversation, turn
        start = _start_of_answer(chat, conversation, turn, own, prompt)
        end = _end_in(chat, own, found[-1][0]) if found else None
        if end is None:
            end = _end_of_turn(chat, own)
            found.append((own[:end], [], turn + 1))
        else:
            end = _through_marker(chat, found[-1][0], start, end)
        _check_shown(conversation, turn, own[start:end])
        found[-1][1].append((start, end))
    return [_rendered(chat, text, spans[::-1], count) for text, spans, count in reversed(found)]


def _rendered(chat: Chat, text: str, spans: Sequence[Span], messages: int) -> RenderedRow:
    """The row of a text of so many messages, which ends with an answer."""
    return RenderedRow(
        text,
        tuple(spans),
        add_eos=not _end_token(chat, text, *spans[-1]),
        unstopped=not all(_end_token(chat, text, *span) for span in spans[:-1]),
        messages=messages,
    )


def _start_of_answer(chat: Chat, conversation: Conversation, turn: int, text: str, prompt: str) -> int:
    # Some templates end the prompt with a space that they do not write before an answer; at inference it is
    # left to the answer, unlike the line break of "<think>\n".
    for start in (len(prompt), answer_start(chat.tokenizer, prompt, len(prompt))):
        if text.startswith(prompt[:start]):
            return start
    same = len(os.path.commonprefix([prompt, text]))
    raise DataError(
        f"{conversation.source}: messages[{turn}] cannot be trained on with this chat template: the "
        f"generation prompt ends with {prompt[same:][-60:]!r}, but the rendered conversation has "
        f"{text[same:][:60]!r} in its place.\n"
        "Set data.chat_template to plain, chatml, or a Jinja file that renders both the same way (TRL ships "
        "such files: trl/chat_templates/*_training.jinja)"
    )


def _check_shown(conversation: Conversation, turn: int, text: str) -> None:
    """Checks that the text contains the answer: templates may silently drop string content or tool calls."""
    answer = conversation.messages[turn]["content"]
    calls = conversation.messages[turn].get("tool_calls", ())
    dropped = [call["function"]["name"] for call in calls if call["function"]["name"] not in text]
    if dropped:
        raise DataError(
            f"{conversation.source}: the chat template does not render the tool calls of messages[{turn}] "
            f"({dropped[0]!r}); it renders {text[-60:]!r}.\n"
            "Use a template that does (data.chat_template=plain), or train without tool calls "
            "(data.learn_tool_calls=false)"
        )
    last_word = WORD.search(answer[:-201:-1])  # backwards
    if last_word and last_word[0][::-1] not in text:
        raise DataError(
            f"{conversation.source}: the chat template does not render the text of messages[{turn}] "
            f"({answer[:60]!r}); it renders {text[-60:]!r}.\n"
            "Use another template: data.chat_template=plain, or a Jinja file"
        )


def hides_reasoning(chat: Chat, conversation: Conversation, rows: Sequence[RenderedRow]) -> bool:
    """Whether the rendered rows lack the reasoning (its last line) of a turn that carries loss."""
    if not rows or not any("reasoning_content" in message for message in conversation.messages):
        return False
    found = (conversation.messages[i].get("reasoning_content") for i in supervised_turns(chat, conversation))
    ends = [text.strip().rpartition("\n")[2] for text in found if text]
    text = "\n".join(row.text for row in rows)
    return any(end not in text for end in ends)


def _end_of_turn(chat: Chat, text: str) -> int:
    """Where the last turn of `text` ends, excluding the template's whitespace after the end token.

    Without an end token, that whitespace is the only stop signal, so it is kept.
    """
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(chat.end_tokens) else len(text)


def _end_token(chat: Chat, text: str, start: int, end: int) -> str:
    """The token that ends the answer at a span of `text`; "" if none does.

    One that closes a part of the answer, as "</tool_call>" does, does not end it.
    """
    answer = text[start:end]
    for token in filter(answer.endswith, chat.end_tokens):
        opened = answer.find(token.replace("</", "<")) if token.startswith("</") else 0
        if opened <= 0 or token == chat.tokenizer.eos_token:
            return token
    return ""


def _through_marker(chat: Chat, text: str, start: int, end: int) -> int:
    """The end of an answer that nothing but the marker of the next turn ends, such as GLM's <|user|>.

    The model stops where it writes that marker, so it has to learn it.
    """
    if _end_token(chat, text, start, end):
        return end
    after = WHITE_SPACE.match(text, end).end()  # type: ignore[union-attr]  # matches the empty string too
    marker = max((len(token) for token in chat.end_tokens if text.startswith(token, after)), default=0)
    return after + marker if marker else end


def _end_in(chat: Chat, own: str, text: str) -> int | None:
    """Where the last turn of `own` ends in the longer `text`; None if `text` renders it differently."""
    eos = str(chat.tokenizer.eos_token)
    stripped = own.rstrip()
    # Phi-3 closes the whole conversation with an extra token.
    if not text.startswith(stripped) and stripped.endswith(eos):
        own = stripped.removesuffix(eos)
        stripped = own.rstrip()
    if not text.startswith(stripped):
        return None
    return min(_end_of_turn(chat, own), len(os.path.commonprefix([own, text])))


def _render_with_tags(chat: Chat, conversation: Conversation, turns: list[int]) -> list[RenderedRow]:
    """Uses the template's {% generation %} tags; the end token is added where a tag excludes it.

    Character spans are used because transformers' own token mask loses a turn whose first character belongs
    to no token.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = conversation.messages[: turns[-1] + 1]
    template = chat.tokenizer.get_chat_template(None, conversation.tools)
    arguments: dict[str, Any] = {
        "conversations": [for_template(messages, template)],
        "tools": conversation.tools,
        "chat_template": template,
        "return_assistant_tokens_mask": True,
        **chat.tokenizer.special_tokens_map,
    }

    def call() -> Any:
        flatten_globals(template)
        return render_jinja_template(**arguments)

    try:
        rendered = within_limits(call)
        text = require_length(rendered[0][0])
    except Exception as error:  # a template makes Python raise anything
        raise cannot_render(conversation, messages, error) from None
    spans = [(start, end) for start, end in rendered[1][0] if end > start]
    for turn in turns:
        _check_shown(conversation, turn, text)
    for first, last in _runs_without_loss(messages, turns):
        begin, end_of_run = (_end_before(chat, conversation, turn, text) for turn in (first, last + 1))
        spans = [(start, end) for start, end in spans if not begin <= start < end_of_run]
    spans = [(start, _end_of_tag(chat, text, start, end)) for start, end in spans]
    if not spans:
        return []
    return [_rendered(chat, text[: spans[-1][1]], spans, len(messages))]


def _runs_without_loss(messages: Sequence[Message], turns: list[int]) -> list[tuple[int, int]]:
    """First and last message of each run of messages before or between `turns` that has assistant turns."""
    starts = [0, *(turn + 1 for turn in turns[:-1])]
    roles = [message["role"] for message in messages]
    runs = zip(starts, turns, strict=True)
    return [(start, turn - 1) for start, turn in runs if "assistant" in roles[start:turn]]


def _end_before(chat: Chat, conversation: Conversation, turn: int, text: str) -> int:
    """Where the messages before messages[turn] end in `text`, the rendered conversation."""
    if not turn:
        return 0
    end = _end_in(chat, render(chat.tokenizer, conversation, conversation.messages[:turn]), text)
    if end is None:
        raise DataError(
            f"{conversation.source}: the chat template renders the messages before messages[{turn}] "
            "differently once that answer follows, so its {% generation %} tags cannot be matched to "
            "turns. Use data.supervise=assistant"
        )
    return end


def _end_of_tag(chat: Chat, text: str, start: int, end: int) -> int:
    stripped = start + len(text[start:end].rstrip())
    if _end_token(chat, text, start, stripped):
        return stripped
    return _through_marker(chat, text, start, end)

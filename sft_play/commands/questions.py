"""The questions of held-out rows: prompts, and what of an answer is compared with what."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sft_play.commands.answers import Compared, require_answers
from sft_play.commands.judges import try_judges
from sft_play.config.schema import RunConfig
from sft_play.data.chat import Chat, answer_text, asked_turns
from sft_play.data.prepare import PreparedData
from sft_play.data.tokens import prompt_ids
from sft_play.model.generation import chat_of
from sft_play.rows.calls import (
    Call,
    calls_of_message,
    calls_text,
    compared_text,
    history_text,
    without_reasoning,
)
from sft_play.rows.formats import Conversation
from sft_play.rows.images import as_written
from sft_play.rows.messages import Message
from sft_play.vision.expansion import pictures_in, rooted
from sft_play.vision.types import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """An answer to be given: the messages before it, the one of the row, and the tokenized prompt."""

    messages: tuple[Message, ...]  # as files of rows have them
    reference: str  # its text without reasoning, or its calls
    ids: list[int]
    calls: tuple[Call, ...] = ()  # of the reference
    row: Mapping[str, Any] = field(default_factory=dict)  # messages until the reference, tools, source
    pictures: tuple[Picture, ...] = ()

    @property
    def shown(self) -> str:
        """The prompt for a reader, with its history in short."""
        return history_text(self.messages)

    def compared(self, answer: str) -> Compared:
        """What of a generated answer is compared with the reference."""
        return Compared(compared_text(answer, self.calls), self.reference, bool(self.calls), self.row)


def questions(
    config: RunConfig,
    data: PreparedData,
    split: str,
    tokenizer: "PreTrainedTokenizerBase",
    limit: int | None = None,
) -> list[Question]:
    """The first `limit` (default: eval.limit) answers of a split: the last of a row, and its calls of tools.

    Plain text has none.

    Raises:
        ConfigError: eval.answer_pattern matches none of them, or a function of eval.metrics fails.
    """
    limit = limit or config.eval.limit
    chat, found = chat_of(config, tokenizer, data.recipe), list[Question]()
    for conversation in data.conversations(split):
        conversation = replace(conversation, messages=rooted(conversation.messages, data.cache_path))
        turns = asked_turns(chat, conversation) if conversation.text is None else []
        for turn in turns:
            found += [question] if (question := _question(chat, conversation, turn)).reference else []
        if len(found) >= limit:
            break
    found = found[:limit]
    texts = [question.reference for question in found if not question.calls]
    require_answers(texts, config.eval.answer_pattern)
    if found:
        first = found[0]
        try_judges(config.eval.metrics, replace(first.compared(""), answer=first.reference))
    return found


def _question(chat: Chat, conversation: Conversation, turn: int) -> Question:
    message = conversation.messages[turn]
    prompt = replace(conversation, messages=conversation.messages[:turn])
    reference, calls = without_reasoning(message["content"]), tuple(calls_of_message(message))
    if calls:
        said = _decoded(chat.tokenizer, answer_text(chat, conversation, turn) or "")
        reference = calls_text(calls)
        if compared_text(said, calls) != reference:  # of a template whose calls we cannot read
            reference, calls = without_reasoning(said), ()
    asked = tuple(map(as_written, prompt.messages))
    row = {"messages": [*asked, message], "tools": prompt.tools, "source": prompt.source}
    ids, pictures = prompt_ids(chat, prompt) if reference else [], pictures_in(prompt.messages)
    return Question(asked, reference, ids, calls, row, pictures)


def _decoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> str:
    """A text as it is if a model generates it: without special tokens."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def closing_questions(
    config: RunConfig, data: PreparedData, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, list[Question]]:
    """The split that answers are generated for at the end of a run, test if there is one, and `questions`."""
    split = "test" if data.test is not None and len(data.test) else "val"
    return split, questions(config, data, split, tokenizer)

"""The Modelfile by which Ollama runs a GGUF file with the chat template that the model was trained with.

Ollama's templates are in Go's language; it uses the Jinja template of a GGUF file only if it recognizes it.
So the template is rendered on a few conversations, what it puts around the texts is read off, and written in
Go if it gives the same prompts for other conversations. Otherwise the Modelfile gets no template.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from sft_play.data.template import render
from sft_play.errors import DataError
from sft_play.rows.formats import Conversation
from sft_play.rows.messages import Message, alternating

SYSTEM, QUESTION, ANSWER, NEXT = "Rules-of-play", "First-question", "First-answer", "Next-question"


@dataclass(frozen=True)
class Turns:
    """What a chat template puts around the texts of a conversation."""

    opening: str  # before the first question, without a system prompt
    answer: str  # between a question and its answer
    question: str  # between an answer and the next question
    last: str  # after the last question: where the model begins its answer
    system: tuple[str, str] | None
    """Before the system prompt, and between it and the first question; None if the template knows none."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The prompt for the next answer."""
        texts = [message["content"] for message in messages]
        if messages[0]["role"] == "system":
            assert self.system
            before, after = self.system
            text, texts = f"{before}{texts[0]}{after}", texts[1:]
        else:
            text = self.opening
        marks = [self.answer if index % 2 == 0 else self.question for index in range(len(texts) - 1)]
        pairs = zip(texts, [*marks, self.last], strict=True)
        return text + "".join(f"{content}{mark}" for content, mark in pairs)

    def in_go(self) -> str:
        """The template in Go's language, for Ollama's messages."""
        opening = _go(self.opening)
        if self.system:
            before, after = self.system
            given = f"{_go(before)}{{{{ .System }}}}{_go(after)}"
            opening = f"{{{{ if .System }}}}{given}{{{{ else }}}}{opening}{{{{ end }}}}"
        after = _go(self.answer)
        if self.last != self.answer:
            is_last = "{{ if eq (len (slice $.Messages $i)) 1 }}"
            after = f"{is_last}{_go(self.last)}{{{{ else }}}}{after}{{{{ end }}}}"
        parts = [
            opening,
            "{{ $first := true }}{{ range $i, $_ := .Messages }}",
            '{{ if eq .Role "user" }}',
            f"{{{{ if not $first }}}}{_go(self.question)}{{{{ end }}}}",
            f"{{{{ .Content }}}}{after}{{{{ $first = false }}}}",
            '{{ else if eq .Role "assistant" }}{{ .Content }}{{ end }}{{ end }}',
        ]
        return "".join(parts)


def _go(text: str) -> str:
    """A piece of a Go template that prints `text`."""
    return f"{{{{ {_quoted(text)} }}}}" if text else ""


def _quoted(text: str) -> str:
    """A string as Go writes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def turns_of(tokenizer: PreTrainedTokenizerBase, *, adds_bos: bool) -> Turns | None:
    """What the chat template puts around texts; None if it does more than that.

    `adds_bos`: the GGUF file says that the token that begins a text is added, so it is left out here: Ollama
    adds it to whatever the template has written.
    """
    if not isinstance(tokenizer.chat_template, str):
        return None
    rendered = partial(_rendered, tokenizer, adds_bos)
    try:
        opening, rest = rendered(alternating(QUESTION, ANSWER, NEXT)).split(QUESTION)
        answer, rest = rest.split(ANSWER)
        question, last = rest.split(NEXT)
        turns = Turns(opening, answer, question, last, _system_marks(rendered))
        agrees = all(turns.prompt(trial) == rendered(trial) for trial in _trials(turns))
    except (DataError, ValueError):  # a text appears twice or not at all
        return None
    return turns if agrees else None


def _system_marks(rendered: Callable[[Sequence[Message]], str]) -> tuple[str, str] | None:
    try:
        text = rendered((_system(SYSTEM), *alternating(QUESTION)))
        before, rest = text.split(SYSTEM)
        return before, rest.split(QUESTION)[0]
    except (DataError, ValueError):
        return None


def _trials(turns: Turns) -> list[tuple[Message, ...]]:
    """Conversations that `turns` was not read off."""
    chat, system = alternating("one", "two", "three", "four", "five"), _system("six")
    return [chat[:1], chat[:3], chat] + ([(system, chat[0]), (system, *chat)] if turns.system else [])


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _rendered(tokenizer: PreTrainedTokenizerBase, adds_bos: bool, messages: Sequence[Message]) -> str:
    text = render(tokenizer, Conversation(tuple(messages)), messages, prompt=True)
    return text.removeprefix(str(tokenizer.bos_token)) if adds_bos else text


def modelfile(file_name: str, turns: Turns | None, stops: Sequence[str], system: str | None) -> str:
    """The text of a Modelfile beside the GGUF file `file_name`; without `turns` it has no template.

    `stops` end an answer. The system prompt must not contain three quotes in a row.
    """
    lines = [f"# ollama create <name> -f Modelfile\nFROM ./{file_name}"]
    if turns is None:
        lines.append(
            "# The chat template of this model does more than can be written for Ollama here. Ollama may\n"
            "# recognize the one inside the GGUF file, or not: compare its prompts, or add a TEMPLATE."
        )
    else:
        lines.append(f'TEMPLATE """{turns.in_go()}"""')
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"

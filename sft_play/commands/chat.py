"""Chat with the trained model in the terminal."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.commands.answers import tools_note
from sft_play.commands.infer import gallery_of_prompts, warn_of_unknown_words
from sft_play.config.schema import RunConfig
from sft_play.data.sources import Source
from sft_play.data.tokens import prompt_ids
from sft_play.errors import DataError
from sft_play.files import own_folder
from sft_play.model.build import load_for_inference
from sft_play.model.generation import chat_of, generate, load_chat_tokenizer, stop_token_ids
from sft_play.model.load import position_limit
from sft_play.model.weights.finished import finished_weights
from sft_play.report.record import tree_of
from sft_play.rows.calls import calls_of, reasoning_of, without_reasoning
from sft_play.rows.formats import Conversation, tools_of
from sft_play.rows.images import MARK, TAG
from sft_play.rows.invalid import InvalidRow
from sft_play.rows.messages import Message
from sft_play.rows.strict_json import parse
from sft_play.runlog import RunDir, read_json
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import LOADING, spinner
from sft_play.vision.expansion import pictures_in
from sft_play.vision.gallery import Gallery
from sft_play.vision.prompts import Pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELP = """/reset: new chat   /system TEXT: system prompt   /quit   Ctrl-C: stop the answer
/tools FILE: offer the tools of a JSON list   /result TEXT: what a call returned"""
IMAGE_HELP = "/image FILE: an image before your next message"
NO_FOLLOW_UP = "Each starts a new chat; type /reset before your own message unless it is a follow-up."
BLANK: Message = {"role": "user", "content": ""}
SURROGATE = re.compile("[\ud800-\udfff]")  # what stands for bytes that are not UTF-8
NOT_TYPED = re.compile(rf"\n|{TAG}")  # what an example to type may not have
SHOWN_PROMPT = 300  # characters; a longer one is no example to type
MIN_ANSWER_TOKENS = 16  # that must fit after the prompt


@dataclass
class Dialogue:
    """The state of a chat: system prompt, tools, turns, and the next one, which may have images already."""

    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    turns: list[Message] = field(default_factory=list)
    gallery: Gallery = Gallery()
    draft: Message = field(default_factory=BLANK.copy)

    @property
    def messages(self) -> list[Message]:
        """The messages for the chat template."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def begin(self) -> None:
        """Starts a new conversation."""
        self.turns, self.draft = [], BLANK

    def question(self, text: str) -> Message:
        """A message of the user, with the images before it, which are used up."""
        draft, self.draft = self.draft, BLANK
        return {**draft, "content": draft["content"] + text}

    def take_back(self) -> None:
        """Removes the last message, which was not sent; its images are again those of the next one."""
        last = self.turns.pop()
        self.draft = {**last, "role": "user", "content": MARK * last["content"].count(MARK)}


def run_chat_command(chat: Dialogue, line: str) -> str | None:
    """Executes a chat command; returns the reply, or None to end the chat."""
    command, _, text = line.partition(" ")
    if command in ("/quit", "/exit"):
        return None
    if command == "/reset":
        chat.begin()
        return "started a new conversation"
    if command == "/system":
        chat.begin()
        chat.system = text.strip() or None
        return f"system prompt: {chat.system or '(none)'}; started a new conversation"
    with_files = {"/image": _add_image, "/tools": _offer_tools}
    if command in with_files:
        return with_files[command](chat, text.strip())
    if command == "/result":
        return "no call was made; a call is made by an answer"
    return HELP if command == "/help" else f"unknown command {command}; available:\n{HELP}"


def _offer_tools(chat: Dialogue, file: str) -> str:
    """Offers the tools of a JSON file in place of those that were offered; returns the reply."""
    try:
        tools = tools_of(parse(Path(file).expanduser().read_text(encoding="utf-8"))) if file else None
    except (OSError, ValueError, InvalidRow) as error:
        return f"cannot read {file}: {getattr(error, 'strerror', None) or error}"
    chat.begin()
    chat.tools = tools
    names = [str(tree_of(tool.get("function", tool)).get("name")) for tool in tools or ()]
    return f"tools: {', '.join(names) or '(none)'}; started a new conversation"


def _add_image(chat: Dialogue, reference: str) -> str:
    """Puts an image before the next message; returns the reply."""
    asked = Conversation(({**BLANK, "content": MARK, "images": [reference]},), source="/image")
    try:
        chat.gallery.require_recipe()
        (message,) = chat.gallery.located(asked, "the chat").messages
    except DataError as error:
        return f"not added: {error}"
    images = [*chat.draft.get("images", ()), *message["images"]]
    chat.draft = {**BLANK, "content": MARK * len(images), "images": images}
    return f"added; {len(images)} before your next message"


def said_by_user(chat: Dialogue, line: str) -> Message | None:
    """What a line says to the model: a question, or after a call what it returned; None for a command."""
    command, _, text = line.partition(" ")
    if command == "/result" and chat.turns:
        return {"role": "tool", "content": text.strip()}
    return None if line.startswith("/") else chat.question(line)


def answer_message(text: str, *, tools: bool) -> Message:
    """An answer as a message of the history: if tools are offered, its calls as calls."""
    calls = calls_of(without_reasoning(text), ()) if tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    functions = [
        {"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls
    ]
    message: Message = {"role": "assistant", "content": "", "tool_calls": functions}
    return {**message, "reasoning_content": thought} if (thought := reasoning_of(text)) else message


def fit_history(
    chat: Dialogue, render: Callable[[Sequence[Message]], list[int]], limit: int | None, max_new_tokens: int
) -> tuple[list[int], int, int]:
    """Drops the oldest turns of the chat until prompt and answer fit into the model's context.

    A question is dropped with all that followed from it. The last one is always kept, even if it leaves too
    little room for an answer. `render` gives the prompt tokens of messages; `limit` is the context, if known.

    Returns:
        Prompt tokens, room for the answer in tokens, and the number of dropped turns.
    """
    dropped = 0
    while True:
        ids = render(chat.messages)
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
        later = [at for at, turn in enumerate(chat.turns) if at and turn["role"] == "user"]
        if room == max_new_tokens or not later:
            return ids, room, dropped
        del chat.turns[: later[0]]
        dropped += later[0]


def _printer(tokenizer: "PreTrainedTokenizerBase", pieces: list[str], stops: Sequence[int]) -> Any:
    """A streamer that prints an answer as it is generated, without `stops`, and collects it in `pieces`."""
    from transformers import TextStreamer

    class Printer(TextStreamer):
        def put(self, value: Any) -> None:
            if self.next_tokens_are_prompt or value.tolist()[-1] not in stops:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            console().print(text, end="", highlight=False, soft_wrap=True)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _reply(model: Any, tokenizer: "PreTrainedTokenizerBase", chat: Dialogue, config: RunConfig) -> None:
    """Answers the last question of the chat: prints the answer and adds it to the chat."""
    prompts = chat_of(config, tokenizer, chat.gallery.recipe)

    def render(messages: Sequence[Message]) -> list[int]:
        return prompt_ids(prompts, Conversation(tuple(messages), tools=chat.tools, source="the chat"))

    say, most = console().print, config.eval.max_new_tokens
    limit = position_limit(model.config)
    try:
        ids, room, dropped = fit_history(chat, render, limit, most)
    except DataError as error:
        say(f"not sent: {error}", style="yellow")
        chat.take_back()
        return
    if room < min(MIN_ANSWER_TOKENS, most):
        text = f"the prompt has {len(ids):,} tokens, the model supports {limit:,}"
        say(f"message too long: {text}; not sent", style="yellow")
        chat.take_back()
        return
    if dropped:
        say(
            f"dropped the first {dropped} messages, which no longer fit into the model's context", style="dim"
        )
    pieces: list[str] = []
    try:
        printer = _printer(tokenizer, pieces, stop_token_ids(model, tokenizer))
        seen = Pictures(prompts.recipe, [pictures_in(chat.messages)], chat.gallery.kept)
        new = generate(model, tokenizer, [ids], max_new_tokens=room, streamer=printer, pictures=seen)[0]
        say()
        if len(new) >= room:
            say(f"(truncated at {room} tokens: eval.max_new_tokens)", style="dim")
    except KeyboardInterrupt as interrupt:
        if str(interrupt):  # SIGTERM or a closed terminal, and not Ctrl-C
            raise
        say("\n(stopped)", style="dim")
    chat.turns.append(answer_message("".join(pieces).strip(), tools=bool(chat.tools)))


def chat(config: RunConfig, run: RunDir, *, read: Callable[[str], str] = input) -> None:
    """A chat in the terminal, with greedy decoding and streamed answers; `read` asks for a line of input.

    Raises CheckpointError if the run has no complete weights.
    """
    weights = finished_weights(config, run)
    kept = own_folder("sft-play-pictures-")
    with quiet_libraries(run.log):
        tokenizer = load_chat_tokenizer(config)
        gallery = gallery_of_prompts(config, tokenizer, Source("the chat", ()), kept)
        with spinner(LOADING):
            model = load_for_inference(config, weights)
    gallery = replace(gallery, allowed=Path("/"))  # whoever types a path may read the file
    state = Dialogue(config.data.system_prompt, gallery=gallery)
    console().print(f"{run.path.name} on {model.device}", style="bold")
    console().print(HELP, style="dim")
    _converse(config, run, model, tokenizer, state, read)


def _converse(
    config: RunConfig,
    run: RunDir,
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    state: Dialogue,
    read: Callable[[str], str],
) -> None:
    """Reads lines and answers them until the chat is ended."""
    with suppress(DataError):
        state.gallery.require_recipe()
        console().print(IMAGE_HELP, style="dim")
    if note := tools_note(read_json(run.summary)):
        console().print(note, style="dim")
    if prompts := _prompts_to_try(run):
        console().print("Held-out rows to try:", style="dim")
        for prompt in prompts:
            console().print(f"  {prompt}", highlight=False, soft_wrap=True)
        console().print(NO_FOLLOW_UP, style="dim")
    while True:
        try:
            line = read("\nyou> ").strip()
        except KeyboardInterrupt as interrupt:
            if str(interrupt):
                raise
            console().print("\nuse /quit or Ctrl-D to end the chat", style="dim")
            continue
        except EOFError:
            console().print()
            return
        if SURROGATE.search(line):
            console().print("not sent: this is not valid UTF-8", style="yellow")
        elif said := line and said_by_user(state, line):
            if line in prompts:  # what it learned and was scored on are questions without a history
                state.turns.clear()
            state.turns.append(said)
            warn_of_unknown_words(config, line)
            with quiet_libraries(run.log):
                _reply(model, tokenizer, state, config)
        elif line:
            message = run_chat_command(state, line)
            if message is None:
                return
            console().print(message, style="dim")


def _prompts_to_try(run: RunDir) -> list[str]:
    """The first prompts of one line that the run was compared on, if it was."""
    samples = read_json(run.summary).get("samples")
    trees = map(tree_of, samples) if isinstance(samples, list) else ()
    found = (tree.get("prompt") for tree in trees)
    prompts = [prompt.strip() for prompt in found if isinstance(prompt, str)]
    return [
        prompt
        for prompt in dict.fromkeys(prompts)
        if not NOT_TYPED.search(prompt) and len(prompt) <= SHOWN_PROMPT
    ][:2]

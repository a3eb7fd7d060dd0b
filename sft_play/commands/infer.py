"""Inference with the trained model: chat in the terminal, and batch inference on a file of prompts."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.builtin.demo import unknown_words
from sft_play.commands.answers import tools_note
from sft_play.config.schema import RunConfig
from sft_play.data.folders import SUFFIXES
from sft_play.data.reading import read_rows
from sft_play.data.sources import Source
from sft_play.data.tokens import prompt_ids
from sft_play.errors import ConfigError, DataError, StorageError
from sft_play.files import write_atomic
from sft_play.model.build import load_for_inference
from sft_play.model.generation import (
    Answer,
    answer_batches,
    chat_of,
    generate,
    load_chat_tokenizer,
    stop_token_ids,
)
from sft_play.model.load import position_limit
from sft_play.model.weights.finished import finished_weights, release_memory
from sft_play.report.layout import ending
from sft_play.report.record import tree_of
from sft_play.rows.formats import FORMATS, PROMPTS, Conversation, convert
from sft_play.rows.json_files import Row
from sft_play.rows.messages import ROLES, Message
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import var
from sft_play.ui.console import console, quiet_libraries, warn
from sft_play.ui.progress import LOADING, progress_bar, spinner
from sft_play.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --- chat ---

HELP = "/reset: new chat   /system TEXT: system prompt   /quit   Ctrl-C: stop the answer"
NO_FOLLOW_UP = "Each starts a new chat; type /reset before your own message unless it is a follow-up."
SURROGATE = re.compile("[\ud800-\udfff]")  # what stands for bytes that are not UTF-8
SHOWN_PROMPT = 300  # characters; a longer one is no example to type
SHOWN_WORDS = 8  # of those that the demo does not know
MIN_ANSWER_TOKENS = 16  # that must fit after the prompt


@dataclass
class Dialogue:
    """The state of a chat: system prompt and turns."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The messages for the chat template."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns


def run_chat_command(chat: Dialogue, line: str) -> str | None:
    """Executes a chat command; returns the reply, or None to end the chat."""
    command, _, text = line.partition(" ")
    if command in ("/quit", "/exit"):
        return None
    if command == "/reset":
        chat.turns.clear()
        return "started a new conversation"
    if command == "/system":
        chat.system, chat.turns = text.strip() or None, []
        return f"system prompt: {chat.system or '(none)'}; started a new conversation"
    return HELP if command == "/help" else f"unknown command {command}; available:\n{HELP}"


def fit_history(
    chat: Dialogue, render: Callable[[Sequence[Message]], list[int]], limit: int | None, max_new_tokens: int
) -> tuple[list[int], int, int]:
    """Drops the oldest turns of the chat until prompt and answer fit into the model's context.

    Question and answer are dropped together. The last question is always kept, even if it leaves too little
    room for an answer. `render` gives the prompt tokens of messages; `limit` is the context, if known.

    Returns:
        Prompt tokens, room for the answer in tokens, and the number of dropped turns.
    """
    dropped = 0
    while True:
        ids = render(chat.messages)
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
        if room == max_new_tokens or len(chat.turns) < 3:
            return ids, room, dropped
        del chat.turns[:2]
        dropped += 2


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
    prompts = chat_of(config, tokenizer)

    def render(messages: Sequence[Message]) -> list[int]:
        return prompt_ids(prompts, Conversation(tuple(messages), source="the chat"))

    say, most = console().print, config.eval.max_new_tokens
    limit = position_limit(model.config)
    try:
        ids, room, dropped = fit_history(chat, render, limit, most)
    except DataError as error:
        say(f"not sent: {error}", style="yellow")
        chat.turns.pop()
        return
    if room < min(MIN_ANSWER_TOKENS, most):
        text = f"message too long: the prompt has {len(ids)} tokens, the model supports {limit}; not sent"
        say(text, style="yellow")
        chat.turns.pop()
        return
    if dropped:
        say(
            f"dropped the first {dropped} messages, which no longer fit into the model's context", style="dim"
        )
    pieces: list[str] = []
    try:
        printer = _printer(tokenizer, pieces, stop_token_ids(model, tokenizer))
        new = generate(model, tokenizer, [ids], max_new_tokens=room, streamer=printer)[0]
        say()
        if len(new) >= room:
            say(f"(truncated at {room} tokens: eval.max_new_tokens)", style="dim")
    except KeyboardInterrupt:
        say("\n(stopped)", style="dim")
    chat.turns.append({"role": "assistant", "content": "".join(pieces).strip()})


def chat(config: RunConfig, run: RunDir, *, read: Callable[[str], str] = input) -> None:
    """A chat in the terminal, with greedy decoding and streamed answers; `read` asks for a line of input.

    Raises CheckpointError if the run has no complete weights.
    """
    weights = finished_weights(config, run)
    with quiet_libraries(run.log):
        tokenizer = load_chat_tokenizer(config)
        with spinner(LOADING):
            model = load_for_inference(config, weights)
    state = Dialogue(system=config.data.system_prompt)
    console().print(f"{run.path.name} on {model.device}", style="bold")
    console().print(HELP, style="dim")
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
        except KeyboardInterrupt:
            console().print("\nuse /quit or Ctrl-D to end the chat", style="dim")
            continue
        except EOFError:
            console().print()
            return
        if SURROGATE.search(line):
            console().print("not sent: this is not valid UTF-8", style="yellow")
        elif line.startswith("/"):
            message = run_chat_command(state, line)
            if message is None:
                return
            console().print(message, style="dim")
        elif line:
            if line in prompts:  # what it learned and was scored on are questions without a history
                state.turns.clear()
            state.turns.append({"role": "user", "content": line})
            _warn_of_unknown_words(config, line)
            with quiet_libraries(run.log):
                _reply(model, tokenizer, state, config)


def _warn_of_unknown_words(config: RunConfig, text: str) -> None:
    if words := unknown_words(config, text):
        named = ", ".join(words[:SHOWN_WORDS]) + (", ..." if words[SHOWN_WORDS:] else "")
        warn(f"the demo was not trained on these words: {named}. Expect others in their place")


def _prompts_to_try(run: RunDir) -> list[str]:
    """The first prompts of one line that the run was compared on, if it was."""
    samples = read_json(run.summary).get("samples")
    found = [tree_of(sample).get("prompt") for sample in samples] if isinstance(samples, list) else []
    prompts = [prompt.strip() for prompt in found if isinstance(prompt, str)]
    return [prompt for prompt in prompts if "\n" not in prompt and len(prompt) <= SHOWN_PROMPT][:2]


# --- a file of prompts ---

ANSWER_KEY, ROW_KEY = "generated", "row"  # keys that are added to each row of the output

PLACEHOLDER: Message = {"role": "assistant", "content": "?"}


def _without_last_answer(turns: object) -> Any:
    """Removes assistant messages from the end of a list of messages; returns other values unchanged."""
    if not isinstance(turns, list):
        return turns
    asked = list(turns)
    while asked and isinstance(asked[-1], dict):
        if ROLES.get(str(asked[-1].get("role", asked[-1].get("from")))) != "assistant":
            break
        asked.pop()
    return asked


def prompt_of(row: Row, system_prompt: str | None = None) -> Conversation:
    """The conversation to continue, without its last answer; DataError, with file and line, if none."""
    key = next((key for key in PROMPTS if key in row.data), None)
    if key is None:
        raise DataError(
            f"{row.where}: no prompt among the keys {', '.join(row.data) or '(none)'}; "
            f"expected one of {', '.join(PROMPTS)}"
        )
    if ANSWER_KEY in row.data:
        raise DataError(
            f"{row.where}: the row already has a key '{ANSWER_KEY}', which is used for answers; rename it"
        )
    answer_key = FORMATS[PROMPTS[key]].answer
    value = _without_last_answer(row.data[key])
    data = {**row.data, key: value}
    if answer_key is not None:
        data[answer_key] = [PLACEHOLDER] if isinstance(value, list) else PLACEHOLDER["content"]
    elif isinstance(value, list) and value:
        data[key] = [*value, PLACEHOLDER]
    conversation = convert(Row(data, row.file, row.line), PROMPTS[key], system_prompt)
    if isinstance(conversation, str):
        raise DataError(f"{row.where}: {conversation}")
    return Conversation(conversation.messages[:-1], tools=conversation.tools, source=row.where)


def read_prompts(path: Path, system_prompt: str | None = None) -> list[tuple[Row, Conversation]]:
    """The rows of a JSONL, JSON, Parquet or CSV file; DataError if it or one of them cannot be used."""
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        found = "is not a supported file" if path.exists() else "does not exist"
        raise DataError(f"{var(IN=path)} {found}; expected {', '.join(SUFFIXES)}")
    rows = [(row, prompt_of(row, system_prompt)) for row in read_rows(Source(str(path), (path,)))]
    if not rows:
        raise DataError(f"{var(IN=path)} has no rows")
    return rows


def answered_rows(output: Path, rows: Sequence[Row], weights: Path, *, force: bool = False) -> dict[int, str]:
    """Row index -> output line of an earlier, interrupted run; ignores a truncated last line.

    Raises:
        ConfigError: `output` has answers to other rows, or from other weights, without `force`.
    """
    if not output.exists():
        return {}
    if not output.is_file():
        raise ConfigError(f"{var(OUT=output)} is not a file; use the path of a JSONL file")
    if force:
        return {}
    newest = max(file.stat().st_mtime for file in weights.glob("*.safetensors"))
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    remedy = f"Set {var(OUT='<another file>')}, or add {var(FORCE=1)} to overwrite it"
    if lines and output.stat().st_mtime < newest:
        raise ConfigError(
            f"{var(OUT=output)} is older than {weights}, so its answers are from another model. {remedy}"
        )
    done: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n") and (done or any(_begins_as(line, row) for row in rows)):
            break
        try:
            record = json.loads(line)
            index = record.pop(ROW_KEY) - 1
            del record[ANSWER_KEY]
            same = record == json.loads(json.dumps(rows[index].data, default=str))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            same = False
        if not same:
            raise ConfigError(
                f"{var(OUT=output)}: line {number} is not an answer to a row of this input. {remedy}"
            )
        done[index] = line
    return done


def _begins_as(cut: str, row: Row) -> bool:
    """Whether a truncated line, perhaps with half a character at its end, may be the answer to this row."""
    begin, cut = _json(row.data)[:-1], cut.rstrip("\ufffd")
    return cut.startswith(begin) or begin.startswith(cut)


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=str)


def infer_batch(
    config: RunConfig, run: RunDir, input: Path, output: Path, *, force: bool = False
) -> dict[str, Any]:
    """Answers every prompt of a file; when run again after an interruption, answers the remaining ones.

    Each line of the output, a JSONL file, is the input row plus `generated` and `row` (its number). Lines are
    written as soon as they are generated, in batches of similar length, and sorted into the order of the
    input at the end. With `force`, a file with other content, or earlier answers, are overwritten.

    Raises:
        DataError: a row of the input is invalid; no row is answered.
        ConfigError: `output` has other content.
        CheckpointError: the run has no complete weights.
        StorageError: `output` cannot be written.
    """
    weights = finished_weights(config, run)
    prompts = read_prompts(input, config.data.system_prompt)
    _warn_of_unknown_words(
        config, " ".join(turn["content"] for _, asked in prompts for turn in asked.messages)
    )
    done = answered_rows(output, [row for row, _ in prompts], weights, force=force)
    earlier = len(done)
    if done:
        text = f"resuming: {output} already has answers to {earlier} of {len(prompts)} rows"
        console().print(text)
    try:
        with quiet_libraries(run.log):
            unfinished = _answer_rows(config, weights, prompts, done, output)
    except OSError as error:
        raise StorageError(f"cannot write {var(OUT=output)}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        text = f"answered {len(done)} of {len(prompts)} rows in {output}; run the same command to continue"
        console().print(text)
        raise
    answered = len(done) - earlier
    cut = f" ({unfinished} truncated at {config.eval.max_new_tokens} tokens)" if unfinished else ""
    console().print(f"answered {counted(answered, 'row')}{cut}", ending({"answers": output}, []))
    counts = {"rows": len(prompts), "answered": answered, "unfinished_answers": unfinished}
    return {**counts, "output": str(output)}


def _answer_rows(
    config: RunConfig,
    weights: Path,
    prompts: Sequence[tuple[Row, Conversation]],
    done: dict[int, str],
    output: Path,
) -> int:
    """Answers the rows that are not in `done`, adds them, and returns the number of truncated answers."""
    todo = [index for index in range(len(prompts)) if index not in done]
    unfinished = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        file.writelines(done.values())
        file.flush()
        for index, answer in _answers(config, weights, [prompts[i][1] for i in todo]) if todo else ():
            row = todo[index]
            record = {**prompts[row][0].data, ANSWER_KEY: answer.text, ROW_KEY: row + 1}
            done[row] = f"{_json(record)}\n"
            file.write(done[row])
            file.flush()
            unfinished += not answer.finished
    write_atomic(output, "".join(done[row] for row in sorted(done)))
    return unfinished


def _answers(
    config: RunConfig, weights: Path, conversations: Sequence[Conversation]
) -> Iterator[tuple[int, Answer]]:
    """Yields the index of each conversation and its answer, as they are generated."""
    tokenizer = load_chat_tokenizer(config)
    chat = chat_of(config, tokenizer)
    ids = [prompt_ids(chat, conversation) for conversation in conversations]
    with spinner(LOADING):
        model = load_for_inference(config, weights)
    rows, most = config.eval.rows_answered_together, config.eval.max_new_tokens
    batches = answer_batches(model, tokenizer, ids, max_new_tokens=most, batch_size=rows)
    with progress_bar("answering", len(ids)) as report:
        for indices, answers in batches:
            yield from zip(indices, answers, strict=True)
            report(len(indices))
    del model, batches
    release_memory()

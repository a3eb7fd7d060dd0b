"""The finished model at work: a chat in the terminal, and a file of prompts answered."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.schema import RunConfig
from sft_play.data.formats import ROLES, Conversation, Message, convert
from sft_play.data.reading import SUFFIXES, Row, Source, read_rows
from sft_play.errors import ConfigError, DataError, StorageError
from sft_play.generation import (
    DEFAULT_BATCH_SIZE,
    Answer,
    answer_batches,
    generate,
    load_chat_tokenizer,
    prompt_ids,
)
from sft_play.model import load_for_inference, position_limit
from sft_play.report.progress import progress_bar, spinner
from sft_play.runlog import RunDir, console, quiet_libraries
from sft_play.weights import finished_weights, release_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --- chat -------------------------------------------------------------------------------------------------------------

HELP = "/reset starts anew   /system TEXT   /quit   Ctrl-C stops an answer"
SMALLEST_ANSWER = 16  # tokens that must be left for an answer


@dataclass
class Chat:
    """What has been said so far."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """As the chat template takes them."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)


def obey(chat: Chat, line: str) -> str | None:
    """Carries out a command; returns what to tell the person, or None when the chat is to end."""
    command, _, text = line.partition(" ")
    if command in ("/quit", "/exit"):
        return None
    if command == "/reset":
        chat.turns.clear()
        return "the conversation begins anew"
    if command == "/system":
        chat.system, chat.turns = text.strip() or None, []
        return f"system prompt: {chat.system or '(none)'}; the conversation begins anew"
    return HELP if command == "/help" else f"{command} is no command.  {HELP}"


def fit_history(
    chat: Chat, render: Callable[[Sequence[Message]], list[int]], limit: int | None, max_new_tokens: int
) -> tuple[list[int], int, int]:
    """The prompt in tokens, the room for the answer, and how many old turns were forgotten to make that room.

    Question and answer go together, oldest first. The last question stays, with the room that there is; without any, the room
    is below SMALLEST_ANSWER.
    """
    forgotten = 0
    while True:
        ids = render(chat.messages)
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
        if room == max_new_tokens or len(chat.turns) < 3:
            return ids, room, forgotten
        del chat.turns[:2]
        forgotten += 2


def _printer(tokenizer: "PreTrainedTokenizerBase", pieces: list[str]) -> Any:
    """Prints an answer while it is made, and collects it."""
    from transformers import TextStreamer

    class Printer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            console().print(text, end="", markup=False, highlight=False, soft_wrap=True)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _reply(model: Any, tokenizer: "PreTrainedTokenizerBase", chat: Chat, config: RunConfig) -> None:
    """Answers the last question of the chat, on the console and in the chat."""
    ids, room, forgotten = fit_history(
        chat,
        lambda messages: prompt_ids(tokenizer, Conversation(tuple(messages), source="the chat")),
        position_limit(model.config),
        config.eval.max_new_tokens,
    )
    if room < min(SMALLEST_ANSWER, config.eval.max_new_tokens):
        console().print(f"too long: {len(ids)} tokens of the model's {position_limit(model.config)}; not sent", style="yellow")
        chat.turns.pop()
        return
    if forgotten:
        console().print(f"the first {forgotten} messages were left out: they no longer fit the model", style="dim")
    pieces: list[str] = []
    try:
        new = generate(model, tokenizer, [ids], max_new_tokens=room, streamer=_printer(tokenizer, pieces))[0]
        console().print()
        if len(new) >= room:
            console().print(f"(cut off at {room} tokens: eval.max_new_tokens)", style="dim")
    except KeyboardInterrupt:
        console().print("\n(stopped)", style="dim")
    chat.turns.append({"role": "assistant", "content": "".join(pieces).strip()})


def chat(config: RunConfig, run: RunDir, *, read: Callable[[str], str] = input) -> None:
    """A conversation in the terminal; answers are greedy and appear as they are made.

    Args:
        config: of the run; data.system_prompt is the first system prompt, eval.max_new_tokens the longest answer.
        run: where its weights are.
        read: asks the person for a line.

    Raises:
        CheckpointError: the run has no finished weights.
    """
    weights = finished_weights(config, run)
    with quiet_libraries(run.log):
        tokenizer = load_chat_tokenizer(config)
        with spinner(f"loading {weights}"):
            model = load_for_inference(config, weights)
    state = Chat(system=config.data.system_prompt)
    console().print(f"[bold]{run.path.name}[/bold] on {model.device}", highlight=False)
    console().print(HELP, style="dim")
    while True:
        try:
            line = read("\nyou> ").strip()
        except KeyboardInterrupt:
            console().print("\n/quit or Ctrl-D ends the chat", style="dim")
            continue
        except EOFError:
            console().print()
            return
        if not line:
            continue
        if line.startswith("/"):
            message = obey(state, line)
            if message is None:
                return
            console().print(message, style="dim", markup=False)
            continue
        state.turns.append({"role": "user", "content": line})
        with quiet_libraries(run.log):
            _reply(model, tokenizer, state, config)


# --- a file of prompts ------------------------------------------------------------------------------------------------

ANSWER_KEY, ROW_KEY = "generated", "row"  # what is added to each row of the output

# The key that a prompt is told by -> the row's format, and where that has its answer, which is not needed here.
PROMPTS = {
    "messages": ("messages", None),
    "conversations": ("sharegpt", None),
    "instruction": ("alpaca", "output"),
    "prompt": ("prompt_completion", "completion"),
    "question": ("question_answer", "answer"),
    "user": ("system_user_assistant", "assistant"),
}
PLACEHOLDER: Message = {"role": "assistant", "content": "?"}


def _without_last_answer(turns: Any) -> Any:
    """A list of messages cut after the last turn that is not the assistant's; what is no such list is left to be refused."""
    if not isinstance(turns, list):
        return turns
    asked = list(turns)
    while asked and isinstance(asked[-1], dict) and ROLES.get(str(asked[-1].get("role", asked[-1].get("from")))) == "assistant":
        asked.pop()
    return asked


def prompt_of(row: Row, system_prompt: str | None = None) -> Conversation:
    """The conversation that is to be continued; an answer that the row already has at its end is left out.

    Raises:
        DataError: the row has no prompt; names file and line.
    """
    key = next((key for key in PROMPTS if key in row.data), None)
    if key is None:
        raise DataError(
            f"{row.where}: no prompt among the keys {', '.join(row.data) or '(none)'}; expected one of {', '.join(PROMPTS)}"
        )
    if ANSWER_KEY in row.data:
        raise DataError(f"{row.where}: has a key '{ANSWER_KEY}' already, which the answer would overwrite; rename it")
    format_name, answer_key = PROMPTS[key]
    value = _without_last_answer(row.data[key])
    if answer_key is None:
        value = [*value, PLACEHOLDER] if isinstance(value, list) and value else value
        data = {**row.data, key: value}
    else:
        answer = [PLACEHOLDER] if isinstance(value, list) else PLACEHOLDER["content"]
        data = {**row.data, key: value, answer_key: answer}
    conversation = convert(Row(data, row.file, row.line), format_name, system_prompt)
    if isinstance(conversation, str):
        raise DataError(f"{row.where}: {conversation}")
    return Conversation(conversation.messages[:-1], tools=conversation.tools, source=row.where)


def read_prompts(path: Path, system_prompt: str | None = None) -> list[tuple[Row, Conversation]]:
    """Every row of a JSONL, JSON, Parquet or CSV file, checked.

    Raises:
        DataError: the file cannot be read, or a row has no prompt.
    """
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        found = "does not exist" if not path.exists() else "is not a file of a known kind"
        raise DataError(f"IN={path} {found}; expected {', '.join(SUFFIXES)}")
    rows = [(row, prompt_of(row, system_prompt)) for row in read_rows(Source(str(path), (path,)))]
    if not rows:
        raise DataError(f"IN={path} holds no rows")
    return rows


def answered_rows(output: Path, rows: Sequence[Row], weights: Path) -> dict[int, str]:
    """Row number -> finished line of an earlier, interrupted run; a last line that was cut off is not counted.

    Raises:
        ConfigError: `output` holds answers to other rows, or of other weights.
    """
    if not output.exists():
        return {}
    if not output.is_file():
        raise ConfigError(f"OUT={output} is no file; give the name of a JSONL file")
    newest = max(file.stat().st_mtime for file in weights.glob("*.safetensors"))
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    remedy = "Remove it, or choose another file with OUT="
    if lines and output.stat().st_mtime < newest:
        raise ConfigError(
            f"OUT={output} was written before {weights} was trained, so its answers are another model's. {remedy}"
        )
    done: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            index = record.pop(ROW_KEY) - 1
            del record[ANSWER_KEY]
            same = record == json.loads(json.dumps(rows[index].data, default=str))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            same = False
        if not same:
            raise ConfigError(f"OUT={output}: line {number} is not an answer to a row of this input. {remedy}")
        done[index] = line
    return done


def infer_batch(config: RunConfig, run: RunDir, input: Path, output: Path) -> dict[str, Any]:
    """Answers every prompt of a file; run again after an interruption, it answers what is missing.

    Each line of the output is the input row with `generated` and `row` (its number) added. Lines are written as soon as they
    are there, similar lengths together; at the end they are put in the order of the input.

    Args:
        config: of the run; eval.batch_size and eval.max_new_tokens apply.
        run: where its weights are.
        input: rows with messages, conversations, prompt, question, instruction or user.
        output: JSONL.

    Raises:
        DataError: a row of the input is wrong; nothing is answered then.
        ConfigError: `output` holds something else.
        CheckpointError: the run has no finished weights.
        StorageError: `output` cannot be written.
    """
    weights = finished_weights(config, run)
    prompts = read_prompts(input, config.data.system_prompt)
    done = answered_rows(output, [row for row, _ in prompts], weights)
    earlier = len(done)
    if done:
        console().print(f"{earlier} of {len(prompts)} rows are answered in {output} already", markup=False, soft_wrap=True)
    try:
        with quiet_libraries(run.log):
            unfinished = _answer_rows(config, weights, prompts, done, output)
    except OSError as error:
        raise StorageError(f"cannot write OUT={output}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        what = f"{len(done)} of {len(prompts)} rows are answered in {output}; the same command answers the rest"
        console().print(what, markup=False, soft_wrap=True)
        raise
    answered = len(done) - earlier
    cut = f", {unfinished} cut off at {config.eval.max_new_tokens} tokens" if unfinished else ""
    console().print(f"{answered} rows answered{cut}: {output}", markup=False, soft_wrap=True)
    return {"rows": len(prompts), "answered": answered, "unfinished_answers": unfinished, "output": str(output)}


def _answer_rows(
    config: RunConfig, weights: Path, prompts: Sequence[tuple[Row, Conversation]], done: dict[int, str], output: Path
) -> int:
    """Writes the lines that are not in `done`, adds them there, and returns how many answers were cut off."""
    todo = [index for index in range(len(prompts)) if index not in done]
    unfinished = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        file.writelines(done.values())
        file.flush()
        for index, answer in _answers(config, weights, [prompts[i][1] for i in todo]) if todo else ():
            row = todo[index]
            record = {**prompts[row][0].data, ANSWER_KEY: answer.text, ROW_KEY: row + 1}
            done[row] = json.dumps(record, ensure_ascii=False, default=str) + "\n"
            file.write(done[row])
            file.flush()
            unfinished += not answer.finished
    ordered = output.with_name(f".{output.name}.ordered")
    ordered.write_text("".join(done[row] for row in sorted(done)), encoding="utf-8")
    ordered.replace(output)
    return unfinished


def _answers(config: RunConfig, weights: Path, conversations: Sequence[Conversation]) -> Iterator[tuple[int, Answer]]:
    """Number within `conversations` and its answer, as they are made."""
    tokenizer = load_chat_tokenizer(config)
    ids = [prompt_ids(tokenizer, conversation) for conversation in conversations]
    with spinner(f"loading {weights}"):
        model = load_for_inference(config, weights)
    batch_size = DEFAULT_BATCH_SIZE if config.eval.batch_size == "auto" else config.eval.batch_size
    batches = answer_batches(model, tokenizer, ids, max_new_tokens=config.eval.max_new_tokens, batch_size=batch_size)
    with progress_bar("answering", len(ids)) as report:
        for indices, answers in batches:
            yield from zip(indices, answers, strict=True)
            report(len(indices))
    del model, batches
    release_memory()

"""Answers of the trained model to a file of prompts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.builtin.demo import unknown_words
from sft_play.config.schema import RunConfig
from sft_play.data.folders import SUFFIXES
from sft_play.data.prepare import gallery_of
from sft_play.data.reading import read_rows
from sft_play.data.sources import Source
from sft_play.data.tokens import prompt_ids
from sft_play.errors import ConfigError, DataError, StorageError
from sft_play.files import own_folder, write_atomic
from sft_play.model.build import load_for_inference
from sft_play.model.generation import Answer, answer_batches, chat_of, load_chat_tokenizer
from sft_play.model.load import load_model_config, load_recipe
from sft_play.model.weights.finished import finished_weights, release_memory
from sft_play.report.layout import ending
from sft_play.rows.formats import FORMATS, PROMPTS, Conversation, convert
from sft_play.rows.images import data_url
from sft_play.rows.json_files import Row
from sft_play.rows.messages import ROLES, Message
from sft_play.runlog import RunDir
from sft_play.spelling import var
from sft_play.ui.console import console, quiet_libraries, warn
from sft_play.ui.progress import LOADING, progress_bar, spinner
from sft_play.units import counted, listed
from sft_play.vision.expansion import pictures_in
from sft_play.vision.gallery import Gallery
from sft_play.vision.prompts import Pictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_KEY, ROW_KEY = "generated", "row"  # keys that are added to each row of the output

PLACEHOLDER: Message = {"role": "assistant", "content": "?"}
SHOWN_WORDS = 8  # of those that the demo does not know


def gallery_of_prompts(
    config: RunConfig, tokenizer: "PreTrainedTokenizerBase", source: Source, kept: Path
) -> Gallery:
    """Where the pictures of prompts may come from: as those of rows; what has no file is kept in `kept`.

    Raises:
        ConfigError: as in `load_recipe`.
    """
    recipe = load_recipe(config, load_model_config(config.model), tokenizer)
    return replace(gallery_of(config, source, recipe), kept=kept)


def warn_of_unknown_words(config: RunConfig, text: str) -> None:
    """Warns of words of a prompt that the demo was not trained on; says nothing of another run."""
    if words := unknown_words(config, text):
        named = listed(words, SHOWN_WORDS)
        warn(f"the demo was not trained on these words: {named}. Expect others in their place")


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
            same = record == json.loads(_json(rows[index].data))
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
    return json.dumps(record, ensure_ascii=False, default=_as_text)


def _as_text(value: object) -> str:
    """What JSON has in place of a value of Parquet, such as the bytes of a picture."""
    return data_url(value) if isinstance(value, bytes) else str(value)


def infer_batch(
    config: RunConfig, run: RunDir, input: Path, output: Path, *, force: bool = False
) -> dict[str, object]:
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
    warn_of_unknown_words(
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
        for index, answer in _answers(config, weights, [prompts[i] for i in todo]) if todo else ():
            row = todo[index]
            record = {**prompts[row][0].data, ANSWER_KEY: answer.text, ROW_KEY: row + 1}
            done[row] = f"{_json(record)}\n"
            file.write(done[row])
            file.flush()
            unfinished += not answer.finished
    write_atomic(output, "".join(done[row] for row in sorted(done)))
    return unfinished


def _answers(
    config: RunConfig, weights: Path, prompts: Sequence[tuple[Row, Conversation]]
) -> Iterator[tuple[int, Answer]]:
    """Yields the index of each prompt of a file and its answer, as they are generated."""
    tokenizer = load_chat_tokenizer(config)
    file = prompts[0][0].file
    kept = own_folder("sft-play-pictures-")
    gallery = gallery_of_prompts(config, tokenizer, Source(file, (Path(file),)), kept)
    chat = chat_of(config, tokenizer, gallery.recipe)
    asked = [gallery.located(conversation, file) for _, conversation in prompts]
    ids = [prompt_ids(chat, conversation) for conversation in asked]
    pictures = Pictures(chat.recipe, [pictures_in(each.messages) for each in asked], gallery.kept)
    with spinner(LOADING):
        model = load_for_inference(config, weights)
    rows, most = config.eval.rows_answered_together, config.eval.max_new_tokens
    how: dict[str, Any] = dict(max_new_tokens=most, batch_size=rows, pictures=pictures)
    batches = answer_batches(model, tokenizer, ids, **how)
    with progress_bar("answering", len(ids)) as report:
        for indices, answers in batches:
            yield from zip(indices, answers, strict=True)
            report(len(indices))
    del model, batches
    release_memory()

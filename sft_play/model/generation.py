"""Prompts in, answers out: batched, greedy, ending at the stop tokens of model and template."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from sft_play.config.schema import RunConfig
from sft_play.data.chat import Chat, make_chat, with_control_tokens
from sft_play.data.template import render_example, use_template
from sft_play.errors import DataError, DoesNotFitError, first_line
from sft_play.model.load import load_tokenizer, position_limit
from sft_play.model.weights.finished import release_memory
from sft_play.ui.progress import progress_bar
from sft_play.upstream.accelerate import is_out_of_memory
from sft_play.vision.families import TEXT_ALONE, Recipe
from sft_play.vision.prompts import NO_PICTURES, Pictures

Result = TypeVar("Result")

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True)
class Answer:
    """One generated answer."""

    text: str
    tokens: int
    finished: bool  # whether it ended with a stop token, not at the token limit


def in_batches(
    rows: Sequence[int], size: int, work: Callable[[list[int]], Result]
) -> Iterator[tuple[list[int], Result]]:
    """Applies `work` to at most `size` row indices at a time; halves the size whenever memory runs out.

    Raises:
        DoesNotFitError: one row alone does not fit.
    """
    start = 0
    while start < len(rows):
        batch = list(rows[start : start + size])
        try:
            result = work(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) == 1:
                raise DoesNotFitError(
                    f"out of memory on a single row: {first_line(error)}\n"
                    "Lower eval.max_new_tokens or model.max_seq_len, or free memory on the device"
                ) from error
            size = len(batch) // 2
            result = None
        if result is None:  # not in the handler, whose traceback keeps the failed batch's tensors alive
            release_memory()
            continue
        yield batch, result
        start += len(batch)


def load_chat_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that the run was trained with.

    Raises:
        ConfigError: there is no such tokenizer or template.
    """
    tokenizer = load_tokenizer(config.model)
    use_template(tokenizer, config.data.chat_template)
    return tokenizer


def chat_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase, recipe: Recipe | str = TEXT_ALONE) -> Chat:
    """The settings for prompts of a run, whose chat template the tokenizer has.

    `recipe` is how the model takes pictures, or why it takes none.
    """
    chat = make_chat(tokenizer, config.data.supervise, learn_tool_calls=config.data.learn_tool_calls)
    return with_control_tokens(replace(chat, recipe=recipe), config.data.control_tokens)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template puts after an answer ("<|im_end|>"); None if there is none.

    A token that was added to the vocabulary, special or not; some tokenizers have added ones for blanks.
    Where nothing ends an answer, it is the marker of the next turn, such as GLM's "<|user|>".
    """
    added = tokenizer.added_tokens_decoder
    for turns in (("question", "answer"), ("question", "answer", "question")):
        text = render_example(tokenizer, *turns)
        if text is None:  # there is no template, or it wants more than a question
            return None
        after = text.rpartition("answer")[2].partition("question")[0]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        ends = (index for index in ids if index in added and not added[index].content.isspace())
        if (end := next(ends, None)) is not None:
            return end
    return None


def stop_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer, from the tokenizer, the generation config and the chat template."""
    configured = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, end_of_turn_id(tokenizer)}
    ids |= set(configured) if isinstance(configured, list) else {configured}
    return sorted(token_id for token_id in ids if token_id is not None)


def _require_known(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> None:
    """Raises a DataError if a prompt has a token that the model has no row for."""
    known = model.config.get_text_config().vocab_size
    largest = max(map(max, filter(None, prompts)), default=0)
    if largest >= known:
        raise DataError(
            f"a prompt has {tokenizer.convert_ids_to_tokens(largest)!r}, token {largest}, but the model has "
            f"only the tokens 0 to {known - 1}; remove it from the prompt, or set data.control_tokens=escape"
        )


def say_stops(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a model say what ends an answer: a base stops where a text ends, and not where a turn does.

    Servers read it in generation_config.json, which is saved with the model.
    """
    model.generation_config.eos_token_id = stop_token_ids(model, tokenizer)


def unknown_stops(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Text and id of the tokens that end an answer, and that nothing tells a server of an adapter.

    It reads the generation config of the base, and the tokenizer.
    """
    configured = model.generation_config.eos_token_id
    known = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    unknown = [token_id for token_id in stop_token_ids(model, tokenizer) if token_id not in known]
    return {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in unknown}


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
    pictures: Pictures = NO_PICTURES,
) -> list[list[int]]:
    """Generates at most `max_new_tokens` after each prompt, greedily; returns them, with the stop token.

    Prompts are padded on the left to a batch of [prompts, width]. A streamer receives tokens as they are
    generated. `pictures` are those of the prompts.

    Raises:
        DataError: a prompt has a token that the model has no row for, or the file of a picture is gone.
    """
    _require_known(model, tokenizer, prompts)
    given = {"input_ids": [list(prompt) for prompt in prompts]}
    batch: Any = tokenizer.pad(
        given, padding_side="left", return_attention_mask=True, return_tensors="pt", verbose=False
    ).to(model.device)
    # Unset values would come from the model's own generation config, whose penalties change a greedy answer.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        use_cache=True,
        eos_token_id=stop_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    # without gradients by itself; not in inference mode: what FSDP2 gathers in it could not be trained with
    seen = pictures.inputs(batch["input_ids"])
    out = model.generate(**batch, **seen, generation_config=settings, streamer=streamer)
    return out[:, batch["input_ids"].shape[1] :].tolist()


def _answer(tokens: list[int], stops: set[int], tokenizer: PreTrainedTokenizerBase) -> Answer:
    end = next((i for i, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    return Answer(str(tokenizer.decode(kept, skip_special_tokens=True)).strip(), len(kept), end is not None)


def answer_batches(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    pictures: Pictures = NO_PICTURES,
) -> Iterator[tuple[list[int], list[Answer]]]:
    """Row indices and their answers, batch by batch: prompts of similar length together, the longest first.

    A prompt that leaves fewer than `max_new_tokens` positions is answered alone with the room that it leaves,
    so that no answer depends on which rows share its batch.

    Raises:
        DoesNotFitError: memory runs out on a single row.
    """
    limit = position_limit(model.config)
    stops = set(stop_token_ids(model, tokenizer))
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    alone = [row for row in order if limit is not None and len(prompts[row]) + max_new_tokens > limit]

    def work(rows: list[int]) -> list[Answer]:
        longest = max(len(prompts[row]) for row in rows)
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - longest)
        if room < 1:
            return [Answer("", 0, False) for _ in rows]
        asked, seen = [prompts[row] for row in rows], pictures.of(rows)
        new = generate(model, tokenizer, asked, max_new_tokens=room, pictures=seen)
        return [_answer(tokens, stops, tokenizer) for tokens in new]

    yield from in_batches(alone, 1, work)
    yield from in_batches(order[len(alone) :], batch_size, work)


def generate_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = DEFAULT_BATCH_SIZE,
    pictures: Pictures = NO_PICTURES,
    description: str = "generating",
) -> list[Answer]:
    """The answers in the order of the prompts, generated under a progress bar; as `answer_batches`.

    Raises:
        DoesNotFitError: memory runs out on a single row.
    """
    answers: dict[int, Answer] = {}
    with progress_bar(description, len(prompts)) as done:
        how: dict[str, Any] = dict(max_new_tokens=max_new_tokens, batch_size=batch_size, pictures=pictures)
        for rows, made in answer_batches(model, tokenizer, prompts, **how):
            answers.update(zip(rows, made, strict=True))
            done(len(rows))
    return [answers[row] for row in range(len(prompts))]

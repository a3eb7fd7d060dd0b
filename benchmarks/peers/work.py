"""The work that all contestants do: a model, rows and training settings, defined once."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID = 0  # LitGPT always pads with 0, whatever the tokenizer says
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATE_TOKENS = 4  # of a row with one question and one answer

VOCABULARY, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 4096, 384, 10, 6, 1024  # 21 million parameters

# Lengths of the long-tailed rows, in tokens
MEDIAN, P95, LONGEST, SHORTEST = 156, 459, 606, 12


class Row(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The text up to the answer, as the chat template writes it."""
        return f"<|user|>{self.question}{END}<|assistant|>"

    @property
    def completion(self) -> str:
        """The text with loss."""
        return self.answer + END


@dataclass(frozen=True)
class Work:
    """A fine-tuning run: LoRA on all linear layers in fp32, one epoch over the rows."""

    data: str
    model: Path
    rows: tuple[Row, ...]
    held_out: tuple[Row, ...]
    rows_per_step: int = 16
    tokens_per_step: int = 8192  # if rows are packed
    max_tokens: int = 1024  # of a row or a pack
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-3  # with cosine decay
    warmup_steps: int = 1
    seed: int = 0

    def settings(self) -> dict[str, object]:
        """All settings except the model and the rows."""
        left_out = ("model", "rows", "held_out")
        return {name: value for name, value in vars(self).items() if name not in left_out} | {
            "rows": len(self.rows)
        }


def gsm8k_rows(folder: Path, file: str, count: int) -> tuple[Row, ...]:
    """The first rows of a file of GSM8K."""
    with (folder / file).open(encoding="utf-8") as lines:
        return tuple(Row(**json.loads(line)) for line, _ in zip(lines, range(count), strict=False))


def tailed_lengths(count: int) -> list[int]:
    """Lengths in tokens at evenly spaced quantiles of a log-normal distribution, clipped at both ends."""
    spread = math.log(P95 / MEDIAN) / NormalDist().inv_cdf(0.95)
    law = NormalDist(math.log(MEDIAN), spread)
    at = ((number + 0.5) / count for number in range(count))
    lengths = [min(LONGEST, max(SHORTEST, round(math.exp(law.inv_cdf(quantile))))) for quantile in at]
    return [*lengths[:-1], LONGEST]


def words(count: int = 400) -> list[str]:
    """Made-up words of two or three syllables; a tokenizer trained on them has a token for each."""
    draw = random.Random("words")
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(syllables, k=draw.choice((2, 3))))] = None
    return list(found)


def tailed_rows(count: int, seed: str) -> tuple[Row, ...]:
    """Rows of made-up words, one token each, with long-tailed lengths in random order."""
    draw, known, rows = random.Random(seed), words(), []
    for length in tailed_lengths(count):
        text = [" " + word for word in draw.choices(known, k=length - TEMPLATE_TOKENS)]
        asked = len(text) // 3
        rows.append(Row("".join(text[:asked]), "".join(text[asked:])))
    draw.shuffle(rows)
    return tuple(rows)


def make_work(data: str, count: int, held_out: int, gsm8k: Path, folder: Path, **changes: int) -> Work:
    """The work on a data set: training rows, held-out rows, and a model in `folder`.

    Raises:
        FileNotFoundError: the files of GSM8K do not exist.
    """
    if data == "gsm8k":
        rows = gsm8k_rows(gsm8k, "train.jsonl", count)
        judged = gsm8k_rows(gsm8k, "test.jsonl", held_out)
    else:
        rows, judged = tailed_rows(count, "train"), tailed_rows(held_out, "test")
    work = Work(data, folder / "model", rows, judged, **changes)
    if not (work.model / "config.json").exists():
        make_model(work)
    return work


def trained_tokenizer(rows: tuple[Row, ...]) -> Any:
    """A byte-level BPE tokenizer trained on the rows; it has no unknown tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in row), trainer)
    return tokenizer


def make_model(work: Work, **shape: int) -> None:
    """Saves a Llama with random weights, of this shape where it is another, and a tokenizer for the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(work.rows),
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2 * work.max_tokens,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(work.model)
    usual = dict(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    config = LlamaConfig(
        **(usual | shape),
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * work.max_tokens,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(work.seed)
    LlamaForCausalLM(config).save_pretrained(work.model)

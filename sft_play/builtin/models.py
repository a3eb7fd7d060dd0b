"""Models small enough to create on first use: one pretrained on the shop's diary, two with random weights.

All are ordinary model folders: a Llama, or a SmolVLM, in safetensors with config.json and
generation_config.json, and a byte-level BPE tokenizer with a chat template. No other code treats them
specially.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration

PAD, UNKNOWN, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

DEMO_VOCABULARY, SHAPES_VOCABULARY, TINY_VOCABULARY = 1024, 320, 4096
DEMO_POSITIONS, SHAPES_POSITIONS, TINY_POSITIONS = 512, 256, 2048
TILE = 32  # the side of a picture as the model of shapes sees it, in pixels

# Tuned by experiment (docs/decisions/0025-the-demo.md): after about 250 steps, the model copies all six
# fields of an order with any seed.
DEMO_STEPS, DEMO_PAGES_PER_STEP = 400, 24
DEMO_LEARNING_RATE, DEMO_MATRIX_LEARNING_RATE = 5e-3, 2e-2
DEMO_THREADS = 1  # a second thread gains little for such small matrices, and is slower on a busy machine


def byte_level_tokenizer(
    texts: Iterable[str], vocabulary: int, positions: int, more: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; it has no unknown tokens and is lossless.

    `more` are special tokens beside the usual ones.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, UNKNOWN, END, *ROLES, *more]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[*ROLES, *more],
        chat_template=CHAT_TEMPLATE,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def random_llama(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    positions: int,
    seed: int,
) -> LlamaForCausalLM:
    """A randomly initialized model for the tokenizer's tokens; does not change the caller's random state."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        # Llama's default of 0.02 is meant for thousands of channels. At this width, attention would start
        # almost uniform, and the model would take many times longer to learn to copy.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _training_steps(
    pages: Sequence[Sequence[int]], pages_per_step: int, seed: int
) -> list[list[Sequence[int]]]:
    """Steps of pages with similar length, in random order."""
    by_length = sorted(pages, key=len)
    steps = [by_length[start : start + pages_per_step] for start in range(0, len(by_length), pages_per_step)]
    random.Random(f"reading/{seed}").shuffle(steps)
    return steps


def _optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan et al. 2024) for the matrices of the layers (it converges faster), AdamW for the rest."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inner = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in inner]
    return (
        torch.optim.Muon(matrices, lr=DEMO_MATRIX_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=DEMO_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    )


def pretrain(
    model: LlamaForCausalLM,
    pages: Sequence[Sequence[int]],
    *,
    pages_per_step: int,
    seed: int,
    done: Callable[[int], None],
) -> float:
    """Causal language modeling for one epoch, in place; returns the loss of the last step.

    Each of the pages, token ids, is a row of a step, [pages_per_step, tokens]; `done` is told how many a step
    had.
    """
    steps = _training_steps(pages, pages_per_step, seed)
    optimizers = _optimizers(model)
    schedules = [
        OneCycleLR(
            each, each.param_groups[0]["lr"], total_steps=len(steps) + 1, pct_start=0.1, cycle_momentum=False
        )
        for each in optimizers
    ]
    model.train()
    loss = torch.zeros(())
    for step in steps:
        rows = [torch.tensor(page) for page in step]
        # Right padding is invisible to causal attention, so no attention mask is needed.
        ids = pad_sequence(rows, batch_first=True, padding_value=int(model.config.pad_token_id or 0))
        labels = pad_sequence(rows, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        done(len(step))
    model.eval()
    return loss.item()


def make_demo_model(
    folder: Path, pages: Sequence[str], letters: Iterable[str], *, seed: int, done: Callable[[int], None]
) -> dict[str, float]:
    """Pretrains the demo's base model on `pages` and saves it; the tokenizer is also trained on `letters`.

    It returns parameters, loss (last step, nats per token) and seconds.
    """
    began = time.perf_counter()
    tokenizer = byte_level_tokenizer([*pages, *letters], DEMO_VOCABULARY, DEMO_POSITIONS)
    model = random_llama(
        tokenizer, hidden=96, layers=2, heads=4, intermediate=256, positions=DEMO_POSITIONS, seed=seed
    )
    rows = [ids + [tokenizer.eos_token_id] for ids in tokenizer(list(pages))["input_ids"]]
    threads = torch.get_num_threads()
    torch.set_num_threads(DEMO_THREADS)
    try:
        loss = pretrain(model, rows, pages_per_step=DEMO_PAGES_PER_STEP, seed=seed, done=done)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": model.num_parameters(), "loss": loss, "seconds": time.perf_counter() - began}


def make_shapes_model(folder: Path, texts: Iterable[str], *, seed: int) -> dict[str, int]:
    """Saves a SmolVLM of random weights, which sees a picture as 16 patches, 4 tokens; returns its size."""
    tokenizer = byte_level_tokenizer(texts, SHAPES_VOCABULARY, SHAPES_POSITIONS, IMAGE_TOKENS)
    tokenizer.chat_template = IMAGE_TEMPLATE
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    text = dict(
        **sizes, model_type="llama", num_hidden_layers=3, num_key_value_heads=4, vocab_size=len(tokenizer),
        max_position_embeddings=SHAPES_POSITIONS, initializer_range=0.08, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    vision = dict(**sizes, num_hidden_layers=1, image_size=TILE, patch_size=TILE // 4, initializer_range=0.08)
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[0]),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    longest = {"longest_edge": TILE}
    processor = SmolVLMImageProcessorPil(do_image_splitting=False, size=longest, max_image_size=longest)
    processor.save_pretrained(folder)
    return {"parameters": model.num_parameters()}


def make_tiny_model(folder: Path, texts: Iterable[str], *, seed: int) -> dict[str, int]:
    """Saves a model with random weights and a tokenizer trained on `texts`; returns its size."""
    tokenizer = byte_level_tokenizer(texts, TINY_VOCABULARY, TINY_POSITIONS)
    model = random_llama(
        tokenizer, hidden=192, layers=4, heads=6, intermediate=512, positions=TINY_POSITIONS, seed=seed
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": model.num_parameters()}

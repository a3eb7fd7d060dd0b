"""Tiny models of each architecture that is exported, with tokenizers of the two kinds that GGUF has."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from sft_play.builtin.models import byte_level_tokenizer
from sft_play.data.template import SHIPPED

TEXTS = [
    "the quick brown fox",
    "jumps over the lazy dog 1234",
    "don't, won't; caf\u00e9 \u4f60\u597d!\n\n  two  spaces",
] * 4
VOCABULARY = 400
CHATML = (SHIPPED / "chatml.jinja").read_text()
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set start = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set start = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ start if loop.first else '' }}{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0, eos_token_id=2, bos_token_id=1,
)  # fmt: skip
GEMMA_SIZES: dict[str, Any] = dict(SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=64)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(**GEMMA_SIZES),
    "gemma3": lambda: Gemma3TextConfig(**{**GEMMA_SIZES, "num_hidden_layers": 7}),
}
SENTENCE_PIECE = {"llama", "mistral", "gemma2", "gemma3"}


def byte_tokenizer(pattern: str = PRETOKENIZE_REGEX) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits text by a pattern, by default as Qwen does."""
    tokenizer = byte_level_tokenizer(TEXTS, 330, 256)
    backend = tokenizer.backend_tokenizer
    split = pre_tokenizers.Split(_regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """BPE of characters with bytes for the rest, as SentencePiece makes it, with Gemma's template.

    As Gemma's, it begins a plain text with <bos>.
    """
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ascii_texts = [text for text in TEXTS if text.isascii()]
    raw.train_from_iterator(
        ascii_texts,
        trainers.BpeTrainer(vocab_size=370, special_tokens=[*special, *bytes_], show_progress=False),
    )
    begin = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", special.index("<bos>"))]
    )
    raw.post_processor = begin
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_without_added_bytes(raw, bytes_), pad_token="<pad>", bos_token="<bos>",
        eos_token="<eos>", unk_token="<unk>", additional_special_tokens=special[4:], chat_template=GEMMA,
    )  # fmt: skip
    tokenizer.add_tokens(["<b>"])
    return tokenizer


def _without_added_bytes(raw: Tokenizer, bytes_: list[str]) -> Tokenizer:
    """The trainer makes added tokens of the bytes, which would be found in texts."""
    import json

    tree = json.loads(raw.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] not in bytes_]
    return Tokenizer.from_str(json.dumps(tree))


def make_folder(name: str, folder: Path) -> Path:
    """Saves a random model of an architecture; each of its tensors is different from the others."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer = piece_tokenizer() if name in SENTENCE_PIECE else byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return folder

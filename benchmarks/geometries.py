"""Configs with the sizes of published models; predicting the memory of a step needs no weights."""

from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

POSITIONS = 32768  # more than the longest row in any benchmark


def _llama(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, *, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=POSITIONS,
    )


def _qwen2(hidden: int, inner: int, layers: int, heads: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


LLAMA_2_7B = _llama(4096, 11008, 32, 32, 32, 32000, tied=False)
LLAMA_2_13B = _llama(5120, 13824, 40, 40, 40, 32000, tied=False)
LLAMA_3_1_8B = _llama(4096, 14336, 32, 32, 8, 128256, tied=False)
LLAMA_2_70B = _llama(8192, 28672, 80, 64, 8, 32000, tied=False)
LLAMA_3_1_70B = _llama(8192, 28672, 80, 64, 8, 128256, tied=False)
LLAMA_3_2_1B = _llama(2048, 8192, 16, 32, 8, 128256, tied=True)
LLAMA_3_2_3B = _llama(3072, 8192, 28, 24, 8, 128256, tied=True)
QWEN2_5_500M, QWEN2_5_1_5B = _qwen2(896, 4864, 24, 14), _qwen2(1536, 8960, 28, 12)
QWEN3_600M, QWEN3_4B = _qwen3(1024, 3072, 28, 16, tied=True), _qwen3(2560, 9728, 36, 32, tied=True)
QWEN3_8B = _qwen3(4096, 12288, 36, 32, tied=False)
GEMMA_3_270M = Gemma3TextConfig(
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    sliding_window=512,
)

MEASURED: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": QWEN2_5_500M,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Qwen2.5-1.5B": QWEN2_5_1_5B,
    "Llama-3.2-3B": LLAMA_3_2_3B,
    "Qwen3-4B": QWEN3_4B,
    "Llama-3.1-8B": LLAMA_3_1_8B,
}

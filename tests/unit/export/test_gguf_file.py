"""What is in a GGUF file, read back and compared with the model folder it was made of."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sft_play.errors import ConfigError, NonFiniteError
from sft_play.export.architecture import gguf_family
from sft_play.export.gguf_file import Source, file_bytes, write
from sft_play.export.vocabulary import SPLITS, vocabulary
from tests.rounding import assert_same_tensor, forward_terms, summed
from tests.unit.export import folders

gguf = pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")

ARCHITECTURES = {"llama3": "llama", "mistral": "llama"}  # of GGUF, where the name is another
# names in GGUF -> in transformers
TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
NORMS = {"ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(name)` is a tiny model folder, `made(name, type)` also the file that was written of it."""
    root, found = tmp_path_factory.mktemp("gguf"), {}

    def make(name, wanted="f32"):
        folder = root / name
        if not folder.exists():
            folders.make_folder(name, folder)
        if (name, wanted) not in found:
            source = Source(
                folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), name, False
            )
            path = root / f"{name}-{wanted}.gguf"
            found[name, wanted] = (source, path, write(path, source, wanted))
        return found[name, wanted]

    return make


def fields(path) -> dict:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def tensors(path) -> dict[str, tuple[np.ndarray, str]]:
    """Values in float32 and types; dimensions as in torch."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = (
            values.reshape([int(n) for n in reversed(tensor.shape)]),
            tensor.tensor_type.name,
        )
    return found


def source_name(name: str, gemma: bool) -> str:
    plain, _, suffix = name.rpartition(".")
    names = TENSORS | (GEMMA_NORMS if gemma else NORMS)
    if not plain.startswith("blk."):
        return f"{names[plain]}.{suffix}"
    _, layer, kind = plain.split(".")
    return f"model.layers.{layer}.{names[kind]}.{suffix}"


def undone(values: np.ndarray, name: str, config) -> np.ndarray:
    """A tensor as transformers has it, computed from the definition of what was done to it."""
    text = config.get_text_config()
    if "gemma" in text.model_type and name.endswith("norm.weight"):
        return values - 1
    if text.model_type in ("llama", "mistral") and (".attn_q." in name or ".attn_k." in name):
        heads = text.num_attention_heads if ".attn_q." in name else text.num_key_value_heads
        size = values.shape[0] // heads
        rows = np.arange(values.shape[0])
        head, channel = rows // size, rows % size
        half = size // 2
        # channel i of the first half is stored at 2i, channel i of the second half at 2i + 1
        places = head * size + np.where(channel < half, 2 * channel, 2 * (channel - half) + 1)
        return values[places]
    return values


@pytest.mark.parametrize("name", folders.CONFIGS)
def test_every_tensor_comes_back(made, name):
    source, path, counts = made(name)
    weights = load_file(source.folder / "model.safetensors")
    found = tensors(path)
    factors = found.pop("rope_freqs.weight", None)
    assert (factors is not None) == (name == "llama3")
    names = {key: source_name(key, "gemma" in name) for key in found}
    assert sorted(names.values()) == sorted(weights)
    for key, (values, kind) in found.items():
        np.testing.assert_allclose(
            undone(values, key, source.config), weights[names[key]].float(), atol=1e-6, err_msg=key
        )
        assert kind == "F32"
    assert sum(counts.values()) == len(found) + (factors is not None)
    size = sum(values.nbytes for values, _ in found.values()) + (0 if factors is None else factors[0].nbytes)
    assert file_bytes(source, "f32") == size


@pytest.mark.parametrize("name", folders.CONFIGS)
def test_the_sizes_are_those_of_the_config(made, name):
    source, path, _ = made(name)
    text, found = source.config.get_text_config(), fields(path)
    kind = ARCHITECTURES.get(name, name)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    expected = {
        "context_length": text.max_position_embeddings, "embedding_length": text.hidden_size,
        "block_count": text.num_hidden_layers, "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads, "attention.head_count_kv": text.num_key_value_heads,
        "attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size,
        "vocab_size": text.vocab_size,
    }  # fmt: skip
    assert found["general.architecture"] == kind and found["general.name"] == name
    assert {key: found[f"{kind}.{key}"] for key in expected} == expected
    assert found[f"{kind}.attention.layer_norm_rms_epsilon"] == pytest.approx(text.rms_norm_eps)
    rope = text.rope_parameters
    assert found[f"{kind}.rope.freq_base"] == rope.get("full_attention", rope)["rope_theta"]
    if "gemma" in name:
        assert found[f"{kind}.attention.sliding_window"] == 64
    if name == "gemma3":
        assert found["gemma3.rope.freq_base_swa"] == rope["sliding_attention"]["rope_theta"]
    if name == "gemma2":
        assert found["gemma2.attn_logit_softcapping"] == 50 and found["gemma2.final_logit_softcapping"] == 30


def test_the_slowed_frequencies_of_llama_3_are_those_of_transformers(made):
    source, path, _ = made("llama3")
    factors = tensors(path)["rope_freqs.weight"][0]
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    model = AutoModelForCausalLM.from_pretrained(source.folder)
    np.testing.assert_allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-5)
    assert (
        factors[0] == 1 and factors[-1] == 8
    )  # the fast ones stay, the slow ones are slowed down by `factor`


@pytest.mark.parametrize(
    ("name", "model", "split"), [("qwen2", "gpt2", "qwen2"), ("gemma2", "llama", "default")]
)
def test_the_tokenizer_is_that_of_the_folder(made, name, model, split):
    source, path, _ = made(name)
    tokenizer, found = source.tokenizer, fields(path)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == (model, split)
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == source.config.vocab_size
    for text, index in tokenizer.get_vocab().items():
        assert tokens[index] == text
    of = dict(zip(tokens, kinds, strict=True))
    special = "<|im_end|>" if name == "qwen2" else "<end_of_turn>"
    assert of[special] == gguf.TokenType.CONTROL and kinds[-1] == gguf.TokenType.UNUSED
    if name == "gemma2":
        assert of["<b>"] == gguf.TokenType.USER_DEFINED and of["<0x41>"] == gguf.TokenType.BYTE
        assert of["<unk>"] == gguf.TokenType.UNKNOWN
        assert found["tokenizer.ggml.add_space_prefix"] is False
        merged = [
            s for s, kind in zip(found["tokenizer.ggml.scores"], kinds, strict=True) if kind == 1 and s > -1e6
        ]
        assert sorted(merged, reverse=True) == [-float(rank) for rank in range(len(merged))]
    else:
        assert len(found["tokenizer.ggml.merges"]) > 50
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert found["tokenizer.chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize(("wanted", "step"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", None)])
def test_smaller_types_are_rounded_and_norms_are_not(made, wanted, step):
    exact, rounded = tensors(made("qwen3")[1]), tensors(made("qwen3", wanted)[1])
    for name, (values, kind) in rounded.items():
        true = exact[name][0]
        if values.ndim == 1:
            assert kind == "F32" and (values == true).all()
            continue
        assert kind == wanted.upper()
        block = (
            np.abs(true).reshape(-1, 32).max(-1, keepdims=True) / 127
            if step is None
            else np.abs(true) * step * 2
        )
        assert (np.abs(values - true).reshape(block.shape[0], -1) <= block * 0.6 + 1e-7).all()


def test_rows_that_a_block_does_not_divide_are_kept_in_float16(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**folders.SIZES, "hidden_size": 48}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    tokenizer = folders.byte_tokenizer()
    source = Source(tmp_path, AutoConfig.from_pretrained(tmp_path), tokenizer, "odd", False)
    counts = write(tmp_path / "odd.gguf", source, "q8_0")
    assert counts["F16"] > 0 and counts["Q8_0"] == 2  # down_proj has rows of 96


def test_of_a_multimodal_model_the_text_part_is_exported(tmp_path):
    from transformers import Gemma3Config

    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )  # fmt: skip
    text = folders.CONFIGS["gemma3"]()
    config = Gemma3Config(text_config=text.to_dict(), vision_config=sizes, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = Source(tmp_path, AutoConfig.from_pretrained(tmp_path), folders.piece_tokenizer(), "both", True)
    write(tmp_path / "text.gguf", source, "f32")
    weights, found = load_file(tmp_path / "model.safetensors"), tensors(tmp_path / "text.gguf")
    prefix = "language_model."
    names = {prefix + source_name(key, gemma=True): key for key in found}
    assert sorted(names) == sorted(name for name in weights if name.startswith(prefix))
    for name, key in names.items():
        np.testing.assert_allclose(undone(found[key][0], key, text), weights[name], atol=1e-6)


def test_a_weight_beyond_float16_is_named(tmp_path):
    folders.make_folder("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    source = Source(tmp_path, model.config, AutoTokenizer.from_pretrained(tmp_path), "large", False)
    with pytest.raises(
        NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.weight overflows float16; use DTYPE=bf16"
    ):
        write(tmp_path / "x.gguf", source, "f16")


def gemma3(**changes):
    return {**folders.GEMMA_SIZES, "num_hidden_layers": 7, **changes}


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (
            "gpt2",
            {},
            "models of type gpt2 cannot be exported, only those of type llama, mistral, .* Run `make merge`.*convert_hf_to_gguf.py",
        ),
        ("qwen3_moe", {}, "models of type qwen3_moe cannot be exported"),
        ("qwen3", {**folders.SIZES, "attention_bias": True}, "no attention_bias"),
        ("llama", {**folders.SIZES, "hidden_act": "gelu"}, "activation gelu"),
        (
            "qwen2",
            {**folders.SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type dynamic",
        ),
        ("gemma3_text", gemma3(query_pre_attn_scalar=64), "scales attention by 32"),
        ("gemma3_text", gemma3(layer_types=["full_attention"] * 7), "layers 6, 12, ... have full attention"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(kind, sizes, words):
    with pytest.raises(ConfigError, match=words):
        gguf_family(AutoConfig.for_model(kind, **sizes))


def test_a_tokenizer_that_splits_text_by_other_rules_is_refused():
    from tokenizers import pre_tokenizers

    tokenizer = folders.byte_tokenizer()
    steps = [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    with pytest.raises(
        ConfigError, match="does not know how this tokenizer splits text.*llama-bpe, qwen2, tekken"
    ):
        vocabulary(tokenizer, 400)


def test_the_rules_of_qwen_are_those_of_transformers():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert SPLITS[PRETOKENIZE_REGEX] == "qwen2"


def test_transformers_reads_the_file_with_the_same_logits(made):
    source, path, _ = made("llama")
    again = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(source.folder)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        found, expected = again(ids).logits, model(ids).logits
    assert_same_tensor(found, expected, summed(forward_terms(model, tokens=ids.numel())))

"""llama.cpp itself loads the files: the same tokens, prompts and probabilities as transformers.

Run on 2026-11-22 with xllamacpp 2026.10.11549, a build of llama.cpp with its server.
"""

import json
import urllib.request

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.unit.export import folders

pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
llama_cpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp (pip install xllamacpp)")
from sft_play.export.gguf_file import Source, write  # noqa: E402
from sft_play.export.vocabulary import SPLITS, beginning  # noqa: E402

pytestmark = pytest.mark.slow

TEXTS = [
    "the quick brown fox", "The don't 12345 caf\u00e9 \u4f60\u597d!\n\n  two  spaces\t", " leading",
    "<|im_start|>user\nhi there<|im_end|>\n", "<start_of_turn>user\nhi <b>there<end_of_turn>\n",
]  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the quick"},
    {"role": "assistant", "content": "fox"},
    {"role": "user", "content": "lazy"},
]
PROMPTS = 12
PROMPT_TOKENS = 100  # more than the sliding windows, and than Llama 3's original context
GELU_BY_TABLE = 2e-3  # llama.cpp looks up Gemma's activation in float16


class Server:
    """llama.cpp's server with one model, in float32."""

    def __init__(self, path):
        settings = llama_cpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel, settings.warmup = 256, 1, False
        settings.cpuparams.n_threads = 1
        settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = llama_cpp.Server(settings)

    def post(self, path, **body):
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return json.loads(urllib.request.urlopen(request, timeout=60).read())


@pytest.mark.parametrize("name", folders.CONFIGS)
def test_llama_cpp_computes_what_transformers_computes(name, tmp_path):
    folder = folders.make_folder(name, tmp_path / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    adds_bos = beginning(tokenizer).added(only_text=False)
    source = Source(folder, AutoConfig.from_pretrained(folder), tokenizer, name, adds_bos)
    write(tmp_path / "m.gguf", source, "f32")
    server = Server(tmp_path / "m.gguf")
    for text in TEXTS:
        found = server.post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert found == tokenizer(text, add_special_tokens=False)["input_ids"], text
    prompt = server.post("/apply-template", messages=CHAT)["prompt"]
    found = server.post("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert worst_difference(server, model) < (GELU_BY_TABLE if "gemma" in name else 1e-5)


def splitting_tokenizers():
    """A tokenizer for each name of rules that are exported."""
    found = {name: folders.byte_tokenizer(pattern) for pattern, name in SPLITS.items()}
    for name, digits in (("gpt-2", []), ("smollm", [pre_tokenizers.Digits(individual_digits=True)])):
        found[name] = folders.byte_tokenizer()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        both = pre_tokenizers.Sequence([*digits, byte_level]) if digits else byte_level
        found[name].backend_tokenizer.pre_tokenizer = both
    return found


def test_llama_cpp_splits_text_by_the_same_rules(tmp_path):
    folder = folders.make_folder("qwen2", tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    for name, tokenizer in splitting_tokenizers().items():
        write(tmp_path / f"{name}.gguf", Source(folder, config, tokenizer, name, False), "q8_0")
        server = Server(tmp_path / f"{name}.gguf")
        for text in [*TEXTS, "12 3456789 I'LL SAY iPhoneXS /path\r\n\r\n  x"]:
            found = server.post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
            assert found == tokenizer(text, add_special_tokens=False)["input_ids"], (name, text)


def worst_difference(server, model) -> float:
    """Of the log-probabilities of the next token; the most likely token is the same."""
    worst = compared = 0
    for seed in range(PROMPTS):
        ids = torch.randint(6, 300, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
        answer = server.post(
            "/completion",
            prompt=ids,
            n_predict=1,
            temperature=0,
            n_probs=20,
            return_tokens=True,
            cache_prompt=False,
        )
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        assert answer["tokens"] == [int(expected.argmax())]
        for step in answer.get("completion_probabilities", []):  # none for a part of a character
            compared += 1
            for token in step["top_logprobs"]:
                worst = max(worst, abs(token["logprob"] - expected[token["id"]].item()))
    assert compared > PROMPTS // 2
    return worst

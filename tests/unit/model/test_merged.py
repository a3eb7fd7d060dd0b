"""A model that is merged weight by weight while it is saved has the files that PEFT's merged model has."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from benchmarks.miniatures import miniature
from sft_play.commands.merge import merge
from sft_play.config.schema import ModelConfig, RunConfig
from sft_play.model.adapters.attach import attach_adapter, load_adapter
from sft_play.model.adapters.decomposition import save_trained
from sft_play.model.build import load_base
from sft_play.model.load import new_tokens
from sft_play.runlog import RunDir
from tests.conftest import VOCABULARY

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
BIAS = Qwen2Config(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
TRANSPOSED = GPT2Config(
    n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=None, eos_token_id=1
)
SHARED = miniature("zamba")
CASES = {
    "lora": (LLAMA, {}, {}),
    "rsLoRA": (LLAMA, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}, {}),
    "DoRA": (LLAMA, {"use_dora": True}, {}),
    "PiSSA": (LLAMA, {"init": "pissa"}, {}),
    "biases": (BIAS, {}, {}),
    "tied": (TIED, {}, {}),
    "whole modules": (LLAMA, {"modules_to_save": ("norm", "lm_head")}, {}),
    "tied whole modules": (TIED, {"modules_to_save": ("embed_tokens", "lm_head")}, {}),
    "new tokens": (LLAMA, {}, {"new_tokens": ("<tool>", "w1 w2")}),
    "tied new tokens": (TIED, {}, {"new_tokens": ("<tool>", "w1 w2")}),
    "joined experts": (MOE, {}, {}),
    "experts of a mixture": (MOE, {"target_modules": ("q_proj", "v_proj")}, {}),
    "weights that layers share": (SHARED, {"target_modules": ("q_proj", "down_proj")}, {}),
    "transposed": (TRANSPOSED, {"target_modules": ("c_attn", "c_proj", "c_fc")}, {}),
}  # fmt: skip
TYPES = [("float32", "auto"), ("bfloat16", "auto"), ("float32", "bfloat16"), ("bfloat16", "float32"),
         ("bfloat16", "float16")]  # fmt: skip
# By default each case with the type that most models have, and some with all: what is cast is cast in one place.
ALWAYS, IN_ALL_TYPES = ("bfloat16", "auto"), ("lora", "tied new tokens", "joined experts")
MERGED = [
    pytest.param(
        name, *types, id=f"{' to '.join(types)}-{name}",
        marks=[] if types == ALWAYS or name in IN_ALL_TYPES else [pytest.mark.slow],
    )
    for types, name in product(TYPES, CASES)
]  # fmt: skip


@pytest.fixture(scope="module")
def base_of(tiny_model, tmp_path_factory):
    """Folders of small models, by architecture and type of the files."""
    made = {}

    def of(architecture, dtype: str):
        key = architecture.model_type, architecture.tie_word_embeddings, dtype
        if key not in made:
            folder = tmp_path_factory.mktemp("base")
            for file in tiny_model.glob("*token*"):
                shutil.copy(file, folder)
            torch.manual_seed(0)
            config = AutoConfig.for_model(**architecture.to_dict())
            model = AutoModelForCausalLM.from_config(config)
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            made[key] = folder
        return made[key]

    return of


def run_of(base, folder, lora, model):
    """A run on the base, with an adapter that changes everything that it trains."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(base), **model},
            "data": {"train_path": "unused.jsonl"},
            "tuning": {"lora": {"r": 4, **lora}},
            "output": {"name": "run", "dir": str(folder)},
        }
    )
    run = RunDir(folder / "run")
    torch.manual_seed(1)
    loaded = load(config.model, "bfloat16")
    ids = [token.id for token in new_tokens(config.model)]
    adapted = attach_adapter(loaded, config.tuning.lora, new_ids=ids)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    save_trained(adapted, run.adapter)
    return config, run


def load(model: ModelConfig, dtype: str):
    return load_base(
        model, dtype=dtype, attn_implementation="eager", device=torch.device("cpu"), quantize=False
    )


def merged_by_peft(config, run, published: str, dtype: str, folder):
    """All in memory: cast while loading, merged, cast again, and saved."""
    base = load(config.model, "float32" if published == "float32" else dtype)
    model = load_adapter(base, run.adapter).merge_and_unload(safe_merge=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=20_000)


def content(folder):
    """All tensors, and what config.json and the index say apart from the file of each."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for path in folder.glob("*.safetensors"):
        loaded = load_file(path)
        assert all(index["weight_map"].pop(name) == path.name for name in loaded)
        tensors |= loaded
    return tensors, (index, json.loads((folder / "config.json").read_text()))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "published", "asked"), MERGED)
def test_the_weights_are_those_of_pefts_merged_model(base_of, tmp_path, name, published, asked):
    architecture, lora, model = CASES[name]
    config, run = run_of(base_of(architecture, published), tmp_path, lora, model)
    merge(config, run, dtype=asked, max_shard_bytes=20_000)
    merged_by_peft(config, run, published, published if asked == "auto" else asked, tmp_path / "expected")
    (found, said), (expected, expected_said) = content(run.merged), content(tmp_path / "expected")
    assert said == expected_said
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def test_files_of_another_type_than_config_json_says_are_not_rounded_to_that(base_of, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_of(LLAMA, "float32"), base)
    tree = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(tree | {"dtype": "bfloat16"}))
    config, run = run_of(base, tmp_path, {}, {})
    merge(config, run, dtype="float32", max_shard_bytes=20_000)
    merged_by_peft(config, run, "bfloat16", "float32", tmp_path / "expected")
    found, expected = content(run.merged)[0], content(tmp_path / "expected")[0]
    published = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], published)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

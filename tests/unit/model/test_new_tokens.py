"""Tokens that are added, and modules that are trained whole: trained, saved, loaded and merged."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import CheckpointError, ConfigError
from sft_play.model.adapters.attach import attach_adapter, load_adapter, require_fitting
from sft_play.model.build import load_base
from sft_play.model.load import empty_base, load_model_config, load_tokenizer, new_tokens
from tests.conftest import VOCABULARY
from tests.rounding import assert_same_tensor, forward_terms, summed

SIZES = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
WORDS = ("w1 w2", "<tool>")  # two tokens before; one that the tokenizer does not know
IDS = (VOCABULARY, VOCABULARY + 1)


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Folders of a small model, by whether it is tied, and how many rows its embedding has."""
    made = {}

    def of(tied: bool = False, rows: int = VOCABULARY) -> ModelConfig:
        if (tied, rows) not in made:
            folder = tmp_path_factory.mktemp("model")
            for file in tiny_model.glob("*token*"):
                shutil.copy(file, folder)
            torch.manual_seed(0)
            LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=rows, tie_word_embeddings=tied)).save_pretrained(
                folder
            )
            made[tied, rows] = folder
        return ModelConfig(name=str(made[tied, rows]), new_tokens=WORDS)

    return of


def load(model: ModelConfig, quantize: bool = False):
    return load_base(
        model, dtype="float32", attn_implementation="eager", device=torch.device("cpu"), quantize=quantize
    )


def logits(model):
    ids = torch.tensor([[5, *IDS, 7, IDS[0], 9]])
    with torch.no_grad():
        return model(input_ids=ids).logits


def train(model, steps: int = 3) -> None:
    # at a rate of 0.05 these weights, of 16 dimensions, come to magnify roundings
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.tensor([[3, IDS[0], 8, IDS[1], 9]])
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 8])
def test_a_row_starts_as_the_mean_of_the_pieces_that_its_token_was_split_into(models, tied, rows):
    model = models(tied, rows)
    with_words, plain = load(model), load(model.model_copy(update={"new_tokens": ()}))
    assert load_tokenizer(model)("w1 w2 w3 <tool>")["input_ids"] == [IDS[0], 6, IDS[1]]
    assert load_model_config(model).vocab_size == with_words.config.vocab_size == max(rows, IDS[1] + 1)
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        after, before = getattr(with_words, layer)().weight, getattr(plain, layer)().weight
        assert len(after) == max(rows, IDS[1] + 1)
        assert torch.equal(after[:VOCABULARY], before[:VOCABULARY])
        assert_same_tensor(after[IDS[0]], (before[4] + before[5]) / 2, summed(2))  # w1 and w2
        mean = before[:VOCABULARY].mean(0)  # no piece is known
        assert_same_tensor(after[IDS[1]], mean, summed(VOCABULARY))
    assert (with_words.lm_head.weight is with_words.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("w5",), "'w5' is already a token"),
        (("<tool>", "<eos>"), "'<eos>' is already a token"),
        (("w5", "w6"), "'w5', 'w6' are already tokens of this tokenizer; remove them"),
        (tuple(f"w{number}" for number in range(5, 15)), "'w12' and 2 more are already tokens"),
    ],
)
def test_a_token_that_exists_is_refused(models, texts, found):
    model = models().model_copy(update={"new_tokens": texts})
    for read in (load_tokenizer, load_model_config, new_tokens):
        with pytest.raises(ConfigError, match=found):
            read(model)


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("whole", [(), ("norm",)])
def test_only_rows_of_new_tokens_are_trained_and_saved_and_merged(models, tmp_path, tied, quantize, whole):
    model = models(tied)
    settings = LoraSettings(r=2, modules_to_save=whole)
    adapted = attach_adapter(load(model, quantize), settings, new_ids=IDS)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad and "lora_" not in n}
    shapes = sorted(tuple(parameter.shape) for parameter in trained.values())
    assert shapes == [(2, 16)] * (1 if tied else 2) + [(16,)] * len(whole)
    before = logits(adapted)
    near = summed(forward_terms(attach_adapter(load(model), settings, new_ids=IDS), tokens=6))
    with adapted.disable_adapter():
        assert_same_tensor(logits(adapted), before, near)
    train(adapted)
    expected = logits(adapted)
    assert (expected - before).abs().max() > 0.01
    adapted.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(tensor.shape[0] <= 32 for tensor in saved.values())  # and no whole embedding

    require_fitting(empty_base(model), tmp_path)
    loaded = load_adapter(load(model, quantize), tmp_path)
    assert_same_tensor(logits(loaded), expected, near)
    merged = load_adapter(load(model), tmp_path).merge_and_unload(safe_merge=True)
    base = load(model)
    for layer, ours, theirs in (
        ("embed_tokens", merged.model.embed_tokens.weight, base.model.embed_tokens.weight),
        ("lm_head", merged.lm_head.weight, base.lm_head.weight),
    ):
        assert torch.equal(ours[:VOCABULARY], theirs[:VOCABULARY]), layer
        delta = next((t for name, t in saved.items() if layer in name), None)
        rows = saved["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
        assert torch.equal(ours[VOCABULARY:], rows if delta is None else delta), layer
    folder = tmp_path / "merged"
    merged.save_pretrained(folder)
    alone = load(ModelConfig(name=str(folder)))
    assert alone.config.tie_word_embeddings == tied
    if not quantize:
        assert_same_tensor(logits(alone), expected, near)


def test_an_adapter_with_other_tokens_does_not_fit(models, tmp_path):
    model = models()
    attach_adapter(load(model), LoraSettings(r=2), new_ids=IDS).save_pretrained(str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"trained row 257 of the embedding, which has 256; .*model.new_tokens"
    ):
        require_fitting(empty_base(model.model_copy(update={"new_tokens": ()})), tmp_path)


def test_an_output_head_with_a_bias_is_refused_where_rows_of_it_would_be_trained():
    base = PhiForCausalLM(PhiConfig(**SIZES, vocab_size=300))
    with pytest.raises(ConfigError, match=r"output head of PhiForCausalLM has a bias"):
        attach_adapter(base, LoraSettings(r=2), new_ids=(298, 299))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", [("embed_tokens", "lm_head"), ("embed_tokens",), ("lm_head",)])
def test_whole_embedding_and_head_stay_tied_if_they_were(models, tmp_path, tied, names):
    model = models(tied).model_copy(update={"new_tokens": ()})
    adapted = attach_adapter(load(model), LoraSettings(r=2, modules_to_save=names))
    trained = [p for n, p in adapted.named_parameters() if p.requires_grad and "lora_" not in n]
    assert [tuple(p.shape) for p in trained] == [(VOCABULARY, 16)] * (1 if tied else len(names))
    ids = torch.tensor([[3, 8, 9]])
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
    adapted.save_pretrained(str(tmp_path))
    require_fitting(empty_base(model), tmp_path)
    merged = load_adapter(load(model), tmp_path).merge_and_unload(safe_merge=True)
    merged.save_pretrained(tmp_path / "merged")
    alone = load(ModelConfig(name=str(tmp_path / "merged")))
    with torch.no_grad():
        found = alone(input_ids=ids).logits
    assert_same_tensor(found, expected, summed(forward_terms(alone, tokens=ids.numel())))
    assert alone.config.tie_word_embeddings == tied


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "new_ids", "found"),
    [
        ({"modules_to_save": ("embed",)}, (), r"no module of LlamaForCausalLM is named 'embed'; closest: embed_tokens"),
        ({"modules_to_save": ("layers",)}, (), r"layers is a list of modules"),
        ({"modules_to_save": ("act_fn",)}, (), r"act_fn has no weights"),
        ({"modules_to_save": ("model",)}, (), r"model holds every layer that could be adapted; name modules within"),
        ({"target_modules": ("lm_head",)}, IDS, r"lm_head is an embedding or the output head"),
        ({"target_modules": ("q_proj", "embed_tokens")}, IDS, r"embed_tokens is an embedding or the output head"),
        ({"target_modules": ("q_proj", "nope")}, (), r"tuning.lora.target_modules.*nope"),
        ({"rank_pattern": {r"(\w+\.?)+!": 4}}, (), r"rank_pattern: .* takes more than 5 s on the names"),
        ({"alpha_pattern": {r"(.*)*z": 4}}, (), r"alpha_pattern: .* takes more than 5 s on the names"),
        ({"modules_to_save": ("lm_head",)}, IDS, r"trains lm_head in full, and model.new_tokens trains single rows"),
        (
            {"modules_to_save": ("mlp",), "target_modules": ("q_proj", "up_proj")},
            (),
            r"trains model.layers.0.mlp.up_proj in full, and tuning.lora.target_modules gives it an adapter",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_whole_is_refused(models, monkeypatch, settings, new_ids, found):
    monkeypatch.setattr("sft_play.data.limits.ROW_SECONDS", 0.2)  # of the 5 that the message names
    with pytest.raises(ConfigError, match=found):
        attach_adapter(load(models()), LoraSettings(r=2, **settings), new_ids=new_ids)


def test_four_bit_layers_cannot_be_trained_whole(models):
    with pytest.raises(ConfigError, match=r"q_proj has 4-bit weights"):
        attach_adapter(load(models(), quantize=True), LoraSettings(r=2, modules_to_save=("q_proj",)))


def test_modules_that_are_trained_whole_get_no_adapter_by_default(models):
    adapted = attach_adapter(load(models()), LoraSettings(r=2, modules_to_save=("down_proj",)), autocast=True)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert sum("modules_to_save" in name for name in names) == 2
    assert not any("down_proj" in name and "lora_" in name for name in names)


def test_under_autocast_what_is_trained_is_in_fp32(models):
    base = load(models()).to(torch.bfloat16)
    adapted = attach_adapter(base, LoraSettings(r=2, modules_to_save=("norm",)), autocast=True, new_ids=IDS)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}

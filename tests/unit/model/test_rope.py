"""model.rope_scaling: positions and frequencies are those of transformers, and whatever loads the model has them."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sft_play.commands.merge import merge
from sft_play.config.schema import ModelConfig
from sft_play.data.length import length_limit
from sft_play.errors import ConfigError
from sft_play.export.architecture import gguf_family
from sft_play.model.architecture.rope import with_rope_scaling
from sft_play.model.build import load_base, load_for_inference
from sft_play.model.load import load_model_config, load_tokenizer, planning_config, position_limit
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import trace_step
from tests.unit.export.folders import CONFIGS
from tests.unit.finished_run import FinishedRun, random_run

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=300, max_position_embeddings=256,
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}


def scaled(config, **scaling):
    return with_rope_scaling(config, ModelConfig(name="org/m", rope_scaling=scaling or None))


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_positions_and_frequencies_are_those_of_transformers(kind):
    plain = LlamaConfig(**SIZES)
    found = scaled(plain, rope_type=kind, factor=4)
    original = {"original_max_position_embeddings": 256} if kind == "yarn" else {}
    theirs = LlamaConfig(
        **{**SIZES, "max_position_embeddings": 1024},
        rope_parameters={"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0, **original},
    )
    assert found.rope_parameters == theirs.rope_parameters and position_limit(found) == 1024
    frequencies, attention = ROPE_INIT_FUNCTIONS[kind](found)
    assert torch.equal(frequencies, ROPE_INIT_FUNCTIONS[kind](theirs)[0]) and attention >= 1
    assert (
        position_limit(plain) == 256 and plain.rope_parameters["rope_type"] == "default"
    )  # a copy was changed


def test_the_positions_that_yarn_multiplies_may_be_fewer_than_those_of_the_model():
    found = scaled(Qwen3Config(**SIZES), rope_type="yarn", factor=4, original_max_position_embeddings=128)
    assert position_limit(found) == 512
    assert found.rope_parameters["original_max_position_embeddings"] == 128


def test_layers_with_a_window_keep_their_positions():
    config = Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, head_dim=16, sliding_window=64)
    found = scaled(config, rope_type="linear", factor=8)
    kinds = {kind: (rope["rope_type"], rope.get("factor")) for kind, rope in found.rope_parameters.items()}
    assert kinds == {"sliding_attention": ("default", None), "full_attention": ("linear", 8.0)}
    assert position_limit(found) == 2048


def test_a_model_that_is_scaled_already_keeps_its_kind_and_gets_another_factor():
    llama3 = CONFIGS["llama3"]()
    found = scaled(llama3, rope_type="llama3", factor=16)
    assert found.rope_parameters == llama3.rope_parameters | {"factor": 16.0}
    assert position_limit(found) == 2 * position_limit(llama3)


@pytest.mark.parametrize(
    ("config", "scaling", "said"),
    [
        (CONFIGS["llama3"], YARN, r"rope_type=llama3, which yarn would replace; \{rope_type: llama3, factor: 16\} gives"),
        (CONFIGS["llama3"], {"rope_type": "llama3", "factor": 8}, "has factor 8 already, for its 256 positions"),
        (CONFIGS["llama"], {"rope_type": "llama3", "factor": 8}, "use yarn or linear"),
        (lambda: GPT2Config(), YARN, "gpt2 has no rotary positions"),
        (
            lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            YARN, "rope_type=dynamic, which yarn would replace; leave it out",
        ),
        (CONFIGS["llama"], {"rope_type": "linear", "factor": 2, "original_max_position_embeddings": 9}, "applies only to yarn"),
    ],
)  # fmt: skip
def test_what_would_break_a_model_is_refused(config, scaling, said):
    with pytest.raises(ConfigError, match=said) as raised:
        scaled(config(), **scaling)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2}, "loss of a row would depend on those beside it"),
        ({"rope_type": "yarn", "factor": 1}, "greater than 1"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "longrope", "factor": 2}, "yarn"),
    ],
)
def test_settings_that_make_no_sense_are_refused(scaling, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(name="m", rope_scaling=scaling)


def test_rows_may_be_as_long_as_the_scaled_positions(tiny_model):
    plain, longer = ModelConfig(name=str(tiny_model)), ModelConfig(name=str(tiny_model), rope_scaling=YARN)
    tokenizer, positions = load_tokenizer(plain), position_limit(load_model_config(plain))
    assert (
        position_limit(load_model_config(longer))
        == position_limit(planning_config(longer)[0])
        == 4 * positions
    )
    asked = longer.model_copy(update={"max_seq_len": 3 * positions})
    assert length_limit(asked, tokenizer, 4 * positions) == 3 * positions
    with pytest.raises(ConfigError, match=rf"exceeds the {positions} positions .*rope_scaling"):
        length_limit(plain.model_copy(update={"max_seq_len": 3 * positions}), tokenizer, positions)


def test_memory_of_a_scaled_model_is_that_of_the_plain_one():
    config, spec = LlamaConfig(**SIZES), StepSpec(mode="lora")
    plain, longer = (trace_step(each, spec).step.peaks() for each in (config, scaled(config, **YARN)))
    assert {phase: peak.bytes for phase, peak in plain.items()} == {
        p: peak.bytes for p, peak in longer.items()
    }


def logits(model, tokens: int = 300):
    ids = torch.arange(tokens)[None] % 50 + 3
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def run(tiny_model, tmp_path) -> FinishedRun:
    """A LoRA run of a scaled model, whose adapter changes every layer."""
    plain = random_run(tiny_model, tmp_path)
    model = plain.config.model.model_copy(
        update={"rope_scaling": ModelConfig(name="m", rope_scaling=YARN).rope_scaling}
    )
    return FinishedRun(plain.config.model_copy(update={"model": model}), plain.run)


def test_adapter_and_merged_model_compute_with_the_same_positions(run):
    base = AutoModelForCausalLM.from_pretrained(
        run.config.model.name, config=load_model_config(run.config.model)
    )
    expected = logits(PeftModel.from_pretrained(base, run.run.adapter))
    plain = AutoModelForCausalLM.from_pretrained(run.config.model.name)
    unscaled = logits(PeftModel.from_pretrained(plain, run.run.adapter))
    assert (unscaled - expected).abs().max() > 1e-3
    loaded = load_for_inference(run.config, run.run.adapter, dtype="float32")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    merge(run.config, run.run)
    merged = AutoModelForCausalLM.from_pretrained(run.run.merged, dtype="float32")
    assert position_limit(merged.config) == 4 * position_limit(plain.config)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    assert gguf_family(merged.config).name == "llama"


def test_a_model_that_was_trained_whole_says_its_positions_itself(run, tmp_path):
    model = load_base(
        run.config.model, dtype="float32", attn_implementation="sdpa", device="cpu", quantize=False
    )
    model.save_pretrained(tmp_path / "model")
    full = run.config.model_copy(update={"tuning": run.config.tuning.model_copy(update={"mode": "full"})})
    loaded = load_for_inference(full, tmp_path / "model", dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert loaded.config.rope_parameters["rope_type"] == "yarn"


def test_what_llama_cpp_computes_otherwise_is_not_exported():
    yarn = CONFIGS["qwen3"]()
    yarn.rope_parameters |= YARN | {"original_max_position_embeddings": 64}
    assert gguf_family(yarn).name == "qwen3"
    yarn.rope_parameters["attention_factor"] = 2.0
    with pytest.raises(ConfigError, match="computes attention_factor of rope_type yarn by itself"):
        gguf_family(yarn)
    with pytest.raises(ConfigError, match="layers with a window"):
        gguf_family(scaled(CONFIGS["gemma3"](), **YARN))

"""A model that sees is trained on text: what sees stays as it was, to the byte, and transformers loads the whole."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from sft_play.commands.merge import merge
from sft_play.config.schema import ModelConfig
from sft_play.errors import ConfigError
from sft_play.export.architecture import gguf_family
from sft_play.export.weights import opened, stored_tensors
from sft_play.model.load import load_model_config
from sft_play.train.run import train
from tests.jobs import losses, make_job
from tests.vision_models import TREES, checkpoint, config_of

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = sorted(TREES.keys() - {"mllama"})
ALWAYS = {("smolvlm", "lora"), ("qwen3_5", "full")}
CASES = [
    pytest.param(kind, mode, marks=[] if (kind, mode) in ALWAYS else pytest.mark.thorough)
    for kind in KINDS
    for mode in ("lora", "full")
]


def saved(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def is_text(name):
    return "language_model." in name or "text_model." in name or name.startswith("lm_head.")


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_text_is_trained_and_what_sees_is_not_touched(kind, mode, tiny_model, tmp_path):
    base = checkpoint(kind, tmp_path / kind, tiny_model, torch.bfloat16)
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    padding_free = kind != "qwen3_5"  # whose linear attention would carry its state into the next row
    job = make_job(base, tmp_path / "runs", "run", mode=mode, max_steps=3, padding_free=padding_free)
    train(job)
    output = job.run.model
    if mode == "lora":
        merge(job.config, job.run)
        output = job.run.merged
    before, after = saved(base), saved(output)
    assert before.keys() == after.keys()
    assert (output / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {after[name].dtype for name in after} == {torch.bfloat16}
    assert changed and all(map(is_text, changed))
    assert len([name for name in before if not is_text(name)]) > 20  # there is a tower
    _, info = AutoModelForImageTextToText.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_accumulation_does_not_change_the_loss_of_a_model_that_sees(kind, tiny_model, tmp_path):
    """Their classes in transformers say `accepts_loss_kwargs = False`, which is about their own loss."""
    base, curves = checkpoint(kind, tmp_path / kind, tiny_model), []
    for rows in (16, 4):
        job = make_job(base, tmp_path / "runs", str(rows), mode="full", max_steps=2, batch_size=rows)
        assert job.plan.batch.accumulation == 16 // rows
        train(job)
        curves.append(losses(job))
    for whole, parts in zip(*curves, strict=True):
        assert parts == pytest.approx(whole, rel=1e-5)


def test_a_model_that_attends_to_images_in_layers_of_their_own_is_refused_in_words(tiny_model, tmp_path):
    base = checkpoint("mllama", tmp_path / "mllama", tiny_model)
    with pytest.raises(ConfigError, match="mllama has layers that run only where there is an image"):
        load_model_config(ModelConfig(name=str(base)))


def test_of_what_llama_cpp_runs_the_text_part_is_exported(tiny_model, tmp_path):
    """Gemma 3 and SmolVLM; the Qwen models are refused by name."""
    base = checkpoint("smolvlm", tmp_path / "smolvlm", tiny_model)
    config = load_model_config(ModelConfig(name=str(base)))
    with opened(base) as folder:
        found = stored_tensors(folder, gguf_family(config), config.get_text_config(), "f32")
        assert {tensor.source for tensor in found} == {name for name in folder if is_text(name)}
    for kind in ("qwen3_vl", "qwen3_5"):
        with pytest.raises(ConfigError, match=f"models of type {kind}_text cannot be exported"):
            gguf_family(config_of(kind))

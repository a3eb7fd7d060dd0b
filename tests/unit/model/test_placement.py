"""What fits one GPU stays on it; what does not is spread, and computes the same."""

import shutil

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from sft_play.config.schema import ModelConfig
from sft_play.errors import DoesNotFitError
from sft_play.model.adapters.attach import load_adapter
from sft_play.model.build import load_base
from sft_play.model.layers.loss_head import add_loss_head, score_batch
from sft_play.model.layers.own_passes import replace_forwards
from sft_play.model.load import empty_base
from sft_play.model.placement import SPREAD, compute_head_in_ram, place, spread_text, weight_bytes
from sft_play.units import GIB
from tests.unit.finished_run import random_run

FIRST = torch.device("cuda", 0)
IDS = torch.arange(3, 60)[None]


@pytest.mark.parametrize(
    ("weights", "gpus", "ram", "quantized", "expected"),
    [
        (24, [24], 0, False, FIRST),
        (24, [24, 80], 500, True, FIRST),
        (25, [24, 24], 0, False, SPREAD),
        (25, [24, 24], 500, True, SPREAD),
        (25, [24], 1, False, SPREAD),
        (25, [None, 24], 500, False, FIRST),
        (25, [24], None, False, FIRST),
    ],
)
def test_only_what_does_not_fit_the_first_gpu_is_spread(weights, gpus, ram, quantized, expected):
    free = [one if one is None else one * GIB for one in gpus]
    ram = ram if ram is None else ram * GIB
    assert place(weights * GIB, free, ram, quantized=quantized) == expected


@pytest.mark.parametrize(
    ("ram", "quantized", "found"),
    [
        (10, False, "need 60.00 GiB, but only 48.00 GiB on 2 GPUs and 10.00 GiB of RAM are free; free more"),
        (500, True, "need 60.00 GiB, but only 48.00 GiB on 2 GPUs are free; free more"),
    ],
)
def test_what_fits_nowhere_is_refused_with_the_numbers(ram, quantized, found):
    with pytest.raises(DoesNotFitError, match=found):
        place(60 * GIB, [24 * GIB, 24 * GIB], ram * GIB, quantized=quantized)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_weights_are_counted_as_they_are_loaded(tiny_model, dtype, quantize):
    model = ModelConfig(name=str(tiny_model))
    loaded = load_base(
        model, dtype=dtype, attn_implementation="eager", device=torch.device("cpu"), quantize=quantize
    )
    expected = sum(tensor.nbytes for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert weight_bytes(empty_base(model, dtype=getattr(torch, dtype)), quantize=quantize) == expected


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"embed": 0, "layers.0": 0, "layers.1": 1, "layers.10": 1, "head": 1}, "spread over 2 GPUs"),
        (
            {"embed": 0, "layers.0": 0, "layers.1.mlp": 0, "layers.1.attention": "cpu", "layers.10": "cpu"},
            "spread over 1 GPU; 2 of 3 layers stay in RAM: slow",
        ),
        ({"embed": 0, "layers": "cpu"}, "spread over 1 GPU; 3 of 3 layers stay in RAM: slow"),
    ],
)
def test_it_is_said_where_layers_are(places, text):
    assert spread_text(places, ["layers.0", "layers.1", "layers.10"]) == text


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def score(model):
    return score_batch(model, {"input_ids": IDS, "labels": IDS})


@pytest.fixture
def run(tiny_model, tmp_path):
    """A run on a model whose norms do something: left out, they are noticed."""
    shutil.copytree(tiny_model, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1, 0.3)
    model.save_pretrained(tmp_path / "base")
    return random_run(tmp_path / "base", tmp_path)


def plain(run):
    return load_base(
        run.config.model, dtype="float32", attn_implementation="eager", device=torch.device("cpu"),
        quantize=False,
    )  # fmt: skip


def test_a_model_whose_weights_come_at_each_pass_computes_the_same(run):
    """As from RAM to a GPU, with the CPU as both."""
    spread = AutoModelForCausalLM.from_pretrained(run.config.model.name, attn_implementation="eager")
    cpu_offload(spread, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in spread.parameters())
    replace_forwards(spread)
    compute_head_in_ram(spread)
    expected = plain(run)
    assert torch.equal(logits(spread), logits(expected))
    for model in (spread, expected):
        add_loss_head(model)
    assert torch.equal(score(spread), score(expected))


def test_an_adapter_leaves_a_spread_model_where_it_is(run, tmp_path, monkeypatch):
    """With the disk for RAM and RAM for the GPU."""
    monkeypatch.chdir(tmp_path)  # where PEFT leaves files if layers are on the disk
    places = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.embed_tokens": "cpu", "lm_head": "cpu",
              "model.norm": "cpu", "model.rotary_emb": "cpu"}  # fmt: skip
    spread = AutoModelForCausalLM.from_pretrained(
        run.config.model.name, attn_implementation="eager", device_map=places, offload_folder=str(tmp_path)
    )
    replace_forwards(spread)
    adapted = load_adapter(spread, run.run.adapter)
    assert torch.equal(logits(adapted), logits(load_adapter(plain(run), run.run.adapter)))
    stayed = {name.removeprefix("base_model.model."): at for name, at in adapted.hf_device_map.items()}
    assert stayed == places

"""What becomes of activations changes no gradient, whichever layers are recomputed and from where."""

import pytest
import torch

from benchmarks.random_models import random_model
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.model import recomputation
from sft_play.model.architecture import decoder_layers
from sft_play.model.loss_head import add_loss_head
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace import forward, make_batch

SMALL = WIDE | {"layers": 4, "vocabulary": 300}


def gradients(name, spec, **how):
    """Of all that is trained, and how often tensors were brought back from RAM."""
    torch.manual_seed(0)
    dropout = 0.0 if name == "qwen3_moe" else 0.1  # which fused experts do not allow
    tuning = TuningConfig(
        mode=spec.mode, **({} if spec.mode == "full" else {"lora": {"r": 4, "dropout": dropout}})
    )
    model = random_model(small_config(name, SMALL), spec, tuning, torch.device("cpu"))
    add_loss_head(model)
    if how:
        recomputation.recompute(model, **how)
        if spec.mode != "full":
            model.enable_input_require_grads()
    base = model.get_base_model() if spec.mode != "full" else model
    recomputed = [layer.gradient_checkpointing for layer in decoder_layers(base)[2]]
    kept = how.get("kept_layers", 0) if how else 4
    assert recomputed == [True] * (4 - kept) + [False] * kept
    model.train()
    torch.manual_seed(1)
    forward(model, make_batch(spec), spec).backward()
    return {path: p.grad for path, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("batch", [PaddedRows(2, 48), JoinedRows(96)])
def test_no_gradient_depends_on_what_is_recomputed(name, mode, batch):
    spec = StepSpec(mode=mode, batch=batch, longest=48, lora=LoraSettings(r=4))
    expected = gradients(name, spec)
    for how in (dict(kept_layers=0), dict(kept_layers=1), dict(kept_layers=3), dict(offload=True)):
        found = gradients(name, spec, **how)
        assert found.keys() == expected.keys() and len(found) > 8
        assert all(torch.equal(found[path], expected[path]) for path in expected), how


def test_each_layer_brings_its_input_back_from_ram_once(monkeypatch):
    brought = []

    class Counted(recomputation.save_on_cpu):
        def __init__(self, **settings):
            assert settings == {"pin_memory": True}
            super().__init__(**settings)
            unpack = self.unpack_hook
            self.unpack_hook = lambda packed: brought.append(packed[1].shape) or unpack(packed)

    monkeypatch.setattr(recomputation, "save_on_cpu", Counted)
    spec = StepSpec(mode="full", batch=PaddedRows(2, 48))
    gradients("llama", spec, offload=True)
    assert brought == [torch.Size([2, 48, 256])] * 4

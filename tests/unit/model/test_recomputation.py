"""What becomes of activations changes no gradient, whichever layers are recomputed and from where."""

import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch

from benchmarks.random_models import random_model
from benchmarks.small_models import WIDE, small_config
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.model.architecture.shape import decoder_layers
from sft_play.model.layers import inputs_in_ram, recomputation
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.parts import RECOMPUTED, Activations
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import forward, make_batch

KEPT = Activations()
SMALL = WIDE | {"layers": 4, "vocabulary": 300}


def gradients(name, spec, how=KEPT):
    """Of all that is trained, and how often tensors were brought back from RAM."""
    torch.manual_seed(0)
    dropout = 0.0 if name == "qwen3_moe" else 0.1  # which fused experts do not allow
    tuning = TuningConfig(
        mode=spec.mode, **({} if spec.mode == "full" else {"lora": {"r": 4, "dropout": dropout}})
    )
    model = random_model(small_config(name, SMALL), spec, tuning, torch.device("cpu"))
    add_loss_head(model)
    if how.recomputes:
        recomputation.recompute(model, how)
        if spec.mode != "full":
            model.enable_input_require_grads()
    base = model.get_base_model() if spec.mode != "full" else model
    recomputed = [layer.gradient_checkpointing for layer in decoder_layers(base)[2]]
    kept = how.apart if how.recomputes else 4
    assert recomputed == [True] * (4 - kept) + [False] * kept
    model.train()
    torch.manual_seed(1)
    forward(model, make_batch(spec), spec).backward()
    return {path: p.grad for path, p in model.named_parameters() if p.grad is not None}


PADDED, JOINED = PaddedRows(2, 48), JoinedRows(96)
# Each two of model, mode and batch come together in one.
PAIRS = [
    ("llama", "lora", PADDED), ("qwen3_moe", "full", PADDED), ("gemma3_text", "lora", PADDED),
    ("llama", "full", JOINED), ("qwen3_moe", "lora", JOINED), ("gemma3_text", "full", JOINED),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mode", "batch"),
    [
        case if case in PAIRS else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(("llama", "gemma3_text", "qwen3_moe"), ("full", "lora"), (PADDED, JOINED))
    ],
)
def test_no_gradient_depends_on_what_is_recomputed(name, mode, batch):
    spec = StepSpec(mode=mode, batch=batch, longest=48, lora=LoraSettings(r=4))
    expected = gradients(name, spec)
    ways = (RECOMPUTED, RECOMPUTED.with_apart(1), RECOMPUTED.with_apart(3), Activations(policy="offload"))
    for how in ways:
        found = gradients(name, spec, how)
        assert found.keys() == expected.keys() and len(found) > 8
        assert all(torch.equal(found[path], expected[path]) for path in expected), how


class LateLink:
    """A link as slow as may be: each copy is made when the computation waits for it, and is NaN before that.

    What it copies from has to be there until then.
    """

    def __init__(self):
        self.said = []
        self.ahead = self.most_ahead = 0

    def link(self, device):
        return inputs_in_ram.Link(partial(self.begin, "to RAM"), partial(self.begin, "back"))

    def begin(self, way, tensor):
        self.said.append(way)
        target, source = torch.full_like(tensor, torch.nan), weakref.ref(tensor)
        back = way == "back"
        self.ahead += back
        self.most_ahead = max(self.most_ahead, self.ahead)

        def wait():
            self.said.append(f"waited for {way}")
            self.ahead -= back
            target.copy_(source())

        return inputs_in_ram.Arrival(target, wait)


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("batch", [PaddedRows(2, 48), JoinedRows(96)])
def test_inputs_are_waited_for_and_come_back_one_layer_ahead(monkeypatch, mode, batch):
    spec = StepSpec(mode=mode, batch=batch, longest=48, lora=LoraSettings(r=4))
    expected, slow = gradients("llama", spec), LateLink()
    monkeypatch.setattr(inputs_in_ram, "link_to", slow.link)
    found = gradients("llama", spec, Activations(policy="offload"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[path], expected[path]) for path in expected)
    forward_pass = ["to RAM", "waited for to RAM"] * 4
    ahead = ["back", "back", "waited for back", *["back", "waited for back"] * 2, "waited for back"]
    assert slow.said == forward_pass + ahead
    assert slow.most_ahead == 2


def test_a_failed_pass_gives_no_memory_to_others_before_its_copies_are_complete(monkeypatch):
    """What is fetched ahead would be written to whoever has its memory then."""
    slow, copier, calls = LateLink(), inputs_in_ram.InputsInRam(), []
    monkeypatch.setattr(inputs_in_ram, "link_to", slow.link)

    def fails_again(values):
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("out of memory")
        return values.sin()

    values = torch.ones(3, requires_grad=True)
    result = copier.checkpoint(fails_again, copier.checkpoint(torch.exp, values))
    with pytest.raises(RuntimeError, match="out of memory"):
        result.sum().backward()
    assert slow.ahead == 1
    del result
    gc.collect()  # the error's frames hold the graph
    assert slow.ahead == 0
    with pytest.raises(RuntimeError, match="out of memory"):
        copier.checkpoint(fails_again, values)
    assert slow.said.count("to RAM") == slow.said.count("waited for to RAM") == 3


def test_what_a_failed_pass_left_in_ram_is_gone_with_its_graph():
    """So a batch that ran out of memory, and is tried again in parts, leaves nothing behind."""
    copier, kept = inputs_in_ram.InputsInRam(), []
    values = torch.ones(3, requires_grad=True)
    result = copier.checkpoint(torch.sin, copier.checkpoint(torch.exp, values))
    kept.append(copier._last())
    assert kept.pop() is not None
    del result
    assert copier._last() is None
    copier.checkpoint(torch.cos, values).sum().backward()
    assert torch.equal(values.grad, -torch.sin(torch.ones(3)))

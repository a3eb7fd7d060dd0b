"""The output head of the CPU gives the loss and the gradients of full logits."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM
from trl import kernels
from trl.trainer.utils import add_fused_lm_head

from benchmarks.miniatures import miniature
from benchmarks.small_models import WIDE, small_config
from sft_play.model.layers.cpu import TILE, TiledLogProbs
from sft_play.model.layers.loss_head import LogProbs, add_loss_head, token_loss
from sft_play.parts import IGNORED
from tests.rounding import assert_same_tensor, forward_terms, step_terms, summed

HIDDEN, VOCABULARY = 24, 57
SETTINGS = (1.0, 32768, None, 1.0, ("log_probs", "is_top1"))  # temperature to outputs


def leaves(tokens: int, dtype=torch.float32):
    torch.manual_seed(tokens)
    shapes = ((tokens, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return tensors, torch.randint(0, VOCABULARY, (tokens,))


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors)


def scored(tensors, targets, *, softcap=None, scale=1.0):
    return TiledLogProbs.apply(*tensors, targets, 1.0, 32768, softcap, scale, SETTINGS[-1])


@pytest.mark.parametrize("tokens", [1, TILE, 2 * TILE + 5])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.5), (20.0, 1.0)])
def test_loss_and_gradients_are_those_of_full_logits(tokens, softcap, scale):
    tensors, targets = leaves(tokens)
    logits = linear(*tensors) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = cross_entropy(logits, targets, reduction="none")
    found = -scored(tensors, targets, softcap=softcap, scale=scale)[0]
    near = summed(2 * (HIDDEN + VOCABULARY) + tokens)  # logits, softmax, and both ways back
    assert_same_tensor(found, expected, near)
    for ours, theirs in zip(
        gradients(found.sum() / 7, tensors), gradients(expected.sum() / 7, tensors), strict=True
    ):
        assert_same_tensor(ours, theirs, near)


def test_frozen_weights_get_no_gradient_and_sixteen_bits_stay():
    (hidden, weight, _), targets = leaves(TILE + 3, torch.bfloat16)
    weight = weight.detach()
    loss = -scored((hidden, weight, None), targets)[0].sum()
    expected = cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    (ours,), (theirs,) = gradients(loss, [hidden]), gradients(expected, [hidden])
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)


def test_without_gradients_it_says_which_targets_rank_first():
    tensors, targets = leaves(TILE + 9)
    best = linear(*tensors).argmax(-1)
    targets[::2] = best[::2]
    with torch.no_grad():
        ranks_first = LogProbs.apply(tensors[0].detach(), *tensors[1:], targets, *SETTINGS)[4]
    assert torch.equal(ranks_first, best == targets)
    assert scored(tensors, targets)[4] is None  # a training step does not ask


def test_a_batch_without_targets_is_no_error():
    tensors, targets = leaves(0)
    for gradient in gradients(scored(tensors, targets)[0].sum(), tensors):
        assert not gradient.any()


@pytest.mark.parametrize("name", ["llama", "gpt2", "granite", "mistral"])
def test_a_model_has_the_loss_that_it_would_have_without(name):
    """Granite scales its logits; GPT-2 ties its head to its embedding."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(name, WIDE | {"layers": 2}))
    ids = torch.randint(3, 1000, (2, 200))
    labels = torch.where(torch.rand(2, 200) < 0.3, IGNORED, ids)
    batch = {"input_ids": ids, "labels": labels}
    expected = model(**batch, num_items_in_batch=torch.tensor(123)).loss
    expected.backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    add_loss_head(model)
    loss = token_loss(model, batch, torch.tensor(123))
    loss.backward()
    near = summed(step_terms(model, tokens=ids.numel()))
    assert_same_tensor(loss, expected, near)
    assert_same_tensor(model.get_input_embeddings().weight.grad, gradient, near)


def test_the_loss_that_balances_experts_is_added_with_its_weight():
    torch.manual_seed(0)
    config = small_config("mixtral", WIDE | {"layers": 2}, output_router_logits=True)
    model = AutoModelForCausalLM.from_config(config)
    add_loss_head(model)
    ids = torch.randint(3, 1000, (2, 20))
    batch = {"input_ids": ids, "labels": ids}
    plain, balanced = (token_loss(model, batch, router_weight=weight).item() for weight in (0.0, 0.1))
    assert balanced - plain == pytest.approx(0.1 * model(**batch).aux_loss.item(), rel=1e-3)


def test_trl_keeps_its_own_kernel():
    """Beside ours in one process: its trainers log the entropy, which our kernel leaves out."""
    model = AutoModelForCausalLM.from_config(small_config("llama", WIDE | {"layers": 1}))
    add_loss_head(model)
    ids = torch.randint(3, 1000, (1, 9))
    assert model(input_ids=ids, labels=ids, fused_lm_head=True).entropy is None
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert model(input_ids=ids, labels=ids, fused_lm_head=True).entropy.shape == (1, 8)


@pytest.mark.parametrize(("family", "balanced"), [("doge", False), ("qwen3_moe", True), ("jetmoe", True)])
def test_only_a_model_with_routers_balances_them(family, balanced):
    model = AutoModelForCausalLM.from_config(miniature(family))
    model.config.output_router_logits = True  # as TRL sets it
    add_loss_head(model)
    ids = torch.arange(7, 23)[None]
    batch = {"input_ids": ids, "labels": ids}

    plain, weighted = (token_loss(model, batch, router_weight=weight) for weight in (0.0, 1.0))

    assert (plain != weighted) == balanced


def test_logits_that_are_capped_by_another_name_are_capped():
    config = miniature("xlstm")
    config.output_logit_soft_cap = 0.5
    model = AutoModelForCausalLM.from_config(config).eval()
    add_loss_head(model)
    ids = torch.arange(7, 23)[None]

    with torch.no_grad():
        own = (
            model(input_ids=ids, use_cache=False)
            .logits[:, :-1]
            .log_softmax(-1)
            .gather(-1, ids[:, 1:, None])[..., 0]
        )
        tiled = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).log_probs

    assert_same_tensor(tiled, own, summed(forward_terms(model, tokens=16) + config.vocab_size))


def test_a_gpu_scores_on_the_device_of_the_output_head(monkeypatch):
    """Of a model that is spread over several GPUs, it is on the last, and the current one is the first."""
    (hidden, weight, bias), targets = leaves(3)
    current = []
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: current.append(device) or 0)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", current.append)
    monkeypatch.setattr(kernels, "ChunkedLogProbFunction", SimpleNamespace(apply=lambda *_: tuple(current)))
    hidden = OnSecondGpu(hidden.detach())
    assert LogProbs.apply(hidden, weight, bias, targets, *SETTINGS) == (1,) and current == [1, 0]


class OnSecondGpu(torch.Tensor):
    """A tensor of the CPU that is said to be on cuda:1."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1

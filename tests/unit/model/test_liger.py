"""Liger's kernels compute what ours do, and allocate what the trace says; by Triton's interpreter."""

from collections import Counter

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from benchmarks.miniatures import miniature
from benchmarks.random_models import random_base
from benchmarks.small_models import TALL, small_config
from sft_play.choices.kernels import LIGER
from sft_play.errors import ConfigError
from sft_play.model.build import build_model
from sft_play.model.layers import liger, own_passes
from sft_play.sizing.facts.model_facts import module_facts
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.upstream.patching import patched
from tests.jobs import make_job
from tests.plans import plan_with
from tests.triton import interpreted, needs_triton

TOKENS, HEADS, GROUPS = 5, 4, 2
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
# of the largest value: bf16 has eight binary digits, and norms and sums round a few times
NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.03}
TYPES = pytest.mark.parametrize("dtype", NEAR, ids=str)


def norm_inputs(size, dtype):
    return [torch.randn(1, TOKENS, size, dtype=dtype), torch.randn(size, dtype=dtype)]


def heads_of(size, dtype):
    """Queries and keys as projections leave them, and the angles that transformers computes."""
    angles = torch.randn(1, TOKENS, size // 2, dtype=torch.float32).repeat(1, 1, 2)
    q, k = (torch.randn(1, TOKENS, count, size, dtype=dtype) for count in (HEADS, GROUPS))
    return [q, k], [angles.cos().to(dtype), angles.sin().to(dtype)]


def outcome(compute, inputs):
    """Results and gradients; what is trained lies before the function, as in a model."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    found = compute(*(leaf * 1 for leaf in leaves))
    found = found if isinstance(found, tuple) else (found,)
    # taken before the backward pass, in which a kernel may change them
    values = [each.detach().clone() for each in found]
    sum(
        (each * torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype)).sum() for each in found
    ).backward()
    return values + [leaf.grad for leaf in leaves]


def assert_near(theirs, ours, dtype):
    for their, our in zip(theirs, ours, strict=True):
        assert their.dtype == our.dtype
        assert (their - our).float().abs().max() <= NEAR[dtype] * our.float().abs().max()


@needs_triton
@TYPES
@pytest.mark.parametrize("size", (*HEAD_SIZES, 576))
def test_norms_are_ours(size, dtype):
    torch.manual_seed(size)
    inputs = norm_inputs(size, dtype)
    with interpreted():
        theirs = outcome(lambda x, weight: liger.norm(x, weight, 1e-6), inputs)
    assert_near(theirs, outcome(lambda x, weight: own_passes.RMSNorm.apply(x, weight, 1e-6), inputs), dtype)


@needs_triton
@TYPES
@pytest.mark.parametrize("size", (*HEAD_SIZES, 576))
def test_norms_with_an_offset_are_those_of_gemma(size, dtype):
    torch.manual_seed(size)
    inputs = norm_inputs(size, dtype)
    gemma = GemmaRMSNorm(size)
    with interpreted():
        theirs = outcome(lambda x, weight: liger.norm(x, weight, gemma.eps, 1.0), inputs)

    def plain(x, weight):
        gemma._parameters["weight"] = weight
        return gemma(x)

    assert_near(theirs, outcome(plain, inputs), dtype)


@needs_triton
@TYPES
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_rotations_are_ours(size, dtype):
    torch.manual_seed(size)
    heads, angles = heads_of(size, dtype)

    def rotation(rotate):
        return lambda q, k: rotate(q.transpose(1, 2), k.transpose(1, 2), *angles)

    with interpreted():
        theirs = outcome(rotation(liger.rotated), heads)
    assert_near(theirs, outcome(rotation(own_passes.rotated), heads), dtype)


@needs_triton
@TYPES
@pytest.mark.parametrize("size", (64, 176, 320))
@pytest.mark.parametrize(("kernel", "act"), [("gated", "silu"), ("gelu_gated", "gelu_pytorch_tanh")])
def test_gated_products_are_those_of_pytorch(kernel, act, size, dtype):
    torch.manual_seed(size)
    inputs = [torch.randn(1, TOKENS, size, dtype=dtype) for _ in range(2)]
    with interpreted():
        theirs = outcome(getattr(liger, kernel), inputs)
    assert_near(theirs, outcome(lambda gate, up: ACT2FN[act](gate) * up, inputs), dtype)


def step(config, kernels, checkpointing=False):
    """Loss and gradients of a small model with random weights, norms included."""
    torch.manual_seed(0)
    model = random_base(
        config, dtype="float32", attn_implementation="sdpa", device=torch.device("cpu"), quantize=False,
        kernels=kernels,
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1, 0.3)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(18).view(2, 9) * 5
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@needs_triton
@pytest.mark.parametrize("checkpointing", (False, True), ids=("kept", "recomputed"))
@pytest.mark.parametrize(
    "family", ("llama", "qwen3", "glm4", "exaone4", "deepseek_v3", "phi3", "gemma3_text")
)
def test_a_step_is_the_same(family, checkpointing):
    """Also behind residual sums (glm4, exaone4), and where parts of heads are rotated."""
    config = small_config(family, TALL | {"layers": 2, "vocabulary": 100})
    loss, gradients = step(config, "own")
    with interpreted():
        their_loss, theirs = step(config, "liger", checkpointing)
    assert float(their_loss) == pytest.approx(float(loss), rel=1e-5)
    assert (theirs - gradients).norm() <= 1e-4 * gradients.norm()


def allocated(compute, inputs, frozen):
    """Sizes of all blocks in order, bytes that live after the forward and the backward pass, and the most.

    Nothing but what is computed keeps a tensor, so that what a function holds for its gradient shows.
    """
    recorder = AllocationRecorder()
    leaves = [each.clone().requires_grad_(place not in frozen) for place, each in enumerate(inputs)]
    with recorder:
        found = compute(*(leaf * 1 for leaf in leaves))
        kept = recorder.live
        recorder.begin("backward")
        found = found if isinstance(found, tuple) else (found,)
        grads = [torch.empty_like(each) for each in found]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(found, trained, grads)
        del found, grads
    assert len(gradients) == len(trained)
    return recorder.sizes, kept, recorder.live, recorder.peak


def _normed(function):
    return lambda x, weight: function(x, weight, 1e-6)


def _rotated(function, angles, *, projected):
    """With angles that nobody else keeps; heads as projections leave them, or already behind one another."""

    def compute(*heads):
        heads = [each.transpose(1, 2) for each in heads]
        heads = heads if projected else [each.contiguous() for each in heads]
        return function(*heads, *(each * 1 for each in angles))

    return compute


@needs_triton
@TYPES
def test_stand_ins_allocate_what_the_kernels_do(dtype):
    """Liger's functions allocate on a CPU what they do on a GPU but for its multiprocessors.

    Kernels are not launched: they allocate nothing, and the interpreter keeps their arguments for a while.
    """
    from triton.runtime.interpreter import GridExecutor

    (heads, angles), normed = heads_of(64, dtype), norm_inputs(512, dtype)
    wide = [each.float() for each in angles]
    norms, rotations, gates, gelu_gates = (
        [getattr(liger, name), stand_in] for name, stand_in in liger.STAND_INS.items()
    )
    cases = {
        "norm": (norms, normed, (), _normed),
        "norm of a frozen weight": (norms, normed, (1,), _normed),
        "norm of an fp32 weight": (norms, [normed[0], normed[1].float()], (), _normed),
        "norm of transposed heads": (norms, [heads[0], torch.randn(64, dtype=dtype)], (),
                                     lambda f: lambda x, w: f(x.transpose(1, 2), w, 1e-6)),
        "norm with an offset": (norms, normed, (), lambda f: lambda x, w: f(x, w, 1e-6, 1.0)),
        "rotate": (rotations, heads, (), lambda f: _rotated(f, angles, projected=True)),
        "rotate by fp32 angles": (rotations, heads, (), lambda f: _rotated(f, wide, projected=True)),
        "rotate copies": (rotations, heads, (), lambda f: _rotated(f, angles, projected=False)),
        "rotate frozen keys": (rotations, heads, (1,), lambda f: _rotated(f, angles, projected=True)),
        "gated": (gates, [normed[0], normed[0]], (), lambda f: f),
        "gated, a frozen gate": (gates, [normed[0], normed[0]], (0,), lambda f: f),
        "gated by GELU": (gelu_gates, [normed[0], normed[0]], (), lambda f: f),
        "gated halves by GELU": (gelu_gates, [normed[0]], (), lambda f: lambda x: f(*x.chunk(2, dim=-1))),
        "gated halves": (gates, [normed[0]], (), lambda f: lambda x: f(*x.chunk(2, dim=-1))),
    }  # fmt: skip
    for name, ((kernel, stand_in), inputs, frozen, call) in cases.items():
        with (
            patched(GridExecutor, "__call__", lambda *args, **kwargs: None),
            patched(liger, "MULTIPROCESSORS", 1),
        ):
            found, expected = (allocated(call(each), inputs, frozen) for each in (stand_in, kernel))
        assert found == expected, name


@pytest.mark.parametrize("name", LIGER.examples)
def test_named_architectures_have_modules_that_are_replaced(name):
    assert module_facts(miniature(name)).served["liger"] > 0


def test_an_architecture_without_such_modules_is_refused():
    with pytest.raises(
        ConfigError, match=r"like those of llama, mistral.*, and gpt2 has none; allowed for it: auto, own"
    ):
        LIGER.require_modules("gpt2", module_facts(miniature("gpt2")).served["liger"])


def test_what_cannot_run_is_refused_with_what_can():
    with pytest.raises(ConfigError, match=r"7.0 or newer, .*, but this is the CPU; set train.kernels=auto"):
        LIGER.require_runnable("cpu", None, here=True)
    with pytest.raises(ConfigError, match=r"this is a GPU \(6\.1\)"):
        LIGER.require_runnable("cuda", (6, 1), here=False)
    LIGER.require_runnable("cuda", (8, 0), here=False)
    LIGER.require_runnable("cuda", None, here=False)


@needs_triton
@pytest.mark.parametrize("mode", ("lora", "full"))
def test_a_model_as_it_is_built_takes_a_step_by_their_kernels(tiny_model, tmp_path, monkeypatch, mode):
    """They take the places of our own passes, which a base gets while it is loaded, and below adapters too."""
    calls = Counter()
    for name in liger.STAND_INS:
        kernel = getattr(liger, name)
        monkeypatch.setattr(liger, name, lambda *args, f=kernel, n=name: calls.update([n]) or f(*args))

    def step_of(kernels):
        lora = {"init": "pissa"} if mode == "lora" else None  # which starts with gradients for A too
        job = make_job(tiny_model, tmp_path, kernels, mode=mode, kernels=kernels, lora=lora)
        model = build_model(job.config, plan_with(job.plan, dtype="float32")).train()
        ids = torch.arange(18).view(2, 9) * 5
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        return loss.detach(), torch.cat(gradients), model.config.num_hidden_layers

    loss, gradients, layers = step_of("own")
    assert not calls
    with interpreted():
        their_loss, theirs, _ = step_of("liger")
    assert calls == {"norm": 2 * layers + 1, "rotate": layers, "gated": layers}
    assert float(their_loss) == pytest.approx(float(loss), rel=1e-5)
    assert (theirs - gradients).norm() <= 1e-4 * gradients.norm()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("sft_play.choices.kernels.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel, which is not installed; run `"):
        LIGER.require_runnable("cuda", (9, 0), here=True)
    LIGER.require_runnable("cuda", (9, 0), here=False)  # a plan for another machine

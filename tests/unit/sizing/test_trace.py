"""The trace: works for every architecture, and equals the real step."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from benchmarks.cpu_meter import measure_step
from benchmarks.miniatures import miniature
from benchmarks.random_models import random_base
from benchmarks.small_models import NAMES, TALL, WIDE, small_config
from benchmarks.step_time import flop
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings, ModelConfig
from sft_play.errors import UntraceableModel
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.model.build import load_base
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace import fake_model
from sft_play.sizing.trace.trace import trace_step
from tests.packages import needs_transformers
from tests.rounding import assert_same_tensor, summed
from tests.unit.sizing.real_step import require_predicted

CPU = torch.device("cpu")
LORA = LoraSettings(r=4)
SMALL = WIDE | {"layers": 5, "vocabulary": 300}


def real_base(config, implementation=varlen.NAME):
    """As a run loads it, with random weights."""
    return random_base(
        config, dtype="float32", attn_implementation=implementation, device=CPU, quantize=False
    )


def on_gpu(**changes) -> StepSpec:
    return step_of(
        **{
            "dtype": "bfloat16",
            "mixed_precision": "bf16",
            "device": "cuda",
            "lora": LORA,
            "batch": PaddedRows(2, 128),
            **changes,
        }
    )


def assert_alike(few, full):
    few, full = few.step.peaks(), full.step.peaks()
    # What is loaded after the layers, such as the last norm and GPT-2's embeddings, is loaded before them if they
    # are told apart. The norms of gradients are stacked into one tensor, which has only the traced layers' norms.
    for phase, less in (("load", 120_000), ("optimizer", 1000)):
        assert few.pop(phase).bytes == pytest.approx(full.pop(phase).bytes, abs=less)
    assert few == full


# Blocks that are not Llama's; windows and norms, and experts, are in the test of layers of several kinds.
ALWAYS = ("gpt2", "gpt_neox")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_architecture_traces_and_three_layers_represent_all(name):
    spec = on_gpu(mode="qlora", activations="recompute")
    config = small_config(name, SMALL)
    few, full = trace_step(config, spec), trace_step(config, spec, all_layers=True)
    assert len(few.stand_ins) == 5 and max(few.stand_ins) == 2
    assert_alike(few, full)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "gemma3_text",
            dict(sliding_window=64),
        ),  # layers with and without a window, whose masks cost memory here
        ("qwen3_moe", dict(mlp_only_layers=[1, 3])),  # layers with and without experts
    ],
)
def test_layers_of_several_kinds_are_told_apart(name, changes):
    spec = on_gpu(mode="lora", batch=PaddedRows(2, 256))
    config = small_config(name, SMALL | {"layers": 8}, **changes)
    few, full = trace_step(config, spec), trace_step(config, spec, all_layers=True)
    assert max(few.stand_ins) == 3
    assert_alike(few, full)


# Each mode with both of each by default, in two cases.
REAL_STEPS = [
    pytest.param(
        mode, checkpointing, packing, marks=[] if packing == (checkpointing == alike) else [pytest.mark.slow]
    )
    for mode, alike in (("full", True), ("lora", False), ("qlora", True))
    for checkpointing, packing in product((False, True), repeat=2)
]


@pytest.mark.parametrize(("mode", "checkpointing", "packing"), REAL_STEPS)
def test_the_real_step_on_the_cpu_allocates_what_the_trace_says(
    tmp_path_factory, mode, checkpointing, packing
):
    geometry = TALL | {"layers": 4}
    config = small_config("qwen3", geometry)
    folder = tmp_path_factory.getbasetemp() / "small-qwen3"
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spec = step_of(
        mode=mode,
        lora=LORA,
        activations="recompute" if checkpointing else "keep",
        batch=JoinedRows(192) if packing else PaddedRows(3, 64),
        longest=64,
    )
    model = load_base(
        ModelConfig(name=str(folder)),
        dtype="float32",
        attn_implementation=varlen.NAME,
        device=torch.device("cpu"),
        quantize=mode == "qlora",
    )
    model.config.use_cache = False
    if mode != "full":
        model = attach_adapter(model, LORA)
    measured = measure_step(model, replace(spec, cut_at_longest=packing))
    step = trace_step(config, spec).step
    predicted, in_layers = step.peaks(), step.peaks(in_layers=True)
    assert predicted["forward"].terms["weights"] + predicted["forward"].terms["adapters"] == measured.weights
    for phase, size in measured.phases.items():
        above = size - measured.weights
        assert predicted[phase].bytes - measured.weights == pytest.approx(above, rel=2e-4, abs=2000), phase
    for phase, size in measured.in_layers.items():
        assert in_layers[phase].bytes - measured.weights == pytest.approx(
            size - measured.weights, rel=1e-3
        ), phase


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_the_real_step_with_dora_allocates_what_the_trace_says(mode):
    lora = LoraSettings(r=4, use_dora=True)
    spec = step_of(mode=mode, lora=lora, activations="recompute", batch=PaddedRows(3, 64), longest=64)
    require_predicted(small_config("qwen3", TALL | {"layers": 4}), spec)


@pytest.mark.parametrize("family", ["afmoe", "deepseek_v3"])  # a window of the longest sequence; MLA
def test_joined_sequences_cost_by_their_own_lengths(family):
    """A trace joins longer sequences than the step has: they must not meet a window, or have larger scores."""
    config = miniature(family)
    spec = StepSpec(mode="full", batch=JoinedRows(128), longest=32)
    torch.manual_seed(0)
    model = real_base(config)

    measured = measure_step(model, replace(spec, cut_at_longest=True))

    assert trace_step(config, spec).step.peaks()["forward"].bytes == pytest.approx(measured.peak, abs=500)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tied", "new_tokens", "whole"),
    [
        (True, 3, ()),
        pytest.param(False, 3, ("norm",), marks=pytest.mark.slow),
        pytest.param(True, 0, ("embed_tokens",), marks=pytest.mark.slow),
        (False, 0, ("embed_tokens", "lm_head", "input_layernorm")),
    ],
)
def test_what_is_trained_beside_adapters_is_in_the_trace(tied, new_tokens, whole):
    config = small_config("qwen3", WIDE | {"layers": 4, "vocabulary": 2000}, tie_word_embeddings=tied)
    lora = LoraSettings(r=4, modules_to_save=whole)
    spec = StepSpec(mode="lora", lora=lora, new_tokens=new_tokens, batch=JoinedRows(300), longest=150)
    model = attach_adapter(real_base(config), lora, new_ids=range(2000 - new_tokens, 2000))
    measured, step = measure_step(model, spec), trace_step(config, spec).step
    predicted = step.peaks()
    assert predicted["forward"].terms["weights"] + predicted["forward"].terms["adapters"] == measured.weights
    for phase, size in measured.phases.items():
        assert predicted[phase].bytes == pytest.approx(size, rel=1e-3), phase


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_summed_in_place_where_autograd_does_so(tied):
    """A tied embedding has two, each as large as the logits' weight; an untied one has one."""
    config = small_config("llama", WIDE | {"layers": 2, "vocabulary": 20_000}, tie_word_embeddings=tied)
    spec = StepSpec(mode="full", batch=PaddedRows(1, 16))
    measured, step = measure_step(real_base(config, "sdpa"), spec), trace_step(config, spec).step
    assert step.peaks()["backward"].bytes == pytest.approx(measured.phases["backward"], rel=1e-3)


class Triple(torch.autograd.Function):
    """Multiplies by three, and keeps the gradients that it returns if there is a place for them."""

    kept: list | None = None

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        out = 3 * gradient
        if Triple.kept is not None:
            Triple.kept.append(out)
        return out


@pytest.mark.parametrize(("kept", "tensors"), [(None, 2), ([], 3)])
def test_a_gradient_that_somebody_holds_is_not_overwritten(monkeypatch, kept, tensors):
    monkeypatch.setattr(Triple, "kept", kept)
    with FakeTensorMode():
        x = torch.randn(10_000, requires_grad=True)
        with AllocationRecorder() as recorder:
            recorder.begin("forward")
            loss = (x * 2).sum() + Triple.apply(x).sum()  # autograd begins with the last one
            recorder.begin("backward")
            before, recorder.peak = recorder.live, recorder.live
            loss.backward()
    assert recorder.peak - before == pytest.approx(tensors * 40_000, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "told_apart"),
    [
        (
            "gemma3n_text",
            0,
        ),  # later layers attend to keys and values of earlier ones, and all have an input each
        ("hrm_text", 2),  # layers that run several times
    ],
)
def test_layers_that_are_not_one_after_the_other_have_the_memory_of_the_real_step(family, told_apart):
    config = miniature(family)
    spec = StepSpec(mode="full", batch=JoinedRows(128), longest=32)
    torch.manual_seed(0)
    model = real_base(config)

    trace = trace_step(config, spec)

    assert trace.traced_layers == told_apart
    measured = measure_step(model, replace(spec, cut_at_longest=True))
    peak = max(trace.step.peaks()[phase].bytes for phase in measured.phases)
    assert peak == pytest.approx(measured.peak, rel=1e-3)


def test_accumulation_keeps_the_gradients_alive_during_the_forward():
    config = small_config("llama", SMALL)
    once, again = (trace_step(config, on_gpu(mode="full", accumulates=a)).step.peaks() for a in (False, True))
    gradients = again["forward"].terms["gradients"]
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert gradients == 2 * parameters
    assert once["forward"].terms["gradients"] == 0
    assert again["forward"].bytes - once["forward"].bytes == gradients
    assert once["optimizer"].terms["gradients"] == gradients


def test_eight_bit_states_are_a_quarter_of_those_in_fp32():
    config = small_config("llama", WIDE)
    plain, eight = (
        trace_step(
            config, on_gpu(mode="lora", lora=LoraSettings(r=64), dtype="float32", optimizer=o)
        ).step.peaks()["optimizer"]
        for o in ("adamw", "adamw_8bit")
    )
    assert eight.terms["optimizer"] == pytest.approx(plain.terms["optimizer"] / 4, rel=0.02)


@pytest.mark.thorough
def test_more_supervised_tokens_cost_more_on_a_gpu_and_nothing_on_the_cpu():
    config = small_config("llama", SMALL)

    def loss(share, device):
        spec = on_gpu(mode="lora", device=device, supervised_share=share, batch=PaddedRows(2, 256))
        return trace_step(config, spec).step.peaks()["backward"].bytes

    assert loss(0.1, "cuda") < loss(1.0, "cuda")
    assert loss(0.1, "cpu") == loss(1.0, "cpu")


def test_checkpointing_keeps_one_block_a_layer():
    config = small_config("llama", SMALL)
    stored, recomputed = (
        trace_step(config, on_gpu(mode="lora", batch=PaddedRows(2, 256), activations=c))
        .step.peaks()["forward"]
        .terms
        for c in ("keep", "recompute")
    )
    assert recomputed["activations"] < stored["activations"] / 4


def test_deepspeed_holds_the_adapters_in_the_type_of_the_weights():
    config = small_config("llama", SMALL)
    plain = trace_step(config, on_gpu(mode="lora")).step.peaks()["load"].terms["adapters"]
    cast = (
        trace_step(config, on_gpu(mode="lora", mixed_precision="no", cast_adapters=True))
        .step.peaks()["load"]
        .terms["adapters"]
    )
    assert cast == plain / 2


def test_an_architecture_that_cannot_be_traced_says_so_and_what_to_do():
    with pytest.raises(
        UntraceableModel, match=r"MambaConfig cannot be traced .* the probe .*train.batch_size"
    ):
        trace_step(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64), on_gpu(mode="full"))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("dbrx", marks=needs_transformers("5.23")),  # which makes its config
        "jetmoe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("longcat_flash", "qwen4_exp_text")),
    ],
)
def test_an_architecture_whose_step_depends_on_the_data_is_left_to_the_probe(family):
    with pytest.raises(
        UntraceableModel, match=r"cannot be traced \(aten\.\w+.* so the probe measures its memory"
    ):
        trace_step(miniature(family), on_gpu(mode="lora", attention="sdpa"))


@pytest.mark.thorough
def test_few_traces_give_every_micro_batch():
    traces = Traces(small_config("llama", SMALL))
    for rows in (2, 3, 4, 8, 16, 200, 300, 400):
        traces.step(on_gpu(mode="lora", batch=PaddedRows(rows, 64)))
    assert traces.count == 4  # two with less than a tile of the loss, two with more
    for rows in (16, 400):
        spec = on_gpu(mode="lora", batch=PaddedRows(rows, 64))
        predicted, traced = traces.step(spec), trace_step(traces.architecture.config, spec).step
        assert predicted.rounded(512).peaks() == traced.rounded(512).peaks()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "device"),
    [
        ("full", "cpu"),
        ("lora", "cuda"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lora", "cpu"), ("full", "cuda"))),
    ],
)
def test_three_traces_give_every_micro_batch_with_any_supervised_share(device, mode):
    traces = Traces(small_config("llama", SMALL))
    kind = replace(on_gpu(mode=mode), device=device, longest=100)
    if (
        device == "cpu"
    ):  # in 16 bits, its products may take scratch up to a bound: nothing follows from others
        kind = step_with(kind, mixed_precision="no", dtype="float32")
    for rows, share in ((2903, 0.6), (1511, 0.65), (2405, 0.55)):
        spec = replace(kind, batch=JoinedRows(rows), supervised_share=share)
        alone = trace_step(traces.architecture.config, spec)
        assert traces.step(spec).rounded(512).peaks() == alone.step.rounded(512).peaks()
        np.testing.assert_allclose(flop(traces.work(spec).at(rows)).sum(), flop(alone.work).sum(), rtol=2e-4)
    assert traces.count == 3


@pytest.mark.thorough
def test_under_the_autocast_of_a_cpu_a_step_with_many_tiles_is_traced_itself():
    traces = Traces(small_config("llama", SMALL))
    kind = replace(on_gpu(mode="full"), device="cpu", longest=100)
    for rows in (2903, 1511):
        spec = replace(kind, batch=JoinedRows(rows))
        alone = trace_step(traces.architecture.config, spec)
        assert traces.step(spec).peaks() == alone.step.peaks()
    assert traces.count == 2


@pytest.mark.thorough
def test_the_work_of_a_step_with_two_tiles_of_the_loss_needs_no_trace_of_another_kind():
    """A step with half as many rows more has three tiles; one a little smaller has two."""
    traces = Traces(small_config("llama", SMALL))
    spec = replace(
        on_gpu(mode="lora", mixed_precision="no", dtype="float32"),
        device="cpu",
        batch=JoinedRows(606),
        longest=60,
        supervised_share=0.7,
    )
    assert spec.loss_tiles == (2, 2)
    traces.step(spec)
    traces.work(spec)
    smaller = replace(spec, batch=JoinedRows(520))
    found = traces.step(smaller).peaks()
    assert traces.count == 2
    alone = trace_step(traces.architecture.config, smaller).step.peaks()
    # two traces of one share: the supervised tokens of other sizes are rounded
    assert all(found[phase].bytes == pytest.approx(alone[phase].bytes, rel=2e-4) for phase in alone)


def test_what_this_process_does_on_real_tensors_is_not_changed_by_tracing():
    trace_step(small_config("llama", SMALL), on_gpu(mode="lora", activations="recompute"))
    query = torch.randn(1, 2, 8, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    out, _ = varlen.varlen_sdpa(torch.nn.Module(), query, query, query, None)
    assert_same_tensor(out.transpose(1, 2), expected, summed(16 + 8))  # heads of 16, 8 tokens
    assert not torch.is_autocast_enabled()


def test_a_step_has_the_same_trace_whatever_was_traced_before(monkeypatch):
    """The model of a trace is a copy, so that neither adapters nor divided weights stay in it."""
    kinds = [
        dict(mode=mode, shards=shards, activations=way)
        for mode, shards, way in product(("lora", "qlora", "full"), (1, 2), ("keep", "recompute"))
    ]
    config, made = small_config("llama", SMALL), dict()
    monkeypatch.setattr(fake_model, "_MADE", made)

    def traced(forgetting: bool):
        for kind in kinds if forgetting else reversed(kinds):
            if forgetting:
                made.clear()
            yield str(kind), trace_step(config, on_gpu(**kind))

    alone, after = dict(traced(True)), dict(traced(False))
    assert len(made) == 1  # of which all others are copies
    for kind, trace in alone.items():
        assert trace.same_structure(after[kind]) and np.array_equal(trace.sizes, after[kind].sizes), kind


def test_a_model_with_one_layer_traces():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    assert trace_step(config, on_gpu(mode="full")).stand_ins == (0,)

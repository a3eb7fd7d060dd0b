"""What a traced step computes: FLOP by closed forms and by PyTorch's counter, lines in the tokens, recomputation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks.random_models import random_model
from benchmarks.small_models import WIDE, small_config
from benchmarks.step_time import flop
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.sizing.estimate.estimator import Traces
from sft_play.sizing.step import LOSS_TILES, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import forward, make_batch, prepare_for_training, trace_step
from sft_play.work import ATTENTION, ATTENTION_BACKWARD, BYTES, PRODUCT, TIMES, UNPACK, K, M, WorkLine

CONFIG = small_config("llama", WIDE | {"layers": 5})
BODY = 5 * (2 * 256 * 256 + 2 * 256 * 64 + 3 * 256 * 704)  # q and o, k and v, the three of the feed-forward
HEAD = 256 * 4000
SPEC = StepSpec(mode="full", batch=PaddedRows(2, 64))
TOKENS, SCORED = 128, 126  # the last token of a row has nothing to predict


def passes(spec=SPEC, config=CONFIG):
    """FLOP of the forward and of the backward pass."""
    work = trace_step(config, spec).work
    every = flop(work)
    return every[: work.backward_from].sum(), every[work.backward_from :].sum()


def test_each_pass_costs_two_flop_for_each_weight_and_token():
    ahead, back = passes()
    # the head takes its gradients, of inputs and of weights, along the way
    assert ahead == pytest.approx(2 * (BODY * TOKENS + 3 * HEAD * SCORED), rel=1e-3)
    assert back == pytest.approx(2 * 2 * BODY * TOKENS, rel=1e-3)


def test_frozen_weights_have_no_weight_gradients():
    rank = 4
    ahead, back = passes(replace(SPEC, mode="lora", lora=LoraSettings(r=rank)))
    work = trace_step(CONFIG, replace(SPEC, mode="lora", lora=LoraSettings(r=rank))).work
    adapters = work.trained_elements
    assert ahead == pytest.approx(2 * ((BODY + adapters) * TOKENS + 2 * HEAD * SCORED), rel=1e-3)
    assert back == pytest.approx(2 * (BODY + 2 * adapters) * TOKENS, rel=0.06)


def test_checkpointing_adds_a_forward_pass_of_the_layers():
    kept, recomputed = (passes(step_with(SPEC, activations=way)) for way in ("keep", "recompute"))
    last = 5 * 256 * 704  # nothing needs the output of a layer's last product
    assert recomputed[0] == kept[0]
    assert recomputed[1] - kept[1] == pytest.approx(2 * (BODY - last) * TOKENS, rel=1e-3)


def flop_of_products(_: Sequence[int], a: Sequence[int], b: Sequence[int], **__: Any) -> int:
    """FLOP of `addmm_`, which PyTorch does not count in place: [m, k] x [k, n]."""
    return 2 * math.prod(a) * b[-1]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_counter_of_pytorch_sees_the_same_in_a_real_step(mode):
    spec = replace(SPEC, mode=mode)
    model = random_model(CONFIG, spec, TuningConfig(mode=mode), torch.device("cpu"))
    add_loss_head(model)
    prepare_for_training(model, spec)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flop_of_products}) as counter:
        forward(model, make_batch(spec), spec).backward()
    counted = sum(
        flop
        for name, flop in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(name)  # which a Work leaves to the lengths of the sequences
    )
    assert sum(passes(spec)) == pytest.approx(counted, rel=1e-6)


def test_two_recordings_give_every_other_token_count():
    works = {rows: trace_step(CONFIG, replace(SPEC, batch=PaddedRows(rows, 64))).work for rows in (2, 3, 4)}
    line = WorkLine.fit([(2 * 64, 2 * 63), (3 * 64, 3 * 63)], [works[2], works[3]], share=63 / 64)
    np.testing.assert_allclose(line.at(4 * 64).sizes, works[4].sizes)
    assert line.at(4 * 64).same_operations(works[4])


def test_traces_ask_for_as_many_recordings_as_it_takes():
    traces = Traces(CONFIG)
    line = traces.work(replace(SPEC, batch=PaddedRows(1, 64)))
    assert traces.count == 2
    np.testing.assert_allclose(
        flop(line.at(4 * 64)).sum(), sum(passes(replace(SPEC, batch=PaddedRows(4, 64))))
    )


def test_what_is_trained_counts_all_layers():
    work = trace_step(CONFIG, SPEC).work
    parameters = list(AutoModelForCausalLM.from_config(CONFIG).parameters())
    assert work.trained_elements == sum(p.numel() for p in parameters)
    assert work.trained_tensors == len(parameters)


def test_recorded_layers_stand_for_all():
    few, full = (trace_step(CONFIG, SPEC, all_layers=every).work for every in (False, True))
    assert len(few.order) == len(full.order) and few.backward_from == full.backward_from
    np.testing.assert_allclose(flop(few), flop(full))
    np.testing.assert_allclose(
        *(work.sizes[work.order, BYTES] * work.sizes[work.order, TIMES] for work in (few, full))
    )


@pytest.mark.parametrize(("device", "passes_of_head"), [("cpu", 2), ("cuda", 3)])
def test_tiles_of_the_loss_that_are_not_traced_count(device, passes_of_head):
    """On a CPU logits and their gradient; on a GPU the backward pass computes the logits once more."""
    config = small_config("llama", WIDE | {"vocabulary": 40_000, "layers": 3})
    spec = replace(SPEC, mode="lora", batch=PaddedRows(9, 1024), device=device)
    work = trace_step(config, spec).work
    head = 2 * 256 * 40_000 * (9 * 1024 - 9)
    in_tiles = (work.sizes[:, M] == LOSS_TILES[device]) & (work.kinds == PRODUCT)
    found = flop(work)[in_tiles[work.order]].sum()
    assert found == pytest.approx(passes_of_head * head, rel=0.05)


def test_a_gpu_attends_and_unpacks_in_kernels_that_are_not_traced():
    spec = step_of(
        mode="qlora", dtype="bfloat16", mixed_precision="bf16", device="cuda", batch=PaddedRows(2, 64)
    )
    work = trace_step(CONFIG, spec).work
    kinds, sizes = work.kinds[work.order], work.sizes[work.order]
    assert (kinds == ATTENTION).sum() == (kinds == ATTENTION_BACKWARD).sum() == 5
    assert (sizes[kinds == ATTENTION, M] == TOKENS).all() and (sizes[kinds == ATTENTION, K] == 256).all()
    unpacked = sizes[kinds == UNPACK, M]
    assert unpacked.sum() == pytest.approx(
        2 * BODY, rel=0.12
    )  # each pass; the first layer's inputs need none

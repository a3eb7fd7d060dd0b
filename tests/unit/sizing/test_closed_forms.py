"""Bytes that layers save for the backward pass, against closed forms: exact for each geometry.

h hidden size, I feed-forward size, q and k widths of all query and key heads, n and nk numbers of heads, d
head size, r rank.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.sizing.kernels.head_tiles import few_tiles
from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.sizing.step import PaddedRows
from sft_play.sizing.trace.trace import trace_step
from sft_play.timeline import TERMS, StepTrace

ROWS, ROW_TOKENS, RANK = 2, 128, 8
TOKENS = ROWS * ROW_TOKENS
# By default the one in which a head is not a part of the hidden size, so that no two letters stand for the same.
GEOMETRIES = [
    pytest.param(dict(h=64, I=160, n=4, nk=2, d=16), id="h64", marks=pytest.mark.slow),
    pytest.param(dict(h=96, I=224, n=4, nk=2, d=40), id="h96"),
]
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}

FULL = dict(mode="full", dtype="bfloat16")
MASTER = dict(mode="full", dtype="float32", mixed_precision="bf16")
LORA_16 = dict(mode="lora", dtype="bfloat16", cast_adapters=True)
LORA_32 = dict(mode="lora", dtype="bfloat16")
GPU = dict(device="cuda", mixed_precision="bf16")
QLORA_16 = dict(mode="qlora", dtype="bfloat16", cast_adapters=True)

LLAMA = "4*q + 4*k + 4*n + 8"
QWEN3_NORMS = "2*(q+k) + 4*(n+nk)"
GEMMA3_LORA = "20*h + 8*I + 8*q + 8*k + 8*n + 4*nk + 16 + 14*r"
GEMMA3_FULL = "36*h + 8*I + 12*q + 12*k + 8*n + 4*nk + 16"
# Constant bytes per layer: Gemma's norms keep (1 + w) in fp32; autocast keeps 16-bit copies of the fp32
# weights it uses, which are not those of adapters on 16-bit weights.
GEMMA3_ONE_PLUS_W = "4*(4*h + 2*d)"
BASE_COPIES = "2*(2*h*q + 2*h*k + 3*h*I)"
ADAPTER_COPIES = "2*r*(2*(h+q) + 2*(h+k) + 3*(h+I))"
FLASH_SEED = "16"

SAVED = [
    ("llama", FULL, f"8*h + 8*I + {LLAMA}", "0"),
    ("llama", MASTER, f"18*h + 8*I + {LLAMA}", BASE_COPIES),
    ("llama", LORA_16, f"8*h + 8*I + {LLAMA} + 14*r", "0"),
    # Under autocast adapters get their inputs as they are, so that no fp32 copies of them are saved
    ("llama", LORA_32 | GPU, f"8*h + 8*I + {LLAMA} + 14*r", FLASH_SEED),
    ("llama", LORA_32, f"24*h + 10*I + 4*q + {LLAMA} + 28*r", "0"),
    ("llama", QLORA_16, f"8*h + 8*I + {LLAMA} + 14*r", "0"),
    (
        "llama",
        LORA_32 | GPU | dict(mode="qlora"),
        f"8*h + 8*I + {LLAMA} + 14*r",
        f"{ADAPTER_COPIES} + {FLASH_SEED}",
    ),
    ("qwen3", FULL, f"8*h + 8*I + {LLAMA} + {QWEN3_NORMS}", "0"),
    ("qwen3", MASTER, f"18*h + 8*I + {LLAMA} + {QWEN3_NORMS}", BASE_COPIES),
    ("qwen3", LORA_16, f"8*h + 8*I + {LLAMA} + 14*r + {QWEN3_NORMS}", "0"),
    ("qwen3", LORA_32, f"24*h + 10*I + 4*q + {LLAMA} + 28*r + {QWEN3_NORMS}", "0"),
    ("qwen3", QLORA_16, f"8*h + 8*I + {LLAMA} + 14*r + {QWEN3_NORMS}", "0"),
    ("gemma3", FULL, GEMMA3_FULL, GEMMA3_ONE_PLUS_W),
    ("gemma3", LORA_16, GEMMA3_LORA, GEMMA3_ONE_PLUS_W),
    ("gemma3", QLORA_16, GEMMA3_LORA, GEMMA3_ONE_PLUS_W),
]


def small(name, g):
    return CONFIGS[name](
        hidden_size=g["h"],
        intermediate_size=g["I"],
        num_hidden_layers=3,
        num_attention_heads=g["n"],
        num_key_value_heads=g["nk"],
        head_dim=g["d"],
        vocab_size=512,
    )


def value(form: str, g) -> int:
    names = g | dict(q=g["n"] * g["d"], k=g["nk"] * g["d"], r=RANK)
    return eval(form, {"__builtins__": {}}, names)


def traced(name, g, **spec) -> StepTrace:
    return trace_step(
        small(name, g), step_of(batch=PaddedRows(ROWS, ROW_TOKENS), lora=LoraSettings(r=RANK), **spec)
    )


def saved_by_the_middle_layer(trace: StepTrace) -> int:
    """Bytes that are allocated in its forward pass and still live when the backward pass begins."""
    segment = next(
        s for s in trace.segments if s.phase == "forward" and s.layer == 1 and _is_computing(trace, s)
    )
    allocated = [event - 1 for event in trace.events[segment.start : segment.stop] if event > 0]
    return int(sum(trace.sizes[block] for block in allocated if TERMS[trace.terms[block]] == "activations"))


def _is_computing(trace, segment) -> bool:
    """Whether it is not the segment that sets up gradients and optimizer states."""
    return any(event < 0 for event in trace.events[segment.start : segment.stop])


@pytest.mark.thorough
@pytest.mark.parametrize("g", GEOMETRIES)
@pytest.mark.parametrize(("name", "spec", "per_token", "constant"), SAVED)
def test_a_layer_saves_what_the_closed_form_says(name, spec, per_token, constant, g):
    assert saved_by_the_middle_layer(traced(name, g, **spec)) == value(per_token, g) * TOKENS + value(
        constant, g
    )


@pytest.mark.parametrize("g", GEOMETRIES)
@pytest.mark.parametrize(
    ("spec", "working_set"),
    [
        (LORA_16, "8*h + 12*I + 4*q + 4*k + 4*n + 4*d + 12*r + 16"),
        (FULL, "8*h + 12*I + 4*q + 4*k + 4*n + 4*d + 16"),
    ],
)
def test_a_recomputed_layer_needs_its_working_set_and_saves_its_input(spec, working_set, g):
    trace = traced("llama", g, activations="recompute", **spec)
    random_state = torch.get_rng_state().numel()
    assert saved_by_the_middle_layer(trace) == 2 * g["h"] * TOKENS + random_state
    changes = np.sign(trace.events) * trace.sizes[np.abs(trace.events) - 1]
    live = np.cumsum(changes)
    layer = next(s for s in trace.segments if s.phase == "backward" and s.layer == 1)
    rise = live[layer.start : layer.stop].max() - live[layer.start - 1]
    # The gradient that comes in, the rotary tables and the position ids were there before.
    assert rise == (value(working_set, g) - 2 * g["h"] - 4 * g["d"] - 8) * TOKENS


def head_peaks(tokens, hidden, vocabulary, *, trained, whole) -> tuple[int, int]:
    """Peaks of the forward and the backward of an output head in bf16, above its inputs."""
    from trl.kernels import ChunkedLogProbFunction

    from sft_play.sizing.kernels.simulation import simulate_cuda

    with FakeTensorMode(), simulate_cuda(tokens, (8, 0), windows=False):
        recorder = SymbolicRecorder(cuda=True, supervised=tokens, eval_supervised=tokens)
        with few_tiles(recorder), recorder:
            weight = torch.empty((vocabulary, hidden), dtype=torch.bfloat16, requires_grad=trained)
            states = torch.empty((tokens, hidden), dtype=torch.bfloat16, requires_grad=True)
            labels = torch.zeros(tokens, dtype=torch.int64)
            inputs = recorder.live
            if whole:
                logits = states @ weight.t()
                loss = torch.nn.functional.cross_entropy(logits.float(), labels)
                del logits
            else:
                parts = ChunkedLogProbFunction.apply(
                    states, weight, None, labels, 1.0, 32768, None, 1.0, ("log_probs",)
                )
                loss = parts[0].sum()
                del parts
            forward, recorder.peak = recorder.peak, recorder.live
            loss.backward()
    return forward - inputs, recorder.peak - inputs


def test_whole_logits_cost_ten_bytes_each_forward_and_twelve_backward():
    tokens, hidden, vocabulary = 512, 16, 4096
    forward, backward = head_peaks(tokens, hidden, vocabulary, trained=False, whole=True)
    logits = tokens * vocabulary
    assert forward == pytest.approx(10 * logits, rel=1e-3)
    assert backward == pytest.approx(12 * logits, rel=1e-3)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("tokens", [512, 4096, 20000])
def test_the_tiled_head_costs_one_tile_and_its_gradients(trained, tokens):
    """TRL 1.16 on CUDA: a tile of up to 4096 x 32768 logits, fp32 sums of gradients, their bf16 copies."""
    hidden, vocabulary = 64, 100_000
    tile = 2 * min(tokens, 4096) * 32768
    forward, backward = head_peaks(tokens, hidden, vocabulary, trained=trained, whole=False)
    gradients = 6 * hidden * tokens + (6 * hidden * vocabulary if trained else 0)
    assert forward == tile + 9 * 4 * tokens  # seven running sums, the normaliser and the result
    assert (
        0 <= backward - tile - gradients <= 20 * tokens
    )  # log-probabilities, their gradient, the normaliser


@pytest.mark.parametrize("tokens", [256, 512, 700, 768, 1290])
def test_the_head_of_a_cpu_is_as_all_of_its_tiles(tokens):
    """Autocast keeps a cast of each tile until the head ends, and the last tile may be smaller."""
    from sft_play.model.layers.cpu import TiledLogProbs

    def peak_of_head(*, few: bool) -> int:
        with FakeTensorMode():
            recorder = SymbolicRecorder(cuda=False, supervised=tokens, eval_supervised=tokens)
            hidden = torch.empty((tokens, 64), requires_grad=True)
            weight, targets = torch.empty((1000, 64)), torch.zeros(tokens, dtype=torch.int64)
            with recorder, few_tiles(recorder) if few else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    TiledLogProbs.apply(hidden, weight, None, targets, 1.0, 256, None, 1.0, ("log_probs",))
        return recorder.peak

    assert peak_of_head(few=True) == peak_of_head(few=False)

"""Which attention kernel each GPU runs, and what it allocates."""

import itertools
from dataclasses import replace

import bitsandbytes  # noqa: F401  registers its operations
import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, MistralConfig

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of, step_with
from sft_play.config.schema import LoraSettings
from sft_play.machine.catalogue import SPECS_FILE, find_specs
from sft_play.model.attention import table
from sft_play.model.attention.table import EFFICIENT, FLASH, fused_kernel, same_kernels
from sft_play.model.attention.varlen import type_name
from sft_play.sizing.kernels.attention import (
    FusedAttention,
    _call_of,
    attention_kernel,
    cuda_attention,
    takes_one_call,
    traced_capability,
    varlen_attention,
)
from sft_play.sizing.kernels.simulation import SymbolicRecorder, simulate_cuda
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.trace import trace_step

T4, V100, A100, RTX_4090, H100 = (7, 5), (7, 0), (8, 0), (8, 9), (9, 0)
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32


def choose(capability, dtype=HALF, *, head_dim=128, grouped=False, masked=False, dropout=0.0):
    kernel = fused_kernel(
        capability, type_name(dtype), head_dim, grouped=grouped, masked=masked, dropout=dropout
    )
    return {FLASH: "flash", EFFICIENT: "efficient", None: "math"}[kernel]


def capability_of(name):
    major, minor = find_specs(name).compute_capability.split(".")
    return int(major), int(minor)


@pytest.mark.parametrize("name", ["T4", "V100", "RTX 2080 Ti"])
def test_before_ampere_there_is_no_flash_kernel_and_the_efficient_one_takes_no_groups(name):
    capability = capability_of(name)
    assert choose(capability) == choose(capability, FULL) == choose(capability, masked=True) == "efficient"
    assert choose(capability, grouped=True) == choose(capability, BF16) == "math"


@pytest.mark.parametrize("name", ["RTX 3090", "RTX 4090", "RTX 5090", "A100", "L40S", "H100", "H200", "B200"])
def test_from_ampere_on_flash_runs_grouped_queries_in_16_bit(name):
    capability = capability_of(name)
    assert choose(capability, BF16, grouped=True) == choose(capability, HALF, grouped=True) == "flash"
    assert choose(capability, FULL) == choose(capability, BF16, masked=True) == "efficient"
    assert (
        choose(capability, FULL, grouped=True)
        == choose(capability, BF16, head_dim=320, grouped=True)
        == "math"
    )


def test_every_gpu_of_the_catalogue_has_a_fused_kernel_for_our_step():
    for entry in yaml.safe_load(SPECS_FILE.read_text())["gpus"]:
        major, minor = map(int, entry["compute_capability"].split("."))
        expected = "flash" if entry["bf16"] else "efficient"
        assert choose((major, minor), BF16 if entry["bf16"] else HALF) == expected, entry["name"]


def test_gpus_with_little_shared_memory_have_no_flash_kernel_for_some_heads():
    assert choose(A100, head_dim=208) == choose(H100, head_dim=208) == "flash"
    for capability in (RTX_4090, (8, 6), (12, 0)):
        assert (
            choose(capability, head_dim=208) == choose(capability, head_dim=256, dropout=0.1) == "efficient"
        )
        assert choose(capability, head_dim=256) == "flash"
    assert choose(A100, head_dim=100) == "flash" and choose(T4, head_dim=100) == "math"


def blocks_of(attend):
    """The blocks of one backward pass, in bytes."""
    with FakeTensorMode():
        recorder = SymbolicRecorder(cuda=True, supervised=0, eval_supervised=0)
        with recorder:
            out = attend()
            first = len(recorder.sizes)
            out.backward(torch.empty_like(out))
    return recorder.sizes[first:]


def efficient(capability, dtype, head_dim, *, tokens=256, heads=4):
    def attend():
        shape = (1, heads, tokens, head_dim)
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        call = _call_of(*inputs[:2], capability, longest=tokens, sequence_tokens=tokens)
        return FusedAttention.apply(*inputs, None, EFFICIENT, call)

    return blocks_of(attend)


def test_the_efficient_backward_sums_gradients_of_the_query_in_tiles_with_locks():
    tiles = 4 * 4 * (64 * 64 + 4) * 4  # heads x tiles x elements x bytes
    assert tiles in efficient(T4, HALF, 64) and tiles in efficient(A100, BF16, 64)


def test_gradients_that_do_not_fit_into_registers_have_a_staging_area():
    tiles, staged = 4 * 4 * 2 * (64 * 64 + 4) * 4, 4 * 2 * 4 * 64 * 128 * 4
    assert tiles + staged in efficient(T4, HALF, 128)
    assert 4 * 2 * (128 * 128 + 4) * 4 in efficient(A100, BF16, 128)  # larger tiles hold them
    assert tiles + staged in efficient(RTX_4090, BF16, 128)
    assert tiles in efficient(T4, FULL, 128)  # in fp32 they go straight to the result


def test_what_the_kernel_does_not_compute_itself_is_a_whole_product():
    output = 4 * 256 * 128 * 4
    in_half = efficient(T4, HALF, 128)
    assert in_half.count(output) == 0
    assert efficient(T4, FULL, 128).count(output) == in_half.count(output // 2) + 1
    assert efficient(V100, HALF, 128).count(output) == 3  # both factors in fp32, and their product


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_softmax_in_fp32_copies_only_bf16_and_its_backward_makes_a_product(dtype):
    scores = 64 * 64

    def attend():
        x = torch.empty((64, 64), dtype=dtype, requires_grad=True)
        return torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32)

    with simulate_cuda(64, T4, windows=False):
        with FakeTensorMode():
            recorder = SymbolicRecorder(cuda=True, supervised=0, eval_supervised=0)
            with recorder:
                attend()
        assert recorder.sizes.count(4 * scores) == (1 if dtype == HALF else 2)
        backward = blocks_of(attend)
    assert backward.count(4 * scores) >= 2  # the gradient that comes in, and gradient x output


def test_the_math_kernel_writes_all_scores():
    def attend():
        query = torch.empty((1, 4, 256, 64), dtype=HALF, requires_grad=True)
        key, value = (torch.empty((1, 2, 256, 64), dtype=HALF, requires_grad=True) for _ in range(2))
        return cuda_attention(256, T4)(query, key, value, is_causal=True, enable_gqa=True)

    assert max(blocks_of(attend)) >= 4 * 256 * 256 * 2


def largest_block(capability, **changes):
    spec = step_of(
        mode="lora", lora=LoraSettings(r=4), dtype="float16", mixed_precision="fp16", batch=PaddedRows(1, 1024),
        device="cuda", compute_capability=capability,
    )  # fmt: skip
    trace = trace_step(small_config("qwen3", WIDE), step_with(spec, **changes))
    inside = trace.owners >= 0
    return trace.sizes[inside].max()


@pytest.mark.thorough
@pytest.mark.parametrize("joined", [False, True])
def test_our_step_never_writes_scores_also_where_no_kernel_takes_groups(joined):
    shape = dict(batch=JoinedRows(1024)) if joined else {}
    assert largest_block(T4, **shape) < 4 * 1024 * 1024 * 2  # heads x tokens x tokens in fp16
    in_fp32 = largest_block(A100, dtype="float32", mixed_precision="no", **shape)
    assert in_fp32 < 4 * 1024 * 1024 * 4


@pytest.mark.parametrize(
    "capability",
    [
        (7, 0),
        (7, 5),
        (8, 0),
        (8, 6),
        (8, 7),
        (8, 9),
        (9, 0),
        (10, 0),
        (10, 3),
        (11, 0),
        (12, 0),
        (12, 1),
        (13, 0),
    ],
)
def test_gpus_that_share_a_trace_run_the_same_kernels_with_the_same_workspace(capability):
    shared = same_kernels(capability)
    assert same_kernels(shared) == shared
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (64, 96, 120, 128, 192, 200, 224, 256):
            query = torch.empty(1, 4, 300, head_dim, dtype=dtype, device="meta")
            calls = [
                _call_of(query, query, gpu, longest=300, sequence_tokens=300) for gpu in (capability, shared)
            ]
            assert EFFICIENT.workspace(calls[0]) == EFFICIENT.workspace(calls[1])
            assert EFFICIENT.row_products(calls[0]) == EFFICIENT.row_products(calls[1])
            for flags in itertools.product([False, True], [False, True], [0.0, 0.1]):
                grouped, masked, dropout = flags
                asked = {"head_dim": head_dim, "grouped": grouped, "masked": masked, "dropout": dropout}
                assert choose(capability, dtype, **asked) == choose(shared, dtype, **asked)
            name = type_name(dtype)
            joined = table.JOINED
            assert joined.takes(capability, name, head_dim) == joined.takes(shared, name, head_dim)


MISTRAL = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, head_dim=16,
)  # fmt: skip
JOINED = JoinedRows(1000)


def joined_spec(capability, **changes):
    spec = step_of(
        mode="lora", lora=LoraSettings(r=4), dtype="bfloat16", mixed_precision="bf16",
        device="cuda", compute_capability=capability, batch=JOINED,
    )  # fmt: skip
    return step_with(spec, **changes)


def accumulators(spec, heads=4, key_heads=2, head_dim=64):
    """The blocks of the backward pass of joined sequences, in bytes."""
    shapes = (1000, heads, head_dim), (1000, key_heads, head_dim), (1000, key_heads, head_dim)

    def attend():
        inputs = [torch.empty(shape, dtype=BF16, requires_grad=True) for shape in shapes]
        return varlen_attention(spec)(*inputs)

    return blocks_of(attend)


def test_one_call_accumulates_all_joined_sequences_a_tile_apart():
    of_ten = accumulators(joined_spec(A100, sequence_tokens=100))
    rows = 1000 + 10 * 128
    assert rows * 4 * 64 * 4 in of_ten and 4 * rows * 4 in of_ten
    # the gradient that comes in, the query's, and those of key and value for each query head
    assert of_ten.count(1000 * 4 * 64 * 2) == 4
    assert (1000 + 128) * 4 * 64 * 4 in accumulators(joined_spec(A100))  # a single one


def test_version_3_sums_the_gradients_of_grouped_keys_in_fp32():
    found = accumulators(joined_spec(H100, sequence_tokens=100, attention="flash_attention_3"))
    rows = 1000 + 10 * 128
    assert rows * 4 * 64 * 4 in found and found.count(rows * 2 * 64 * 4) == 2
    assert found.count(1000 * 4 * 64 * 2) == 2  # that of the output, and the query's


@pytest.mark.parametrize(
    ("capability", "changes", "kernel"),
    [
        (A100, {}, f"{FLASH.label}, one call for all rows of a micro-batch"),
        (A100, dict(batch=PaddedRows(2, 64)), f"{FLASH.label}, rows are padded"),
        (A100, dict(dtype="float32", mixed_precision="no"), f"{EFFICIENT.label}, a call for each row"),
        (T4, dict(dtype="float16", mixed_precision="fp16"), f"{EFFICIENT.label}, a call for each row"),
        (
            H100,
            dict(attention="flash_attention_3"),
            "FlashAttention 3, one call for all rows of a micro-batch",
        ),
    ],
)
def test_the_plan_says_which_kernel_runs(capability, changes, kernel):
    config = small_config("llama", WIDE)
    assert attention_kernel(config, joined_spec(capability, **changes)) == f"attention: {kernel}"
    assert attention_kernel(config, replace(joined_spec(capability), device="cpu")) is None


def test_joined_rows_with_a_window_need_a_mask_only_where_a_row_has_its_own_call():
    windowed = MistralConfig(**MISTRAL, sliding_window=64)
    mask = 1000 * 1000  # one byte for each pair of tokens
    of_loop = trace_step(windowed, joined_spec(T4, dtype="float16", mixed_precision="fp16"))
    of_call = trace_step(windowed, joined_spec(A100))
    assert of_loop.sizes.max() >= mask > of_call.sizes[of_call.owners >= 0].max()


def test_each_sequence_more_costs_a_tile_in_the_traced_step():
    config = small_config("llama", WIDE)
    few, many = (
        trace_step(config, joined_spec(A100, sequence_tokens=tokens)).sizes.sum() for tokens in (1000, 50)
    )
    assert many > few


@pytest.mark.parametrize(("dropout", "one_call"), [(0.1, False), (0.0, True)])
def test_joined_rows_take_one_call_unless_attention_has_dropout_by_any_name(dropout, one_call):
    spec = step_of(
        mode="full", dtype="bfloat16", mixed_precision="bf16", device="cuda",
        compute_capability=(9, 0), batch=JoinedRows(128),
    )  # fmt: skip
    assert takes_one_call(GPT2Config(attn_pdrop=dropout), spec) is one_call


@pytest.mark.parametrize(
    "name, changes, shared",
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("qwen3_moe", {}, True),
        ("mistral", {}, False),  # a window
        ("gemma3_text", {}, False),
        ("llama", {"head_dim": 256}, False),
        ("llama", {"attention_dropout": 0.1}, False),
    ],
)
def test_gpus_share_traces_where_nothing_but_the_flash_kernel_computes_attention(name, changes, shared):
    config = small_config(name, WIDE, **changes)
    gpus = [(8, 0), (8, 6), (9, 0), (12, 0)]
    found = {traced_capability(config, table.NAME, "bfloat16", gpu) for gpu in gpus}
    assert found == ({A100} if shared else set(gpus))
    for dtype, gpu in (("bfloat16", T4), ("bfloat16", (13, 0)), ("float32", H100)):
        assert traced_capability(config, table.NAME, dtype, gpu) == gpu
    assert traced_capability(config, "sdpa", "bfloat16", H100) == H100
    if shared:
        step = step_of(mode="lora", device="cuda", mixed_precision="bf16", batch=JoinedRows(300), longest=150)
        first, *others = (trace_step(config, replace(step, compute_capability=gpu)) for gpu in gpus)
        for other in others:
            assert first.same_structure(other) and (first.sizes == other.sizes).all()
            assert first.work.same_operations(other.work) and (first.work.sizes == other.work.sizes).all()

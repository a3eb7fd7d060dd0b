"""Attention without masks gives what plain attention gives, forward and backward, on every path."""

import math

import pytest
import torch
from torch._dynamo.utils import counters

from sft_play.model.attention.operator import attend_joined, rows_of, serves
from sft_play.model.attention.varlen import register, varlen_sdpa
from sft_play.upstream.torch import mark_dynamic

TOKENS, LENGTHS = 70, [33, 1, 36]
# Relative to the largest value, against fp32 on the same inputs.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def plain(query, key, value, window, lengths):
    """The definition, in fp32: every score, masked by position and sequence."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    position = torch.arange(query.shape[2], device=query.device)
    seen = position[:, None] >= position
    if window:
        seen &= position[:, None] - position < window
    if lengths:
        sequence = torch.repeat_interleave(torch.tensor(lengths, device=query.device))
        seen &= sequence[:, None] == sequence
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ value).transpose(1, 2)


def dtypes(device):
    return (torch.float32,) if device.type == "cpu" else tuple(CLOSE)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("key_heads", [4, 1])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "packed"])
def test_outputs_and_gradients_are_those_of_the_definition(device, head_dim, key_heads, window, lengths):
    register()
    generator = torch.Generator().manual_seed(0)
    rows = 1 if lengths else 2
    shapes = [(rows, heads, TOKENS, head_dim) for heads in (4, key_heads, key_heads)]
    for dtype in dtypes(device):
        made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        inputs, exact = (
            [tensor.to(kind).requires_grad_() for tensor in made] for kind in (dtype, torch.float32)
        )
        out, _ = varlen_sdpa(None, *inputs, None, sliding_window=window, sequence_lengths=lengths)
        expected = plain(*exact, window, lengths)
        found = [out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)]
        wanted = [expected, *torch.autograd.grad(expected.pow(2).sum(), exact)]
        for one, other in zip(found, wanted, strict=True):
            assert (one.float() - other).abs().max() <= CLOSE[dtype] * other.abs().max(), dtype


def test_the_operator_of_compiled_layers_gives_the_same(device):
    """For all lengths by one graph; what is made of graphs there is PyTorch's."""
    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(attend_joined, backend="aot_eager", fullgraph=True)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for lengths in ((33, 1, 36), (5,), (9, 80, 2, 2)):
        shapes = [(1, heads, sum(lengths), 64) for heads in (4, 2, 2)]
        inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
        for tensor in inputs:
            mark_dynamic(tensor, 2)
        assert serves(inputs[0], inputs[2], 0.0)
        rows = rows_of(lengths, device)
        for attend, window in ((attend_joined, None), (attend_joined, 100), (attend_joined, 17), (graph, 17)):
            wanted, _ = varlen_sdpa(None, *inputs, None, sliding_window=window, sequence_lengths=lengths)
            found = attend(*inputs, rows, window, None)
            gradients = (torch.autograd.grad(out.float().pow(2).sum(), inputs) for out in (found, wanted))
            for one, other in [(found, wanted), *zip(*gradients, strict=True)]:
                assert (one - other).abs().max() <= CLOSE[dtype] * other.abs().max(), (lengths, window)
    assert counters["stats"]["unique_graphs"] == 1


def test_no_path_on_a_gpu_writes_all_scores(only_gpu):
    """Grouped queries in fp32, or below compute capability 8.0, would end in PyTorch's math kernel."""
    tokens = 4096
    shapes = (1, 8, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64)
    for dtype in dtypes(only_gpu):
        query, key, value = (torch.randn(shape, device=only_gpu, dtype=dtype) for shape in shapes)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        varlen_sdpa(None, query, key, value, None)
        assert torch.cuda.max_memory_allocated() - before < 8 * tokens * tokens * dtype.itemsize / 4

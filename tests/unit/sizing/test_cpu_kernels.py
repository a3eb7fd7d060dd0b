"""What a CPU's kernels allocate inside: the recorder against PyTorch's own allocator."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.sizing.meters.cpu import MEMORY, allocator_events

ROWS, WIDTH, OUT = 96, 256, 640


def recorded(compute, *, autocast=None, tensors=(), threads=1, scratch=()) -> list[int]:
    """The events of the recorder for a computation on fake copies of tensors: sizes, negative when freed."""
    recorder = SymbolicRecorder(
        cuda=False, supervised=1, eval_supervised=1, autocast=autocast, threads=threads, scratch=scratch
    )
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in tensors]
        for tensor in fake:
            recorder.add(tensor, "weights")
        known = len(recorder.events)
        with recorder:
            compute(*fake)
        events = recorder.events[known:]
    return [recorder.sizes[event - 1] if event > 0 else -recorder.sizes[-event - 1] for event in events]


def allocated(compute, *tensors) -> list[int]:
    """The same, of PyTorch's allocator."""
    compute(*tensors)
    with allocator_events() as events:
        compute(*tensors)
    return [event.size for event in events if event.name == MEMORY]


def peak(events: list[int]) -> int:
    """The most bytes that were live at once."""
    live = highest = 0
    for size in events:
        live += size
        highest = max(highest, live)
    return highest


@pytest.mark.parametrize("operation", ["add", "add_", "mul", "mul_", "sub_", "div"])
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (WIDTH,), ()])
def test_operands_of_another_type_are_copied(operation, types, shape):
    """As where the head adds gradients in 16 bits to sums in fp32, or a norm multiplies by fp32 weights."""
    tensors = [
        torch.ones(ROWS, WIDTH).to(getattr(torch, types[0])),
        torch.ones(shape).to(getattr(torch, types[1])),
    ]

    def compute(a, b):
        getattr(a, operation)(b)

    small = 8  # bytes; a number is cast in registers or in a block of its own
    assert peak(recorded(compute, tensors=tensors)) == pytest.approx(
        peak(allocated(compute, *tensors)), abs=small
    )


def product_of_four_bits(nested):
    """A product of bitsandbytes and its operands, [rows, width] x [out, width]."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(OUT, WIDTH), quant_type="nf4", compress_statistics=nested)
    scales = (
        [state.state2.absmax, state.absmax, state.state2.code, state.offset] if nested else [state.absmax]
    )

    def compute(a, b, absmax, *nested_scales):
        product = torch.ops.bitsandbytes.gemm_4bit.default
        kinds = dict(zip(("absmax_8bit", "absmax_code", "absmax_offset"), nested_scales, strict=False))
        product(a, b, (OUT, WIDTH), absmax, 64, "nf4", bias=None, **kinds)

    return compute, [packed, *scales]


@pytest.mark.parametrize("nested", [False, True])
def test_a_four_bit_product_unpacks_its_scales(nested):
    compute, weight = product_of_four_bits(nested)
    tensors = [torch.randn(ROWS, WIDTH), *weight]
    real = peak(allocated(compute, *tensors))
    assert peak(recorded(compute, tensors=tensors)) == pytest.approx(real, rel=0.001)


def test_a_four_bit_product_under_autocast_casts_its_operands():
    """In the order of the allocator; oneDNN's scratch memory, which no operation returns, is not recorded."""
    compute, weight = product_of_four_bits(nested=True)
    tensors = [torch.randn(ROWS, WIDTH), *weight]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = iter(allocated(compute, *tensors))
        made = [size for size in recorded(compute, autocast="bfloat16", tensors=tensors) if size > 0]
    whole, rows = OUT * WIDTH, ROWS * WIDTH
    assert made[-4:] == [4 * whole, 2 * whole, 2 * rows, 2 * ROWS * OUT]
    assert sorted(made) == sorted(size for size in real if size in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_math_kernel_looks_for_rows_that_are_masked_everywhere(dtype):
    scores = torch.randn(2, 4, ROWS, ROWS).to(dtype)

    def compute(scores):
        torch.ops.aten._safe_softmax.default(scores, -1)

    assert peak(recorded(compute, tensors=[scores])) == peak(allocated(compute, scores))


@pytest.fixture(params=[1, 2])
def threads(request):
    """So many threads of PyTorch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [24, 100, 200, 800])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_blocks_of_scores_for_each_thread(tokens, dtype, threads):
    """In the forward and the backward pass, whose gradient may have heads in front of tokens."""
    ops = torch.ops.aten
    query, key, value, grad = (torch.randn(2, tokens, 4, 32).to(dtype).transpose(1, 2) for _ in range(4))
    forward = ops._scaled_dot_product_flash_attention_for_cpu.default
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, sums = forward(query, key, value, 0.0, True)
    kept = query, key, value, out, sums
    for attend, tensors in (
        (forward, (query, key, value)),
        (backward, (grad, *kept)),
        (backward, (grad.contiguous(), *kept)),
    ):

        def compute(*given, attend=attend):
            attend(*given, 0.0, True)

        made = recorded(compute, tensors=tensors, threads=threads)
        real = Counter(size for size in allocated(compute, *tensors) if size > 0)
        # each thread has sums of a block's rows to itself, of which the profiler sees those of one
        own = {attend is backward and 4 * min(tokens, 32 if tokens < 192 else 64 if tokens < 768 else 256)}
        recorded_sizes = Counter(
            size for size in made if size > 0 and size not in {each * threads for each in own}
        )
        assert not recorded_sizes - real
        if dtype == torch.float32:  # in 16 bits, oneDNN takes scratch memory for its products
            assert set(real - recorded_sizes) <= own | {4}

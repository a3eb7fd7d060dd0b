"""Measures a device profile: each kind of operation at a few sizes, and the calls of a tiny model.

It takes 4 to 5 s on two cores, and another second with products of 16-bit numbers. Each figure is the minimum
of several runs, or on a GPU of the means of a few in a row: other load on the machine affects that least.
"""

import itertools
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch

from sft_play.choices.kernels import Capability
from sft_play.config.schema import LoraSettings
from sft_play.errors import LaunchError
from sft_play.fingerprints import installed_versions
from sft_play.machine.gpus import BF16_SINCE
from sft_play.model.attention import varlen
from sft_play.planning.speed.profile import (
    BUSY,
    LENGTHS,
    PACKAGES,
    SIDES,
    STRETCHES,
    Curve,
    DeviceProfile,
    MicroBatch,
    ProductGrid,
    product_seconds,
)
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.upstream.torch import keep_busy

GRID_S = 1.2  # after so long no product of a grid is measured; those that remain follow from the others
# A figure is the minimum of RUNS runs, or of more (up to MOST_RUNS) until ENOUGH_S have passed.
ENOUGH_S, RUNS, MOST_RUNS = {"cpu": 0.02, "cuda": 0.005}, 3, 300
# Short kernels of a GPU are queued TOGETHER behind a sleep that hides their launches: a sleep for each would
# take a hundred times as long as the kernel. So many cycles of the GPU per run, 50 us at 2 GHz.
TOGETHER, SLEEP_CYCLES, LEAST_SLEEP = 20, 100_000, 1_000_000
LARGE_SIDE = 1024  # from this side on, products of a GPU are most of a step
# Operands are taken in turns from more memory than caches hold: in training, each was last used long ago.
POOL_BYTES = {"cpu": 768 << 20, "cuda": 256 << 20}
POOL_SHARE = 0.05  # of a CPU's free memory, at most
TURNS = 32
# What the trainer takes on a CPU per micro-batch, and once more per step, in calls of operations. By now it
# takes a sixth of that ("rest" in benchmarks/results/step_parts_cpu.json), but calls in a larger model take
# longer than in the tiny one that is timed, and small micro-batches are predicted too fast as it is.
TRAINER_CALLS = 1100
STEP_CALLS = 300  # and on a GPU, which waits between two steps: benchmarks/results/between_steps.json
TYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
WIDTH, HEAD_DIM = 512, 64  # of the measured attention
# Attention on a GPU has the tokens of a micro-batch, since a short sequence alone occupies a part of it, and
# a weight is large enough to take longer than its launch.
ATTENDED, UNPACKED_SIDE = {"cpu": 1, "cuda": 8192}, {"cpu": 1024, "cuda": 8192}
TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
)
TINY_TOKENS = 16
MANY, LARGE = 100, 1 << 22  # trained tensors of 64 elements, and elements of one tensor
WHILE_BUSY = "measured while busy, so no plan uses it"


def measure_in_child(name: str) -> DeviceProfile:
    """Measures the GPU in a child process, which frees the GPU's context and all memory when it exits.

    Raises:
        LaunchError: the measurement failed.
    """
    code = f"from {__name__} import measure; print(measure({name!r}, None).to_json())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise LaunchError(f"{name} could not be measured: {last}")
    return DeviceProfile.from_json(done.stdout.strip().splitlines()[-1])


def measure(name: str, threads: int | None, *, sixteen_bit: bool = True) -> DeviceProfile:
    """Measures the device of this name: a CPU with so many threads or, for None, the GPU.

    Without `sixteen_bit`, a CPU's products of 16-bit numbers are left out; those of a GPU never are.
    """
    device = torch.device("cpu" if threads else "cuda")
    types = TYPES["cpu"] if threads else types_of_gpu(torch.cuda.get_device_capability(device))
    began = now()
    psutil.cpu_percent()  # the next call is about the time since this one
    with _threads(threads), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clock, operands = Stopwatch(device), Operands(device)
        update_element, update_tensor = _update(clock)
        ahead, back = _attention(clock, types[0])
        elementwise = _stretch(clock, lambda a, b, out: torch.mul(a, b, out=out), 3, operands)
        profile = DeviceProfile(
            device=name,
            kind=device.type,
            measured=True,
            source="",
            threads=threads,
            versions=installed_versions(PACKAGES),
            products=_grids(clock, operands, types[: None if sixteen_bit or not threads else 1], elementwise),
            attention=ahead,
            attention_backward=back,
            elementwise=elementwise,
            transcendental=_stretch(clock, lambda a, out: torch.sigmoid(a, out=out), 2, operands),
            fresh_byte_s=_fresh(clock) if threads else 0.0,
            unpack_s=_unpacking(clock, types[0]),
            call_forward_s=0.0,
            call_backward_s=0.0,
            update_element_s=update_element,
            update_tensor_s=update_tensor,
        )
        profile = _with_calls(profile, clock)
    seconds, busy = time.perf_counter() - began[0], used_by_others(began)
    return replace(profile, source=f"measured in {seconds:.1f} s" if busy < BUSY else WHILE_BUSY, busy=busy)


def types_of_gpu(capability: Capability) -> tuple[torch.dtype, ...]:
    """What is measured on a GPU, attention in the first: older ones have no units or kernels for bf16."""
    return TYPES["cuda"] if capability >= BF16_SINCE else TYPES["cuda"][1:]


def with_sixteen_bit(profile: DeviceProfile) -> DeviceProfile:
    """The profile of a CPU with its products of 16-bit numbers, which are measured now."""
    device, began = torch.device("cpu"), now()
    psutil.cpu_percent()  # as in `measure`
    with _threads(profile.threads):
        added = _grids(Stopwatch(device), Operands(device), TYPES["cpu"][1:], profile.elementwise)
    whole = replace(profile, products={**profile.products, **added})
    busy = used_by_others(began)
    return whole if busy < BUSY else replace(whole, source=WHILE_BUSY, busy=busy)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def now() -> tuple[float, float]:
    """Wall-clock time and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> float:
    """Seconds since `now()` returned `began`; CPU time if it is less, because the process had to wait."""
    return min(late - early for early, late in zip(began, now(), strict=True))


def used_by_others(began: tuple[float, float]) -> float:
    """Share of the CPU that other programs used since `now()` returned `began`.

    `psutil.cpu_percent()` must have been called then.
    """
    seconds, own = (late - early for early, late in zip(began, now(), strict=True))
    return max(0.0, psutil.cpu_percent() / 100 - own / seconds / (psutil.cpu_count() or 1))


class Stopwatch:
    """Times a function on a device; on a GPU only its kernels, queued behind a sleep to hide their launch."""

    def __init__(self, device: torch.device):
        self.device = device

    def least(self, run: Callable[[], Any]) -> float:
        """Seconds of the fastest run."""
        run()
        enough, began = ENOUGH_S[self.device.type], time.perf_counter()
        times = [self._mean(run, 1)]
        together = 1 if self.device.type == "cpu" else max(1, min(TOGETHER, int(enough / RUNS / times[0])))
        while times[0] <= 10 * enough and (
            len(times) < RUNS or (time.perf_counter() - began < enough and len(times) < MOST_RUNS)
        ):
            times.append(self._mean(run, together))
        return min(times)

    def wait(self) -> None:
        """Waits until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _mean(self, run: Callable[[], Any], together: int) -> float:
        """Seconds of each of so many runs in a row."""
        if self.device.type == "cpu":
            began = now()
            for _ in range(together):
                run()
            return since(began) / together
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_busy(max(LEAST_SLEEP, together * SLEEP_CYCLES))
        start.record()
        for _ in range(together):
            run()
        stop.record()
        self.wait()
        return start.elapsed_time(stop) / 1000 / together


def pool_bytes(kind: str, free: int | None = None) -> int:
    """Bytes that operands are taken from: never less than the largest product and stretch need.

    The bytes of memory that are `free` limit the pool; None does not.
    """
    wanted = POOL_BYTES[kind] if free is None else min(POOL_BYTES[kind], int(POOL_SHARE * free))
    return max(wanted, 3 * 4 * SIDES[kind][-1] ** 2, STRETCHES[-1])


class Operands:
    """Tensors of any shape from one large block, others in each run."""

    def __init__(self, device: torch.device) -> None:
        free = psutil.virtual_memory().available if device.type == "cpu" else None
        self._block = torch.ones(pool_bytes(device.type, free) // 4, device=device)

    def turns(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
        """A function that gives tensors of these shapes, from another place in each call."""
        block, sizes = self._block.view(dtype), [math.prod(shape) for shape in shapes]
        count = max(1, min(TURNS, len(block) // sum(sizes)))
        found = []
        for stretch in block.split(len(block) // count)[:count]:
            parts = stretch[: sum(sizes)].split(sizes)
            found.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        return itertools.cycle(found).__next__


def _grids(
    clock: Stopwatch, operands: Operands, types: Iterable[torch.dtype], elementwise: Curve
) -> dict[str, ProductGrid]:
    """A grid for each type, by its name."""

    def grid(dtype: torch.dtype) -> ProductGrid:
        def seconds(m: int, n: int, k: int) -> float:
            turn = operands.turns(dtype, (m, k), (n, k), (m, n))
            return clock.least(lambda: _multiply(*turn()))

        return measured_products(clock.device.type, seconds, elementwise, dtype.itemsize)

    return {str(dtype).partition(".")[2]: grid(dtype) for dtype in types}


def measured_products(
    kind: str,
    seconds: Callable[[int, int, int], float],
    elementwise: Curve,
    element: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ProductGrid:
    """The grid of a "cpu" or "cuda" device, as far as its products are measured within GRID_S.

    Those that take most of a step come first: large ones on a GPU, whose small ones take as long as their
    launch and say nothing of its rate. On a CPU the largest can take the whole time, so that one of middle
    size is the first, and small ones follow. What is left runs at the best measured rate, or as fast as
    memory is read.

    Args:
        kind: of the device.
        seconds: measures the product of m, n and k.
        elementwise: what operations on memory take there.
        element: bytes of a number.
        clock: seconds of now.
    """
    began, known = clock(), dict[tuple[int, ...], float]()

    def order(sizes: tuple[int, ...]) -> tuple[bool, int]:
        if kind == "cuda":
            return min(sizes) < LARGE_SIDE, -math.prod(sizes)
        return sizes != (SIDES[kind][2],) * 3, math.prod(sizes)

    for sizes in sorted(itertools.product(SIDES[kind], repeat=3), key=order):
        if known and clock() - began >= GRID_S:
            break
        known[sizes] = seconds(*sizes)
    rate = max(2 * math.prod(sizes) / spent for sizes, spent in known.items())
    stream, least = elementwise.sizes[-1] / elementwise.seconds[-1], elementwise.seconds[0]
    unmeasured = product_seconds(rate, stream, least, element)
    return ProductGrid.of(SIDES[kind], lambda *sizes: known.get(sizes) or unmeasured(*sizes))


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """[m, k] and [n, k] to [m, n], as a linear layer multiplies."""
    torch.mm(a, b.t(), out=out)


def _attention(clock: Stopwatch, dtype: torch.dtype) -> tuple[Curve, Curve]:
    """Seconds of the forward and of the backward pass, per token and element of the width."""
    forward, backward, lengths = [], [], LENGTHS if clock.device.type == "cuda" else LENGTHS[:-1]
    varlen.register()  # turns off the kernel that training does not use
    attend = torch.nn.functional.scaled_dot_product_attention
    for tokens in lengths:
        rows = max(1, ATTENDED[clock.device.type] // tokens)
        shape, each = (rows, WIDTH // HEAD_DIM, tokens, HEAD_DIM), rows * tokens * WIDTH
        q, k, v = (torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3))
        out = attend(q, k, v, is_causal=True)
        ones = torch.ones_like(out)
        forward.append(clock.least(lambda: attend(q, k, v, is_causal=True)) / each)  # noqa: B023
        gradients = lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True)  # noqa: B023, E731
        backward.append(clock.least(gradients) / each)
    return Curve(lengths, tuple(forward)), Curve(lengths, tuple(backward))


def _stretch(clock: Stopwatch, run: Callable[..., Any], tensors: int, operands: Operands) -> Curve:
    """Seconds of an operation on so many tensors, the result among them, by the bytes that it moves."""

    def seconds(size: float) -> float:
        turn = operands.turns(torch.float32, *[(int(size) // (4 * tensors),)] * tensors)
        return clock.least(lambda: run(*turn()))

    return Curve.of(STRETCHES, seconds)


def _fresh(clock: Stopwatch) -> float:
    """Extra seconds to write a byte of new memory, which the operating system clears first."""
    old = torch.ones(STRETCHES[-1] // 4)
    new = clock.least(lambda: torch.empty_like(old).fill_(1.0))  # too large for malloc to keep
    return max(0.0, new - clock.least(lambda: old.fill_(1.0))) / STRETCHES[-1]


def _unpacking(clock: Stopwatch, dtype: torch.dtype) -> float:
    """Seconds to unpack a 4-bit weight; those of a copy if bitsandbytes cannot do it here."""
    side = UNPACKED_SIDE[clock.device.type]
    weights = torch.randn(side, side, device=clock.device, dtype=dtype)
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(weights, quant_type="nf4")
        return clock.least(lambda: dequantize_4bit(packed, state)) / weights.numel()
    except (ImportError, RuntimeError):
        return clock.least(weights.clone) / weights.numel()


def _update(clock: Stopwatch) -> tuple[float, float]:
    """Seconds of clipping and AdamW, per element and per tensor."""

    def seconds(count: int, elements: int) -> float:
        tensors = [torch.nn.Parameter(torch.ones(elements, device=clock.device)) for _ in range(count)]
        optimizer = torch.optim.AdamW(tensors, fused=True)
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(tensors, 1.0, foreach=clock.device.type == "cuda")
            optimizer.step()

        return clock.least(update)

    for_tensor = seconds(MANY, 64) / MANY
    return max(0.0, seconds(1, LARGE) - for_tensor) / LARGE, for_tensor


def _with_calls(profile: DeviceProfile, clock: Stopwatch) -> DeviceProfile:
    """The profile with the time to call an operation: what remains of a tiny model's time, per call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from sft_play.model.adapters.attach import attach_adapter
    from sft_play.sizing.step import PaddedRows, StepSpec
    from sft_play.sizing.trace.trace import make_batch

    base = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).to(clock.device)
    model = attach_adapter(base, LoraSettings(r=8)).train()
    spec = StepSpec(mode="lora", batch=PaddedRows(1, TINY_TOKENS), device=clock.device.type)
    batch = make_batch(spec, device=clock.device)

    def loss() -> torch.Tensor:
        return model(**batch, use_cache=False).loss

    recorder = AllocationRecorder()
    with recorder:
        recorder.begin("forward")
        found = loss()
        recorder.begin("backward")
        found.backward()
    work = recorder.trace(()).work
    _, spent = profile.seconds(work, MicroBatch(TINY_TOKENS, TINY_TOKENS**2))
    times = []
    for _ in range(20):
        began = now()
        found = loss()
        forward, middle = since(began), now()
        found.backward()
        times.append((forward, since(middle)))
        clock.wait()
    calls = []
    for part, here in enumerate((slice(work.backward_from), slice(work.backward_from, None))):
        least = min(one[part] for one in times)
        own = spent[here].sum() if clock.device.type == "cpu" else 0.0  # a GPU works in parallel
        calls.append(max(1e-7, (least - own) / len(spent[here])))
    # While a GPU works on a micro-batch, Python has time for the trainer; between two steps it waits.
    trainer, ended = (TRAINER_CALLS,) * 2 if clock.device.type == "cpu" else (0, STEP_CALLS)
    own = {"micro_batch_s": trainer * calls[0], "step_s": ended * calls[0]}
    return replace(profile, call_forward_s=calls[0], call_backward_s=calls[1], **own)

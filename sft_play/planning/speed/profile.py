"""What operations cost on a device: measured once, or derived from its data sheet and labeled as such. Pure.

A profile holds seconds at a few sizes, interpolated linearly between them in log-log space: small products
are far from the peak rate, and the size at which they approach it differs from device to device. Units:
seconds, bytes; `dispatch` is the time of the thread that calls the operations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from sft_play.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BYTES,
    DTYPES,
    ELEMENTWISE,
    FRESH,
    IN_PLACE,
    PRODUCT,
    TIMES,
    TRANSCENDENTAL,
    UNPACK,
    K,
    M,
    N,
    Work,
)  # fmt: skip

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")  # whose code is timed
MATRIX_SHARE, BANDWIDTH_SHARE = 0.7, 0.8  # of the data sheet's figures, reached by large products and copies
BEST_SHARE = 0.9  # of the rate that the best shape has been measured at, reached by other large products
# Of the data sheet's figure, by FlashAttention 2, from this compute capability on: 50% to 73% on an A100
# (arXiv 2307.08691). Before, by other kernels: an assumption.
ATTENTION_SHARES = {(0, 0): 0.42, (8, 0): 0.6}
# From (9, 0) on by the tokens of a sequence, forward (causal) and backward (all pairs): TFLOP/s on an H100 of
# 989 with heads of 128, from the figures of arXiv 2407.08608. Shorter ones take as long per token as 512.
ATTENTION_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HOPPER_ATTENTION = {False: (191, 260, 298, 319, 333, 335), True: (214, 260, 291, 310, 318, 322)}
HOPPER_TFLOPS = 989
SOURCES = {
    ("cpu", False): "assumed",
    ("cuda", False): "derived from the data sheet",
    ("cuda", True): "derived from the data sheet and the matrix rate that others report",
}
FP32_SHARE = 1 / 8  # of the 16-bit rate in a GPU's data sheet, for fp32 without TF32
KERNEL_S = {"cuda": 3e-6, "cpu": 1e-6}  # the shortest time of a kernel
# The time that PyTorch and a model's modules take to call an operation, forward and backward: measured on an
# idle server CPU (AMD EPYC, a LoRA step), and for CUDA 3 microseconds more for the launch of a kernel.
CALL_S = {"cuda": (9e-6, 6e-6), "cpu": (6e-6, 3e-6)}
# Per element and step, in fp32: clipping (2 reads, 1 write of the gradient) and AdamW (4 reads, 3 writes).
UPDATE_BYTES = 40
SIDES = {"cpu": (8, 64, 512, 2048), "cuda": (16, 128, 1024, 8192)}  # of measured products
ITEMSIZE = (4, 2, 2)  # bytes of a number of each of DTYPES
FRESH_FROM = 32 << 20  # bytes; glibc keeps smaller blocks for reuse
LENGTHS = (64, 256, 1024, 4096)  # tokens of measured sequences
# Share of the CPU. With more of it in use by other programs, figures can be several times too long.
BUSY = 0.1
STRETCHES = (1 << 14, 1 << 18, 1 << 22, 1 << 26)  # bytes of measured element-wise operations


def _never_less_for_more(seconds: np.ndarray, axis: int) -> np.ndarray:
    """Measured seconds along an axis of growing sizes, in the shape given.

    What disturbs a measurement only makes it longer.
    """
    return np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)


@dataclass(frozen=True)
class Curve:
    """Seconds at some sizes, ascending.

    Extrapolated in proportion above the largest size, constant below the smallest.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: np.ndarray) -> np.ndarray:
        """Seconds at each size, [n] as `size`, never decreasing with the size."""
        seconds = _never_less_for_more(np.array(self.seconds), 0)
        within = np.clip(size, self.sizes[0], self.sizes[-1])
        found = np.exp(np.interp(np.log(within), np.log(self.sizes), np.log(seconds)))
        return found * np.maximum(1, size / self.sizes[-1])

    @property
    def per_byte(self) -> float:
        """Seconds of each unit of the largest size, which take no longer to begin."""
        return self.seconds[-1] / self.sizes[-1]

    @classmethod
    def of(cls, sizes: Sequence[int], seconds: Callable[[int], float]) -> "Curve":
        """A curve from a function that gives or measures the seconds at a size."""
        return cls(tuple(sizes), tuple(seconds(size) for size in sizes))


@dataclass(frozen=True)
class ProductGrid:
    """Seconds of the product [m, k] x [k, n] where m, n and k are each one of `sides`."""

    sides: tuple[int, ...]
    seconds: tuple[float, ...]  # m outermost, k innermost

    @cached_property
    def _log(self) -> np.ndarray:
        """Logarithms of the seconds, [sides, sides, sides]."""
        table = np.reshape(self.seconds, (len(self.sides),) * 3)
        for axis in range(3):  # measurements are noisy
            table = _never_less_for_more(table, axis)
        return np.log(table)

    def at(self, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Seconds of each product, [n]; above the grid in proportion to m, n and k, below it constant."""
        low, part, beyond = [], [], np.ones(np.shape(m))
        for side in (m, n, k):
            place = np.interp(np.log(np.maximum(side, 1)), np.log(self.sides), np.arange(len(self.sides)))
            low.append(np.minimum(place.astype(int), len(self.sides) - 2))
            part.append(place - low[-1])
            beyond = beyond * np.maximum(1, side / self.sides[-1])
        log = np.zeros(np.shape(m))
        for corner in product((0, 1), repeat=3):
            weight = np.prod([p if c else 1 - p for c, p in zip(corner, part, strict=True)], axis=0)
            log += weight * self._log[tuple(index + c for index, c in zip(low, corner, strict=True))]
        return np.exp(log) * beyond

    @classmethod
    def of(cls, sides: Sequence[int], seconds: Callable[[int, int, int], float]) -> "ProductGrid":
        """A grid from a function that gives or measures the seconds of a product."""
        return cls(tuple(sides), tuple(seconds(*sizes) for sizes in product(sides, repeat=3)))


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as the clock sees it: its tokens, and how they are divided into sequences."""

    tokens: float
    squares: float  # sum over its sequences of tokens squared
    calls: float = 1  # of attention in each layer: one per sequence, or one for all


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Seconds of each kind of operation on a device."""

    device: str
    kind: str  # cpu or cuda
    measured: bool
    source: str  # where the figures come from, for people
    threads: int | None = None  # of a CPU
    versions: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, ProductGrid]  # by dtype; the first one stands in for missing ones
    attention: Curve  # by tokens of a causal sequence, per token and element of heads x head_dim
    attention_backward: Curve
    elementwise: Curve  # by bytes read and written
    transcendental: Curve
    # per byte of new memory, which the operating system clears first; a GPU's allocator reuses its own
    fresh_byte_s: float
    unpack_s: float  # per 4-bit weight
    call_forward_s: float  # dispatch of an operation called by Python code
    call_backward_s: float  # dispatch of an operation called by autograd
    update_element_s: float  # of clipping and AdamW, per trained element
    update_tensor_s: float  # of clipping and AdamW, per trained tensor
    micro_batch_s: float = 0.0  # of trainer and data per micro-batch, besides forward and backward
    step_s: float = 0.0  # of the trainer per optimizer step, during which a GPU waits
    busy: float = 0.0  # share of the CPU that other programs used during the measurement

    @property
    def disturbed(self) -> bool:
        """Whether other programs used so much of the CPU that no plan may count on these figures."""
        return self.busy >= BUSY

    def seconds(self, work: Work, batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of dispatch and of execution, both [operations] in the order of `work.order`."""
        kinds, sizes = work.kinds, work.sizes
        spent = np.zeros(len(kinds))
        for kind, curve in (
            (ELEMENTWISE, self.elementwise),
            (IN_PLACE, self.elementwise),
            (TRANSCENDENTAL, self.transcendental),
        ):  # fmt: skip
            here = kinds == kind
            spent[here] = curve.at(sizes[here, BYTES])
        spent[kinds == UNPACK] = self.unpack_s * sizes[kinds == UNPACK, M]
        for index, name in enumerate(DTYPES):
            here = (kinds == PRODUCT) & (work.dtypes == index)
            grid = self.products.get(name) or next(iter(self.products.values()))
            m, n, k = (sizes[here, column] for column in (M, N, K))
            # a product that is added to its result reads that too, which a grid of plain products does not
            read = sizes[here, BYTES] - ITEMSIZE[index] * (m * n + m * k + n * k)
            spent[here] = grid.at(m, n, k) + np.maximum(0, read) * self.elementwise.per_byte
        spent += self.fresh_byte_s * np.where(sizes[:, FRESH] >= FRESH_FROM, sizes[:, FRESH], 0)
        spent *= sizes[:, TIMES]
        calls = sizes[:, TIMES].copy()
        for kind, curve in ((ATTENTION, self.attention), (ATTENTION_BACKWARD, self.attention_backward)):
            here, tokens = kinds == kind, max(batch.tokens, 1)
            share = sizes[here, M] / tokens  # of the batch: a trace may split it into other sequences
            length = np.array(batch.squares / tokens)
            spent[here] += share * batch.tokens * sizes[here, K] * curve.at(length)
            calls[here] = np.maximum(1, share * batch.calls)
        dispatch = calls * np.where(work.by_python, self.call_forward_s, self.call_backward_s)
        return dispatch[work.order], spent[work.order]

    def micro_batch_seconds(self, work: Work, batch: MicroBatch) -> tuple[float, float]:
        """Seconds of the forward and the backward pass of a micro-batch.

        A CPU dispatches an operation and then executes it. A GPU works through a queue that the CPU fills
        meanwhile, so the slower of the two decides (`_queue`).
        """
        dispatch, spent = self.seconds(work, batch)
        if self.kind == "cpu":
            both = dispatch + spent
            return float(both[: work.backward_from].sum()), float(both[work.backward_from :].sum())
        forward = _queue(dispatch[: work.backward_from], spent[: work.backward_from])
        return forward, _queue(dispatch, spent) - forward

    def shared_by(self, processes: int) -> "DeviceProfile":
        """The profile of a CPU shared by some processes: each gets its share of the cores and the bandwidth.

        The dispatch of operations stays as fast.
        """
        if processes == 1 or self.kind != "cpu":
            return self
        source = f"{self.source}, shared by {processes} processes"
        return replace(self._executing(processes), source=source)

    def slowed(self, times: float) -> "DeviceProfile":
        """The profile of a CPU whose processes have a part of a core each: all takes `times` as long."""
        rates = ("call_forward_s", "call_backward_s", "update_tensor_s", "micro_batch_s", "step_s")
        slower = {name: times * getattr(self, name) for name in rates}
        return replace(self._executing(times), source=f"{self.source}, with too few cores", **slower)

    def _executing(self, times: float) -> "DeviceProfile":
        """The profile with operations that take so many times as long once they are dispatched."""

        def slower(curve: Any) -> Any:
            return replace(curve, seconds=tuple(times * seconds for seconds in curve.seconds))

        curves = ("attention", "attention_backward", "elementwise", "transcendental")
        rates = ("fresh_byte_s", "unpack_s", "update_element_s")
        products = {name: slower(grid) for name, grid in self.products.items()}
        slower_curves = {name: slower(getattr(self, name)) for name in curves}
        slower_rates = {name: times * getattr(self, name) for name in rates}
        return replace(self, products=products, **slower_curves, **slower_rates)

    def to_json(self) -> str:
        """The profile as a JSON object."""
        return self._json

    @cached_property
    def _json(self) -> str:  # made once: it is a part of the key of each plan of a search
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DeviceProfile":
        """The inverse of `to_json`."""
        return TypeAdapter(cls).validate_python(json.loads(text))


def _queue(dispatch: np.ndarray, spent: np.ndarray) -> float:
    """When a device finishes that executes operations, [n], in order, each one after its dispatch.

    The dispatches up to some operation, and the work from it on, cannot overlap; the worst such sum decides.
    """
    if not len(dispatch):
        return 0.0
    return float((np.cumsum(dispatch) + np.cumsum(spent[::-1])[::-1]).max())


def product_seconds(
    rate: float, stream: float, least: float, element: int
) -> Callable[[int, int, int], float]:
    """Seconds of the product [m, k] x [k, n], as a function of m, n and k.

    It takes `least` to start, and then as long as the units compute, at `rate` FLOP/s, or as numbers of
    `element` bytes travel, at `stream` bytes per second.
    """

    def seconds(m: int, n: int, k: int) -> float:
        moved = element * (m * n + m * k + n * k)
        return least + max(2 * m * n * k / rate, moved / stream)

    return seconds


def attention_share(compute_capability: tuple[int, int], tokens: int, *, backward: bool) -> float:
    """The share of the data sheet's FLOP/s that attention reaches with sequences of so many tokens."""
    if compute_capability < (9, 0):
        return next(
            share for since, share in reversed(ATTENTION_SHARES.items()) if compute_capability >= since
        )
    rate = np.interp(np.log(tokens), np.log(ATTENTION_LENGTHS), HOPPER_ATTENTION[backward])
    return float(rate) / HOPPER_TFLOPS * min(1.0, tokens / ATTENTION_LENGTHS[0])


def derived_from_data_sheet(
    device: str,
    kind: str,
    flops: float,
    bandwidth: float,
    *,
    best_flops: float | None = None,
    compute_capability: tuple[int, int] = (0, 0),
) -> DeviceProfile:
    """The profile of a device ("cpu" or "cuda") that has not been measured here.

    It assumes a share of the data sheet's figures (dense FLOP/s in the dtype of training, bytes per second of
    its memory), and a minimum time per kernel. `best_flops` are those of the best product that others have
    measured on such a device.
    """
    rate = BEST_SHARE * best_flops if best_flops else MATRIX_SHARE * flops
    stream, least = BANDWIDTH_SHARE * bandwidth, KERNEL_S[kind]

    def attended(passes: float) -> Callable[[int], float]:
        def seconds(tokens: int) -> float:
            rate = flops * attention_share(compute_capability, tokens, backward=passes > 1)
            return passes * max(2 * tokens / rate, 8 / stream)

        return seconds

    streaming = Curve.of(STRETCHES, lambda size: least + size / stream)
    forward, backward = CALL_S[kind]
    single = FP32_SHARE if kind == "cuda" else 1.0
    sixteen = product_seconds(rate, stream, least, 2)
    return DeviceProfile(
        device=device,
        kind=kind,
        measured=False,
        source=f"{SOURCES[kind, best_flops is not None]}, not measured",
        products={
            "bfloat16": ProductGrid.of(SIDES[kind], sixteen),
            "float16": ProductGrid.of(SIDES[kind], sixteen),
            "float32": ProductGrid.of(SIDES[kind], product_seconds(single * rate, stream, least, 4)),
        },
        attention=Curve.of(LENGTHS, attended(1)),
        attention_backward=Curve.of(LENGTHS, attended(2.5)),
        elementwise=streaming,
        transcendental=streaming,
        fresh_byte_s=0.0 if kind == "cuda" else 1 / stream,
        unpack_s=2.5 / stream,
        call_forward_s=forward,
        call_backward_s=backward,
        update_element_s=UPDATE_BYTES / stream,
        update_tensor_s=2 * least,
    )

"""What a CPU's products of 16-bit numbers take while they run, beside operands and result: found out on it.

Where oneDNN has no instructions for a type, it adds up in fp32 and casts the sums at the end; with them, it
may need nothing. Which it is depends on the processor, on ONEDNN_MAX_CPU_ISA and on the version of PyTorch,
and no function tells. So a few products are run, and their scratch memory is described by a rule.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from sft_play.cache import entry, read_value, write_value
from sft_play.fingerprints import installed_versions
from sft_play.machine.host import cpu_info
from sft_play.machine.process import importing_libraries
from sft_play.units import SIXTEEN_BIT

OPERATIONS = ("mm", "addmm", "bmm")  # of torch.ops.aten
ELEMENTS = (0, 2, 4)  # bytes that a rule may count for an element: nothing, a 16-bit copy, an fp32 one
RESULT_BYTES = 2  # of an element
HOLDS_WITHIN, SLACK_BYTES = 0.01, 512  # of what was measured: paddings differ by a few cache lines


class Product(NamedTuple):
    """Products of [m, k] and [k, n], as many as a batch has, or as are computed at a time."""

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def elements(self) -> tuple[int, int, int]:
        """Of the results and of both operands."""
        m, k, n, batch = self
        return batch * m * n, batch * m * k, batch * k * n

    def at_a_time(self, threads: int) -> "Product":
        """Those of a batch that so many threads compute at a time: only they take scratch."""
        return self._replace(batch=min(self.batch, threads))


# Tokens, features and vocabularies of small models, some of them no multiples of anything.
MEASURED = (
    Product(300, 64, 96), Product(64, 300, 96), Product(300, 64, 1000), Product(96, 300, 64),
    Product(33, 65, 70), Product(257, 128, 514),
)  # fmt: skip
BATCHES = tuple(Product(m, k, n, 3) for m, k, n, _ in MEASURED)
# Run where no rule holds. The second one's result and operands have two to eight times the elements.
LARGE = Product(1024, 1024, 1024), Product(2048, 4096, 1024)
BOUNDED = 1.5  # if the second one takes less than so many times as much, it is for blocks, not for matrices


@dataclass(frozen=True)
class ScratchRule:
    """Bytes of scratch of an operation: some for each element of its result and operands, and a constant.

    There may be a bound, `most`.
    """

    result: int
    first: int
    second: int
    constant: int
    worst: float = 0.0  # share of the largest scratch by which the rule was off at most
    most: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the rule describes what was measured."""
        return self.worst <= HOLDS_WITHIN

    def bytes(self, sizes: Product) -> int:
        """The scratch of these products."""
        weights = self.result, self.first, self.second
        taken = self.constant + sum(map(int.__mul__, weights, sizes.elements))
        if self.most is None:
            return taken
        return min(taken, self.most)


Measured = Sequence[tuple[Product, int]]  # what products took, in bytes
Rules = tuple[tuple[str, ScratchRule], ...]  # by operation; those that need nothing are left out


def rule_of(measured: Measured) -> ScratchRule:
    """The rule that is least wrong about what products took, in bytes."""
    elements = np.array([sizes.elements for sizes, _ in measured])
    taken = np.array([size for _, size in measured])
    found = []
    for weights in product(ELEMENTS, repeat=3):
        rest = taken - elements @ np.array(weights)
        constant = max(0, median_low(rest.tolist()))
        off = max(0, int(np.abs(rest - constant).max()) - SLACK_BYTES)
        result, first, second = weights
        found.append(ScratchRule(result, first, second, constant, round(off / max(1, int(taken.max())), 4)))
    return min(found, key=lambda rule: (rule.worst, rule.result + rule.first + rule.second))


def bounded(rule: ScratchRule, large: Measured) -> ScratchRule:
    """The rule with a bound, if what the `LARGE` products took has one."""
    most = dict.fromkeys(LARGE, 0)
    for sizes, taken in large:
        most[sizes] = max(taken, most[sizes])
    less, more = most.values()
    if more < BOUNDED * less:
        return replace(rule, most=max(less, more))
    return rule


def product_scratch(dtype: str, threads: int) -> Rules:
    """The rules of this processor for products in a type; 16-bit ones are measured unless they are known."""
    if dtype not in SIXTEEN_BIT:
        return ()
    isa, versions = os.environ.get("ONEDNN_MAX_CPU_ISA", ""), installed_versions(("torch",))
    model, flags = cpu_info()
    return _rules_in(entry("scratch", model, sorted(flags), isa, dtype, threads, versions), dtype, threads)


@cache
def _rules_in(path: Path, dtype: str, threads: int) -> Rules:
    known = read_value(path)
    if known is None:
        known = {name: asdict(rule) for name, rule in _found(dtype, threads).items()}
        write_value(path, known)
    rules = ((name, ScratchRule(**rule)) for name, rule in known.items())
    return tuple((name, rule) for name, rule in rules if rule != ScratchRule(0, 0, 0, 0))


def _found(dtype: str, threads: int) -> dict[str, ScratchRule]:
    """The rule of each operation."""
    few = _measured({name: BATCHES if name == "bmm" else MEASURED for name in OPERATIONS}, dtype, threads)
    rules = {name: rule_of(taken) for name, taken in few.items()}
    large = _measured({name: LARGE for name, rule in rules.items() if not rule.holds}, dtype, threads)
    return rules | {name: bounded(rules[name], taken) for name, taken in large.items()}


def _measured(
    products: Mapping[str, Sequence[Product]], dtype: str, threads: int
) -> dict[str, list[tuple[Product, int]]]:
    """What operations took, by the allocator's events; operands as in forward and backward passes."""
    with importing_libraries():
        import torch

        from sft_play.sizing.meters.cpu import MARK, allocator_events, mark
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = [
            (name, sizes, call)
            for name, several in products.items()
            for sizes in several
            for call in _calls(name, sizes, getattr(torch, dtype))
        ]
        for _, _, call in calls:
            call()  # oneDNN keeps what it has prepared
        with _silent(), allocator_events() as events:
            for number, (_, _, call) in enumerate(calls):
                mark(str(number))
                call()
            mark("end")
    finally:
        torch.set_num_threads(before)
    places = [place for place, event in enumerate(events) if event.name.startswith(MARK)]
    found: dict[str, list[tuple[Product, int]]] = {name: [] for name in products}
    for (name, sizes, _), (first, last) in zip(calls, pairwise(places), strict=True):
        own = events[first + 1 : last]
        taken = max(event.live for event in own) - (own[0].live - own[0].size)
        found[name].append((sizes.at_a_time(threads), taken - RESULT_BYTES * sizes.elements[0]))
    return found


def _calls(name: str, sizes: Product, dtype: Any) -> list[Callable[[], Any]]:
    """An operation on operands that lie as in a forward pass, and in both products of a backward pass."""
    import torch

    m, k, n, count = sizes
    batch = (count,) if name == "bmm" else ()
    operation = getattr(torch.ops.aten, name).default
    added = [torch.zeros(n, dtype=dtype)] if name == "addmm" else []

    def operand(rows: int, columns: int, *, transposed: bool) -> Any:
        shape = (columns, rows) if transposed else (rows, columns)
        found = torch.ones((*batch, *shape), dtype=dtype)
        return found.transpose(-1, -2) if transposed else found

    layouts = ((False, True), (False, False), (True, False))
    pairs = [(operand(m, k, transposed=a), operand(k, n, transposed=b)) for a, b in layouts]
    return [lambda pair=pair: operation(*added, *pair) for pair in pairs]  # type: ignore[misc]


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler writes to standard error whatever its log level is."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)

"""Which steps of a kind are traced, so that all others of that kind follow from them. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations

import numpy as np

from sft_play.sizing.estimate.memory import Counts
from sft_play.sizing.step import SHARES, StepSpec
from sft_play.timeline import StepTrace

# Rows or tokens. A batch of one takes shortcuts (nothing to expand or copy), so it is not on the line.
SMALLEST = 2

Size = tuple[int, float]  # of a step: what its micro-batch grows by (`Batch.size`), and its supervised share


def kind_of(spec: StepSpec) -> str:
    """A key that is equal for steps whose block sizes are linear in their size and supervised tokens."""
    alike = resized(spec, 0)
    if spec.eval_batch is None or spec.eval_share is not None:  # else the evaluation depends on the share
        alike = replace(alike, supervised_share=0.0)
    return repr((alike, spec.tiles))


def size_of(spec: StepSpec) -> Size:
    """What tells a step from others of its kind."""
    return spec.batch.size, spec.supervised_share


def of_size(spec: StepSpec, size: Size) -> StepSpec:
    """The step of the same kind that has this size."""
    return replace(resized(spec, size[0]), supervised_share=size[1])


def resized(spec: StepSpec, size: int) -> StepSpec:
    """The same step with as many rows or, if they are joined, tokens."""
    return replace(spec, batch=spec.batch.of_size(size))


def counts_of(spec: StepSpec) -> Counts:
    """What the blocks of a step grow by: the rows or tokens of its micro-batch, and its supervised tokens."""
    return spec.batch.size, spec.supervised(spec.batch)


def samples(spec: StepSpec, known: Iterable[Size], *, plane: bool = False) -> Iterator[StepSpec]:
    """The steps to trace, one after the other, until the traces of its kind give this step.

    Beside the first step that is known, one of another size and the same supervised share gives the growth of
    blocks along a line; if `spec` has another share or a `plane` is asked for, one with another share gives
    the rest of it. Without any known size, there is nothing to begin with.
    """
    base = next((of_size(spec, size) for size in known if size[0] >= SMALLEST), None)
    if base is None:
        return
    yield _distant(base)
    if plane or spec.supervised_share != base.supervised_share:
        shares = (spec.supervised_share, *(steps / SHARES for steps in range(1, SHARES)))
        others = (replace(base, supervised_share=share) for share in shares)
        alike = (other for other in others if kind_of(other) == kind_of(base))
        yield from [other for other in alike if counts_of(other) != counts_of(base)][:1]


def more_samples(spec: StepSpec) -> Iterator[StepSpec]:
    """What to trace if `samples` did not do: two of three sizes are likely to have the same structure."""
    first, second, third = (resized(spec, max(SMALLEST, spec.batch.size) + more) for more in range(3))
    yield from (first, _distant(first), second, third)


def _distant(spec: StepSpec) -> StepSpec:
    """A step of the same kind and share that is far enough away for the two to give the slopes of a line.

    In steps of SHARES, supervised tokens and halves of sequences are whole numbers, so slopes are exact.
    """
    size = spec.batch.size
    distance = max(SHARES, size // 2 // SHARES * SHARES)
    while distance:
        for other in (resized(spec, size + distance), resized(spec, size - distance)):
            if other.batch.size >= SMALLEST and kind_of(other) == kind_of(spec):
                return other
        distance = distance // 2 // SHARES * SHARES
    return resized(spec, size + max(SMALLEST, size // 2))


def basis(spec: StepSpec, known: Mapping[Size, StepTrace], *, plane: bool = False) -> list[Size]:
    """The traces that this step follows from, which have the same structure; [] if there are none.

    Three that are not on a line give the steps of any size and share, two of one share those of that share,
    unless a `plane` is asked for. Those of a run's own micro-batches, whose slopes are rounded, come last, so
    that a plan is the same whether they are known already or not.
    """
    sizes = [size for size in known if size[0] >= SMALLEST]
    sampled = [size for size in sizes if is_sampled(size[1])]
    alike = [size for size in sizes if size[1] == spec.supervised_share and not plane]
    candidates = chain(combinations(sampled, 3), combinations(alike, 2), combinations(sizes, 3))
    for found in candidates:
        if len(found) == 3 and not _spans_plane(spec, found):
            continue
        first, *others = (known[size] for size in found)
        if all(first.same_structure(other) for other in others):
            return list(found)
    return []


def is_sampled(share: float) -> bool:
    """Whether a supervised share is one of those that `samples` and bounds of micro-batches have."""
    return round(share * SHARES, 6).is_integer()


def _spans_plane(spec: StepSpec, sizes: Iterable[Size]) -> bool:
    """Whether the counts of three such steps are not on a line."""
    counts = np.array([counts_of(of_size(spec, size)) for size in sizes])
    return bool(np.linalg.det(counts[1:] - counts[0]).round())

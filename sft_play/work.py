"""What a traced step computes and moves: its operations with their sizes, in the order of a whole model.

It is part of a `StepTrace`, so one trace gives both memory and time. An operation's sizes are linear in the
tokens of its micro-batch, so two traces give every other token count. Nothing here knows about torch, or
about how fast any device is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

FREE, PRODUCT, ATTENTION, ATTENTION_BACKWARD, UNPACK, ELEMENTWISE, IN_PLACE, TRANSCENDENTAL = range(8)
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, TRANSFER, IN_RAM, ALL_TO_ALL = range(8, 14)
KINDS = (
    "views", "matrix products", "attention", "attention, backward", "NF4 unpacking", "element-wise",
    "in place", "transcendental", "all-gather", "reduce-scatter", "all-reduce",
    "transfers between GPU and RAM", "element-wise, in RAM", "all-to-all",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
M, N, K, TIMES, BYTES, FRESH = range(6)  # columns of `Work.sizes`
OWN, GATHERING, EXCHANGING = range(3)  # an operation of the model; for its weights, or their gradients


@dataclass(frozen=True)
class Work:
    """The operations of one micro-batch, forward and backward, and what the optimizer updates after it.

    A product is [m, k] x [k, n], repeated TIMES. Attention has its tokens in `m` and heads x head_dim in `k`:
    its cost depends on how the tokens are divided into sequences, which a trace does not know. For 4-bit
    weights `m` counts those that are unpacked. BYTES are read and written, FRESH are those of new memory;
    both are repeated TIMES. Of what processes exchange, BYTES are those of the whole tensor.
    """

    kinds: np.ndarray  # of each traced operation, int8
    dtypes: np.ndarray  # index into DTYPES, of what it reads
    by_python: np.ndarray  # whether the model's code called it (forward, recomputation); else autograd did
    by_engine: np.ndarray  # OWN, or what the engine does it for, int8
    sizes: np.ndarray  # [operations, 6]: M, N, K, TIMES, BYTES, FRESH
    order: np.ndarray  # what runs, with all layers: indices of traced operations
    layers: np.ndarray  # of the full-depth model, of each in `order`; -1 for those outside the layers
    backward_from: int  # index in `order` where the backward pass begins
    trained_elements: int
    trained_tensors: int

    def exchanged(self, kind: int) -> Counter[int]:
        """How many tensors of so many bytes this kind of operation exchanges in the micro-batch."""
        found = self.order[self.kinds[self.order] == kind]
        return Counter(np.rint(self.sizes[found, BYTES]).astype(int).tolist())

    def kept_gathered(self) -> "Work":
        """The same with weights that stay gathered from the forward to the backward pass."""
        again = np.arange(len(self.order)) >= self.backward_from
        return self._of(~(again & (self.by_engine[self.order] == GATHERING)))

    def unexchanged(self) -> "Work":
        """The same without the exchange of gradients."""
        return self._of(self.by_engine[self.order] != EXCHANGING)

    def _of(self, runs: np.ndarray) -> "Work":
        """The work of the operations that run, [n], of those in `order`."""
        return replace(
            self,
            order=self.order[runs],
            layers=self.layers[runs],
            backward_from=int(np.count_nonzero(runs[: self.backward_from])),
        )

    def same_operations(self, other: "Work") -> bool:
        """Whether both have the same operations in the same order, on any number of tokens."""
        return (
            np.array_equal(self.kinds, other.kinds)
            and np.array_equal(self.dtypes, other.dtypes)
            and np.array_equal(self.order, other.order)
        )


def mixed(kept: Work, recomputed: Work, apart: int) -> Work:
    """The work of a model whose last layers keep their activations, while the others are recomputed.

    Both are of the same micro-batch, one with all activations kept, one with all layers recomputed.
    """
    first = int(kept.layers.max()) + 1 - apart
    forwards = slice(kept.backward_from), slice(recomputed.backward_from)
    backwards = slice(kept.backward_from, None), slice(recomputed.backward_from, None)
    forward, forward_layers = _one_pass(kept, recomputed, first, *forwards)
    backward, backward_layers = _one_pass(kept, recomputed, first, *backwards)
    return replace(
        kept,
        kinds=np.concatenate([kept.kinds, recomputed.kinds]),
        dtypes=np.concatenate([kept.dtypes, recomputed.dtypes]),
        by_python=np.concatenate([kept.by_python, recomputed.by_python]),
        by_engine=np.concatenate([kept.by_engine, recomputed.by_engine]),
        sizes=np.concatenate([kept.sizes, recomputed.sizes]),
        order=np.concatenate([forward, backward]),
        layers=np.concatenate([forward_layers, backward_layers]),
        backward_from=len(forward),
    )


def _one_pass(
    kept: Work, recomputed: Work, first: int, of_kept: slice, of_recomputed: slice
) -> tuple[np.ndarray, np.ndarray]:
    """Operations of a pass through the layers, [n], and the layer of each, [n]; before `first`, recomputed.

    Those that are recomputed are in the place of those that are not.
    """
    layers, others = kept.layers[of_kept], recomputed.layers[of_recomputed]
    own, theirs = (layers < 0) | (layers >= first), (others >= 0) & (others < first)
    place = np.count_nonzero(own[: np.argmin(own)])
    order = recomputed.order[of_recomputed][theirs] + len(kept.kinds)
    return (
        np.insert(kept.order[of_kept][own], place, order),
        np.insert(layers[own], place, others[theirs]),
    )


def fused(work: Work) -> Work:
    """The work of a model whose layers are compiled: a chain of element-wise operations is one kernel.

    Nothing between them is written, so of those of a layer that run one after the other, the one that moves
    most bytes stands for all. What products and attention read and write is not fused with them.
    """
    kinds, moved = work.kinds[work.order], work.sizes[work.order, BYTES]
    light = np.isin(kinds, (FREE, ELEMENTWISE, IN_PLACE, TRANSCENDENTAL)) & (work.layers >= 0)
    begins = np.r_[True, (np.diff(work.layers) != 0) | (light[1:] != light[:-1])] | ~light
    begins[work.backward_from : work.backward_from + 1] = True
    chain = np.cumsum(begins)  # of each operation; one that is not fused is alone in its own
    last = np.lexsort((moved, chain))  # by chain, the largest at its end
    kept = np.sort(last[np.r_[np.diff(chain[last]) != 0, True]])
    return work._of(np.isin(np.arange(len(kinds)), kept))


def directions(counts: Sequence[tuple[float, float]]) -> np.ndarray:
    """What turns the growth of sizes between traces into slopes, [traces - 1, 2].

    `counts` are two of each trace, such as its tokens and its supervised tokens. Two traces give slopes that
    hold along the line between them, three that are not on one line give slopes that hold everywhere.
    """
    base, *others = np.asarray(counts, dtype=float)
    return np.linalg.pinv(others - base).T


@dataclass(frozen=True)
class WorkLine:
    """Work as a function of the tokens, exact for any number if the traces have the same operations."""

    base: Work
    tokens: float  # of the base
    per_token: np.ndarray  # [operations, 6]

    @classmethod
    def fit(cls, counts: Sequence[tuple[float, float]], works: Sequence[Work], share: float) -> "WorkLine":
        """Fits traces with the same operations to a line of this supervised share.

        `counts` are the tokens and supervised tokens of each: two with the same share, or three that are not
        on one line.
        """
        base, *others = works
        growth = np.stack([other.sizes - base.sizes for other in others], axis=-1)
        tokens, supervised = counts[0]
        slopes = growth @ directions(counts)
        per_token = slopes @ (1.0, share)
        start = base.sizes + slopes[..., 1] * (share * tokens - supervised)
        # In halves of the tokens, which odd numbers do not have.
        attends = np.isin(base.kinds, (ATTENTION, ATTENTION_BACKWARD))
        per_token[attends, M] = base.sizes[attends, M] / tokens
        start[attends, M] = base.sizes[attends, M]
        return cls(replace(base, sizes=start), tokens, per_token)

    @classmethod
    def in_proportion(cls, work: Work, tokens: int) -> "WorkLine":
        """The work of a single trace, scaled with its tokens."""
        per_token = np.zeros_like(work.sizes)
        per_token[:, TIMES] = work.sizes[:, TIMES] / tokens
        return cls(work, tokens, per_token)

    def at(self, tokens: float) -> Work:
        """The work of a micro-batch of `tokens` tokens; a mean may be fractional."""
        sizes = self.base.sizes + self.per_token * (tokens - self.tokens)
        return replace(self.base, sizes=np.maximum(sizes, 0))

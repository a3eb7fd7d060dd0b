"""How many supervised tokens fall to one of the processes that divide the tokens of a micro-batch. Pure."""

import numpy as np


def most_of_a_rank(lengths: np.ndarray, spans: np.ndarray, offsets: np.ndarray, ranks: int) -> np.ndarray:
    """The most supervised tokens that a process gets of each micro-batch of joined rows, [micro-batches].

    Of a row whose supervised tokens are in several places, what is between them counts as well, but no more
    than the row has.

    Args:
        lengths: tokens of the rows of all micro-batches, one after the other, [rows].
        spans: of each row, how many tokens are supervised, the first, and the one after the last, [rows, 3].
        offsets: where the rows of each micro-batch begin, [micro-batches].
        ranks: the processes. The tokens are divided evenly, after labels are shifted to the token before.
    """
    counts, first, end = spans.astype(np.int64).T
    rows = np.diff(np.append(offsets, len(lengths)))
    starts = np.cumsum(lengths) - lengths
    starts -= np.repeat(starts[offsets], rows)
    own = np.repeat(-(-np.add.reduceat(lengths, offsets) // ranks), rows)
    most = np.zeros(len(offsets), dtype=np.int64)
    for rank in range(ranks):
        inside = np.minimum(starts + end - 1, (rank + 1) * own) - np.maximum(starts + first - 1, rank * own)
        most = np.maximum(most, np.add.reduceat(np.clip(inside, 0, counts), offsets))
    return most

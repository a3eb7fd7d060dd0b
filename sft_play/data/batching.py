"""In which order rows are learned: one list for the whole run, made before training, the same on any number of processes.

The list is cut into optimizer steps of `rows_per_step` rows, steps into micro-batches, and micro-batches are dealt to the
processes in turn. So a step has the same rows whatever the world size, each row is seen once an epoch, and to resume is
to go on in the list. The last step of an epoch is filled up with FILLER, a row without supervised tokens: it weighs
nothing in a loss that is averaged over the supervised tokens of the step.
"""

import random
from collections.abc import Sequence

FILLER = -1

CHUNK_STEPS = 16  # rows are sorted by length within so many steps: enough to save most padding, far from sorting the epoch


def steps_per_epoch(rows: int, rows_per_step: int) -> int:
    """Optimizer steps in which each row is seen once."""
    return -(-rows // rows_per_step)


def epoch_order(lengths: Sequence[int], rows_per_step: int, seed: int, epoch: int, group_by_length: bool) -> list[int]:
    """Row numbers of one epoch, FILLER at the end of a step that is not full.

    With `group_by_length`, rows of similar length share a step; the steps themselves come in random order. Rows of a step
    are sorted by length, longest first, so that its micro-batches are even and filler shares the shortest.

    Example: 5 rows in steps of 2, as [[3, 0], [4, 1], [2, FILLER]] flattened.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    chunk = CHUNK_STEPS * rows_per_step if group_by_length else rows_per_step
    steps = []
    for start in range(0, len(order), chunk):
        rows = sorted(order[start : start + chunk], key=lambda row: -lengths[row])
        steps += [rows[i : i + rows_per_step] for i in range(0, len(rows), rows_per_step)]
    if group_by_length:
        rng.shuffle(steps)
    flat: list[int] = []
    for step in steps:
        flat += step + [FILLER] * (rows_per_step - len(step))
    return flat


def schedule(lengths: Sequence[int], rows_per_step: int, total_steps: int, seed: int, group_by_length: bool) -> list[int]:
    """Row numbers for `total_steps` optimizer steps, epoch after epoch.

    Raises:
        ValueError: there are no rows.
    """
    if not lengths:
        raise ValueError("there are no rows to train on")
    per_epoch = steps_per_epoch(len(lengths), rows_per_step)
    flat: list[int] = []
    for epoch in range(-(-total_steps // per_epoch)):
        flat += epoch_order(lengths, rows_per_step, seed, epoch, group_by_length)
    return flat[: total_steps * rows_per_step]


def padded_rows(rows: int, multiple: int) -> list[int]:
    """All rows in order, filled up to a multiple: evaluation that is split evenly and counts no row twice."""
    return list(range(rows)) + [FILLER] * (-rows % multiple)

"""The supervised tokens of processes that divide micro-batches, beside what each of them is given."""

import random

import numpy as np
import pytest
import torch

from sft_play.config.schema import RunConfig
from sft_play.data.batching import make_schedule
from sft_play.data.store import IGNORED
from sft_play.model.attention.sequence_parallel import Part, divide
from sft_play.planning.rows.facts import DataFacts, RowSizes
from sft_play.planning.rows.tokens_of_ranks import most_of_a_rank

Row = list[int]  # labels


def drawn_rows(pick: random.Random, count: int, *, scattered: bool) -> list[Row]:
    """Labels of rows: a question without any, an answer, and, if scattered, another one after a gap."""
    rows = []
    for _ in range(count):
        parts = [pick.randint(1, 30), pick.randint(0, 20)]
        parts += [pick.randint(0, 9), pick.randint(1, 9)] if scattered else [pick.choice((0, 0, 5))]
        labels = [label for place, size in enumerate(parts) for label in [(IGNORED, 7)[place % 2]] * size]
        rows.append(labels)
    return rows


def span(labels: Row) -> tuple[int, int, int]:
    places = [place for place, label in enumerate(labels) if label != IGNORED]
    return (len(places), places[0], places[-1] + 1) if places else (0, 0, 0)


def given(rows: list[Row], ranks: int) -> int:
    """The most labels that a process gets, from the code that divides micro-batches in training."""
    labels = torch.tensor([[label for row in rows for label in row]])
    batch = {
        "input_ids": labels,
        "labels": labels,
        "position_ids": torch.zeros_like(labels),
        "sequence_lengths": [len(row) for row in rows],
    }
    parts = [divide(batch, Part(rank, ranks, None), 0)["shift_labels"] for rank in range(ranks)]
    return max(int((part != IGNORED).sum()) for part in parts)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("scattered", [False, True])
def test_the_most_of_a_rank_is_what_training_gives_it(ranks, scattered):
    """Exactly if each row has its supervised tokens in one place; otherwise no less."""
    pick = random.Random(24)
    groups = [drawn_rows(pick, pick.randint(1, 5), scattered=scattered) for _ in range(40)]
    rows = [row for group in groups for row in group]
    offsets = np.cumsum([0, *map(len, groups[:-1])])
    lengths, spans = np.array(list(map(len, rows))), np.array(list(map(span, rows)))
    found = most_of_a_rank(lengths, spans, offsets, ranks).tolist()
    real = [given(group, ranks) for group in groups]
    assert all(ours >= theirs for ours, theirs in zip(found, real, strict=True))
    assert scattered or found == real


@pytest.mark.parametrize("packing", [False, True])
def test_each_micro_batch_of_a_run_is_looked_at(packing):
    """Rows of packed entries one by one; a micro-batch without rows has none."""
    rows = drawn_rows(random.Random(7), 23, scattered=False)
    lengths, spans = np.array(list(map(len, rows))), np.array(list(map(span, rows)))
    settings = {"model": {"name": "a"}, "data": {"train_path": "b"}, "train": {"packing": packing}}
    sizes = RowSizes(lengths, spans[:, 0], None, None, 64, (), spans)
    facts = DataFacts.of_sizes(sizes, RunConfig.model_validate(settings))
    schedule = make_schedule(
        facts.lengths,
        rows_per_step=3,
        accumulation=2,
        data_ranks=2,
        total_steps=9,
        seed=0,
        hidden_size=8,
        padding_free=True,
    )
    entries, offsets = schedule.micro_batches()
    real = []
    for first, last in zip(offsets[:-1], offsets[1:], strict=True):
        own = [entry for entry in entries[first:last].tolist() if entry >= 0]
        real.append(given([row for entry in own for row in rows_of(facts, rows, entry)], 2) if own else 0)
    assert facts._supervised_of_rank(schedule, 2).tolist() == real and 0 in real
    assert facts._supervised_of_rank(schedule, 1).tolist() == schedule.sums(facts.supervised).ravel().tolist()


def rows_of(facts: DataFacts, rows: list[Row], entry: int) -> list[Row]:
    """Those of an entry, found by their spans and lengths."""
    if facts.parts is None:
        return [rows[entry]]
    ends = [*facts.parts_from[1:].tolist(), len(facts.parts)]
    known = {(len(row), *span(row)): row for row in rows}
    places = range(facts.parts_from[entry], ends[entry])
    return [known[(int(facts.parts[at]), *facts.spans[at].tolist())] for at in places]

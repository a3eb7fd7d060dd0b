import pytest
import torch
from datasets import Dataset

from sft_play.sizing.planner import Plan
from sft_play.train.rows import (
    IGNORED,
    count_supervised,
    evaluation_rows,
    pack_rows,
    packed_collator,
    padded_collator,
    training_rows,
)
from tests.conftest import token_rows

ROWS = token_rows(50)
DATASET = Dataset.from_list(ROWS)
PAD = 0


def plan(rows_per_micro_batch: int, accumulation: int, world_size: int, steps: int, packing: bool = False) -> Plan:
    unit = 64 if packing else 1
    return Plan(
        micro_batch_size=rows_per_micro_batch * unit, gradient_accumulation_steps=accumulation, world_size=world_size,
        effective_batch_size=rows_per_micro_batch * accumulation * world_size * unit, engine="none", max_seq_len=64,
        packing=packing, gradient_checkpointing=False, mixed_precision="no", dtype="float32", attention="varlen_sdpa",
        learning_rate=1e-3, steps_per_epoch=steps, total_steps=steps, device="cpu",
    )  # fmt: skip


def rows_of(p: Plan):
    return training_rows(DATASET, p, seed=0, group_by_length=True, pad_id=PAD)


def test_packing_keeps_every_token_and_label_with_its_row():
    packed = pack_rows(DATASET, 64)
    found = []
    for row in packed:
        assert len(row["input_ids"]) == row["length"] == sum(row["sequence_lengths"]) <= 64
        start = 0
        for length in row["sequence_lengths"]:
            found.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
            start += length
    assert sorted(found) == sorted((row["input_ids"], row["labels"]) for row in ROWS)


def test_supervised_tokens_are_counted_by_row():
    expected = [sum(label != IGNORED for label in row["labels"]) for row in ROWS]
    assert count_supervised(DATASET).tolist() == expected
    assert count_supervised(DATASET.select([7, 3])).tolist() == [expected[7], expected[3]]


@pytest.mark.parametrize("cut", [(16, 1, 1), (1, 16, 1), (2, 4, 2), (4, 1, 4)])
def test_a_step_has_the_same_rows_however_it_is_cut(cut):
    whole, other = rows_of(plan(16, 1, 1, 4)), rows_of(plan(*cut, 4))
    assert whole.dataset["input_ids"] == other.dataset["input_ids"]
    assert whole.tokens_per_step == other.tokens_per_step


def test_an_epoch_learns_each_token_once_and_filler_nothing():
    rows = rows_of(plan(2, 4, 2, 4))
    assert len(rows.dataset) == 64
    assert sum(rows.tokens_per_step) == sum(row["length"] for row in ROWS)
    assert sum(rows.supervised_per_step) == count_supervised(DATASET).sum()
    fillers = [row for row in rows.dataset if row["input_ids"] == [PAD]]
    assert len(fillers) == 14 and all(row["labels"] == [IGNORED] for row in fillers)


def test_packed_steps_count_the_tokens_of_all_their_rows():
    packs = pack_rows(DATASET, 64)
    rows = rows_of(plan(2, 2, 1, -(-len(packs) // 4), packing=True))
    assert sum(rows.tokens_per_step) == sum(row["length"] for row in ROWS)


def test_evaluation_scores_no_row_twice():
    rows = evaluation_rows(DATASET, 16, PAD)
    assert len(rows) == 64
    assert count_supervised(rows).sum() == count_supervised(DATASET).sum()


def test_padded_batch_is_right_padded_without_a_mask():
    batch = padded_collator(PAD)([ROWS[0], ROWS[1]])
    longest = max(ROWS[0]["length"], ROWS[1]["length"])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (2, -(-longest // 8) * 8)
    assert "attention_mask" not in batch
    for i in (0, 1):
        length = ROWS[i]["length"]
        assert batch["input_ids"][i, :length].tolist() == ROWS[i]["input_ids"]
        assert (batch["labels"][i, length:] == IGNORED).all()


@pytest.mark.parametrize("flash", [False, True])
def test_packed_batch_is_one_row_with_its_boundaries(flash):
    packs = pack_rows(DATASET, 64)
    batch = packed_collator(flash)([packs[0], packs[1]])
    lengths = packs[0]["sequence_lengths"] + packs[1]["sequence_lengths"]
    assert batch["input_ids"].shape == (1, sum(lengths))
    assert (batch["position_ids"][0] == 0).nonzero().flatten().tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
    first_labels = batch["labels"][batch["position_ids"] == 0]
    assert (first_labels == IGNORED).all()
    if flash:
        assert torch.equal(batch["cu_seq_lens_q"].diff(), torch.tensor(lengths, dtype=torch.int32))
        assert batch["max_length_q"] == max(lengths)
    else:
        assert batch["sequence_lengths"] == lengths

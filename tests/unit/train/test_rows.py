import pytest
import torch
from datasets import Dataset

from sft_play.data import store
from sft_play.data.batching import Share, pack_shares, rows_per_epoch
from sft_play.data.store import count_supervised
from sft_play.model.collators import joined_micro_batches, padded_micro_batches
from sft_play.parts import IGNORED
from sft_play.plan import Plan
from sft_play.train.rows import evaluation_rows, training_rows
from tests.conftest import token_rows
from tests.plans import plan_of

ROWS = token_rows(50)
DATASET = Dataset.from_list(ROWS)
PAD = 0


def plan(
    accumulation: int, world_size: int, steps: int, *, packing: bool = False, padding_free: bool = True
) -> Plan:
    unit = 64 if packing else 1
    return plan_of(
        micro_batch_size=unit * 16 // (accumulation * world_size), gradient_accumulation_steps=accumulation,
        world_size=world_size, effective_batch_size=16 * unit, engine="none", max_seq_len=64, packing=packing,
        padding_free=padding_free, micro_batch_tokens=200, activations="keep", mixed_precision="no",
        dtype="float32", attention="varlen_sdpa", learning_rate=1e-3, steps_per_epoch=steps, total_steps=steps, device="cpu",
    )  # fmt: skip


def rows_of(p: Plan):
    return training_rows(DATASET, p, seed=0, hidden_size=32, pad_id=PAD)


def batches_of(rows) -> list[list[dict]]:
    """The rows of each micro-batch."""
    return [[rows.rows[number] for number in element["rows"]] for element in rows.dataset]


def packs_of(shares=None):
    return pack_shares([row["length"] for row in ROWS], 64, shares or [Share(len(ROWS))])


def test_a_packed_step_has_the_rows_of_its_sequences_and_copies_none():
    packs, _ = packs_of()
    rows = rows_of(plan(2, 2, -(-len(packs) // 16), packing=True))
    assert len(rows.rows) == len(ROWS) + 1  # and the filler
    batches = [[number for number in element["rows"] if number < len(ROWS)] for element in rows.dataset]
    assert sorted(number for batch in batches for number in batch) == list(range(len(ROWS)))
    whole = [pack for batch in batches for pack in _sequences(batch, packs)]
    assert sorted(whole) == sorted(packs)
    joined = joined_micro_batches(rows.rows, "lengths")([rows.dataset[0]])
    assert joined["sequence_lengths"] == [ROWS[number]["length"] for number in batches[0]]


def _sequences(batch, packs):
    """The packed sequences that a micro-batch consists of, each with its rows in order."""
    found = []
    while batch:
        pack = next(pack for pack in packs if pack[0] == batch[0])
        assert batch[: len(pack)] == pack
        found.append(pack)
        batch = batch[len(pack) :]
    return found


def test_supervised_tokens_are_counted_in_parts_of_the_rows(monkeypatch):
    expected = [sum(label != IGNORED for label in row["labels"]) for row in ROWS]
    for tokens in (1, 40, 300):
        monkeypatch.setattr(store, "BATCH_TOKENS", tokens)
        assert count_supervised(DATASET).tolist() == expected
    assert count_supervised(DATASET.select([])).tolist() == []


def test_supervised_tokens_are_counted_by_row():
    expected = [sum(label != IGNORED for label in row["labels"]) for row in ROWS]
    assert count_supervised(DATASET).tolist() == expected
    assert count_supervised(DATASET.select([7, 3])).tolist() == [expected[7], expected[3]]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("split", [(16, 1), (4, 1), (4, 2), (1, 4)])
def test_a_step_has_the_same_rows_however_it_is_cut(split, padding_free):
    whole, other = rows_of(plan(1, 1, 4)), rows_of(plan(*split, 4, padding_free=padding_free))
    assert whole.tokens_per_step == other.tokens_per_step
    bins = split[0] * split[1]
    for step in range(4):
        micro = [row for batch in batches_of(other)[step * bins : (step + 1) * bins] for row in batch]
        learned = [row["input_ids"] for row in micro if row["input_ids"] != [PAD]]
        asked = [row["input_ids"] for row in batches_of(whole)[step] if row["input_ids"] != [PAD]]
        assert sorted(learned) == sorted(asked)


def test_an_epoch_learns_each_token_once_and_filler_nothing():
    rows = rows_of(plan(4, 2, 4))
    assert len(rows.dataset) == 32
    assert sum(rows.tokens_per_step) == sum(row["length"] for row in ROWS)
    assert sum(rows.supervised_per_step) == count_supervised(DATASET).sum()
    fillers = [row for batch in batches_of(rows) for row in batch if row["input_ids"] == [PAD]]
    assert len(fillers) == 6  # the last step has 2 rows for 8 micro-batches
    assert all(row["labels"] == [IGNORED] for row in fillers)


def test_padding_is_counted_where_there_is_some():
    assert rows_of(plan(4, 1, 4)).padding_share == 0
    padded = rows_of(plan(4, 1, 4, padding_free=False))
    assert 0.05 < padded.padding_share < 0.5
    assert sum(padded.dataset["tokens"]) * (1 - padded.padding_share) == pytest.approx(
        sum(padded.tokens_per_step),
        rel=5e-3,  # a filler counts as one token
    )


def test_a_packed_epoch_has_each_token_as_often_as_its_share_says():
    shares = [Share(20, 3), Share(30)]
    packs, packed = packs_of(shares)
    per_epoch = rows_per_epoch(packed)
    whole = plan(2, 1, -(-per_epoch // 16), packing=True)
    rows = training_rows(DATASET, whole, seed=0, hidden_size=32, pad_id=PAD, shares=shares)
    lengths = [row["length"] for row in ROWS]
    assert sum(rows.tokens_per_step) == 3 * sum(lengths[:20]) + sum(lengths[20:])
    assert len(packs) == sum(share.rows for share in packed)


def test_packed_steps_count_the_tokens_of_all_their_rows():
    packs, _ = packs_of()
    rows = rows_of(plan(2, 1, -(-len(packs) // 16), packing=True))
    assert sum(rows.tokens_per_step) == sum(row["length"] for row in ROWS)


@pytest.mark.parametrize("settings", [{}, {"rows_per_batch": 3}, {"padded": True}])
def test_evaluation_scores_each_row_once_in_batches_within_the_token_budget(settings):
    padded = settings.pop("padded", False)
    batches = evaluation_rows(DATASET, plan(4, 2, 4, padding_free=not padded), pad_id=PAD, **settings)
    assert len(batches.dataset) % 2 == 0
    scored = [row for batch in batches_of(batches) for row in batch]
    assert sorted(r["input_ids"] for r in scored if r["input_ids"] != [PAD]) == sorted(
        r["input_ids"] for r in ROWS
    )
    if not settings and not padded:
        assert max(batches.dataset["tokens"]) <= 200


def test_padded_batch_is_right_padded_without_a_mask():
    taken = [ROWS[7], ROWS[3], ROWS[0]]
    batch = padded_micro_batches(DATASET, PAD)([{"rows": [7, 3, 0]}])
    longest = max(row["length"] for row in taken)
    assert (
        batch["input_ids"].shape
        == batch["labels"].shape
        == batch["position_ids"].shape
        == (3, -(-longest // 8) * 8)
    )
    assert "attention_mask" not in batch
    assert (batch["position_ids"] == torch.arange(-(-longest // 8) * 8)).all()
    for i, row in enumerate(taken):
        length = row["length"]
        assert batch["input_ids"][i, :length].tolist() == row["input_ids"]
        assert batch["labels"][i, :length].tolist() == row["labels"]
        assert (batch["input_ids"][i, length:] == PAD).all()
        assert (batch["labels"][i, length:] == IGNORED).all()


@pytest.mark.parametrize("flash", [False, True])
def test_joined_rows_are_one_sequence_with_its_boundaries(flash):
    batch = joined_micro_batches(DATASET, "offsets" if flash else "lengths")([{"rows": [7, 3]}])
    taken = [ROWS[7], ROWS[3]]
    lengths = [row["length"] for row in taken]
    assert batch["input_ids"].tolist() == [taken[0]["input_ids"] + taken[1]["input_ids"]]
    assert batch["labels"].tolist() == [taken[0]["labels"] + taken[1]["labels"]]
    assert batch["position_ids"][0].tolist() == [place for n in lengths for place in range(n)]
    assert (batch["labels"][batch["position_ids"] == 0] == IGNORED).all()
    if flash:
        assert torch.equal(batch["cu_seq_lens_q"].diff(), torch.tensor(lengths, dtype=torch.int32))
        assert batch["max_length_q"] == max(lengths)
    else:
        assert batch["sequence_lengths"] == lengths

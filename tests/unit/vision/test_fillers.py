"""A micro-batch without rows, in a short step, is planned with what it holds: a filler, and perhaps a picture."""

from functools import partial

import pytest

from sft_play.config.schema import RunConfig
from sft_play.data.batching import Share
from sft_play.data.store import column_of, count_supervised
from sft_play.model.collators import joined_micro_batches, padded_micro_batches
from sft_play.planning.candidates.batch import BatchSplit
from sft_play.planning.rows.facts import DataFacts, RowSizes
from sft_play.train.rows import training_rows
from sft_play.vision.batches import with_pictures
from sft_play.vision.fits import fits_of_rows
from sft_play.vision.looks import look_of
from tests.plans import plan_of
from tests.vision_models import config_of, picture_rows, random_pixels

HIDDEN = 64


def a_step_of_one_row(facts, joined):
    """The plan of a step of four micro-batches, of which three are without rows."""
    split = BatchSplit(effective=4, accumulation=4, data_ranks=1)
    most, _ = facts.largest_micro_batch(split, 1, HIDDEN, joined)
    return plan_of(
        micro_batch_size=1, gradient_accumulation_steps=4, world_size=1, effective_batch_size=4, engine="none",
        max_seq_len=512, packing=False, padding_free=joined, micro_batch_tokens=most, activations="keep",
        mixed_precision="no", dtype="float32", attention="varlen_sdpa", learning_rate=1e-3, steps_per_epoch=1,
        total_steps=1, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("images", [1, 0])
@pytest.mark.parametrize(
    ("kind", "joined"), [("qwen3_5", False), ("smolvlm", False), ("smolvlm", True), ("gemma3", True)]
)
def test_the_shapes_that_are_planned_are_those_of_the_batches(kind, joined, images):
    rows, look = picture_rows(kind, 1, seed=3, images=[images]), look_of(config_of(kind))
    tree = {"model": {"name": "x"}, "data": {"train_path": "x"}, "tuning": {"mode": "full", "vision": "full"}}
    sizes = RowSizes(column_of(rows, "length"), count_supervised(rows), None, None, 512, (Share(1),))
    fits, fits_from = fits_of_rows(rows)
    sizes = RowSizes(**vars(sizes) | {"fits": fits, "fits_from": fits_from})
    facts = DataFacts.of_sizes(sizes, RunConfig.model_validate(tree), look)
    plan = a_step_of_one_row(facts, joined)
    planned = facts.batches_of(plan, HIDDEN).train
    batches = training_rows(rows, plan, seed=0, hidden_size=HIDDEN, pad_id=0)
    collator_of = partial(joined_micro_batches, boundaries="lengths")
    if not joined:
        collator_of = partial(padded_micro_batches, pad_id=0)
    pixels = random_pixels(look)
    collate = with_pictures(
        collator_of, batches.rows, look, lambda seen, _: [*map(pixels, seen)], always=bool(images)
    )
    assert any(each.place for each in planned)
    for each in planned:
        batch = collate([batches.dataset[each.place]])
        assert each.batch.shape == tuple(batch["input_ids"].shape)
        assert list(each.lengths) == batch.get("sequence_lengths", [])
        assert each.units == len(batch.get("pixel_values", ()))

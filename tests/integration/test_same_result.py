"""What must not change the result does not change it: one process, really trained, fp32, dropout 0."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_play.data.packing import pack
from sft_play.errors import NonFiniteError
from sft_play.train.trainer import train
from tests.conftest import VOCABULARY, token_rows
from tests.integration.jobs import SEQ, losses, make_job

CLOSE = dict(rel=2e-6)  # fp32: sums in another order; the largest difference seen is 3e-7


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tiny_model, tmp_path_factory):
    """Loss curves of the plain runs, by mode."""
    curves = {}

    def of(mode: str) -> tuple[list[float], list[float]]:
        if mode not in curves:
            job = make_job(tiny_model, tmp_path_factory.mktemp("reference"), mode, mode=mode, batch_size=16)
            train(job)
            curves[mode] = losses(job)
        return curves[mode]

    return of


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
@pytest.mark.parametrize(
    "change", [{"batch_size": 1}, {"batch_size": 4, "gradient_checkpointing": True}], ids=["1x16", "ckpt 4x4"]
)
def test_accumulation_and_checkpointing_do_not_change_the_loss_curve(tiny_model, tmp_path, reference, mode, change):
    job = make_job(tiny_model, tmp_path, "other", mode=mode, **change)
    train(job)
    close = CLOSE if mode != "qlora" else dict(rel=2e-4)  # the 4-bit kernel rounds by the shape of its input
    for ours, theirs in zip(losses(job), reference(mode), strict=True):
        assert ours == pytest.approx(theirs, **close)


def test_packed_rows_give_the_loss_of_the_same_rows_unpacked(tiny_model, tmp_path):
    """One step holds all rows, so both runs learn from the same set in each step."""
    rows = token_rows(32)
    unpacked = make_job(tiny_model, tmp_path, "unpacked", rows=rows, effective_batch_size=32)
    packs = len(pack([row["length"] for row in rows], SEQ))
    packed = make_job(tiny_model, tmp_path, "packed", rows=rows, packing=True, effective_batch_size=packs * SEQ, batch_size=SEQ)
    for job in (unpacked, packed):
        train(job)
    assert packed.plan.steps_per_epoch == unpacked.plan.steps_per_epoch == 1
    for ours, theirs in zip(losses(packed), losses(unpacked), strict=True):
        assert ours == pytest.approx(theirs, **CLOSE)


def test_tokens_without_supervision_have_no_influence_through_the_loss(tiny_model, tmp_path):
    """What an unsupervised token *predicts* must not count: a row's tail after the last supervised token is changed."""
    rng = random.Random(3)
    rows, changed = [], []
    for row in token_rows(32):
        tail = [rng.randrange(3, VOCABULARY) for _ in range(4)]
        other = [rng.randrange(3, VOCABULARY) for _ in range(4)]
        for target, extra in ((rows, tail), (changed, other)):
            labels = row["labels"] + [-100] * 4
            target.append({"input_ids": row["input_ids"] + extra, "labels": labels, "length": row["length"] + 4})
    curves = []
    for name, data in (("one", rows), ("two", changed)):
        job = make_job(tiny_model, tmp_path, name, rows=data)
        train(job)
        curves.append(losses(job))
    assert curves[0] == curves[1]


def test_resume_equals_no_interruption_bit_for_bit(tiny_model, tmp_path):
    def weights(job):
        return load_file(job.run.adapter / "adapter_model.safetensors")

    settings = dict(max_steps=8, save_steps=3, eval_steps=3, batch_size=4)
    whole = make_job(tiny_model, tmp_path, "whole", **settings)
    train(whole)
    again = make_job(tiny_model, tmp_path, "again", **settings)
    train(again)
    for folder in again.run.checkpoints.glob("checkpoint-8"):
        (folder / "trainer_state.json").write_text("{")  # as after a kill in the last save
    resumed = make_job(tiny_model, tmp_path, "again", **settings, resume="auto")
    train(resumed)
    assert losses(resumed) == losses(whole)
    expected = weights(whole)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_gradient_that_is_not_finite_stops_the_run_before_anything_of_it_is_saved(tiny_model, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    weights = load_file(tiny_model / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    job = make_job(folder, tmp_path, "nan", mode="full")
    with pytest.raises(NonFiniteError, match="step 1"):
        train(job)
    assert not job.run.model.exists() and not list(job.run.checkpoints.glob("checkpoint-*"))

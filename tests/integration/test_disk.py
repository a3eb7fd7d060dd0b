"""A disk that fills up while a run writes its checkpoints."""

import pytest

from sft_play.errors import StorageError
from sft_play.train.trainer import train
from tests.conftest import file_size_limit
from tests.integration.jobs import losses, make_job


# The weights of the tiny model are 430 kB, its optimizer state twice that: safetensors' error, then
# torch.save's.
@pytest.mark.parametrize("limit", [200_000, 600_000], ids=["weights", "optimizer"])
def test_a_full_disk_is_told_in_words_and_the_run_can_go_on(tiny_model, tmp_path, limit):
    settings = dict(mode="full", batch_size=16, save_steps=2, eval_steps=2, max_steps=4)
    whole = make_job(tiny_model, tmp_path, "whole", **settings)
    train(whole)
    job = make_job(tiny_model, tmp_path, "full-disk", **settings)
    with (
        file_size_limit(limit),
        pytest.raises(StorageError, match="cannot write to .*full-disk: .*make resume"),
    ):
        train(job)
    resumed = make_job(tiny_model, tmp_path, "full-disk", **settings, resume="auto")
    train(resumed)
    assert losses(resumed) == losses(whole)

"""What the libraries raise when a write into the run directory fails, and what it is taken for."""

import shutil

import pytest
from torch.utils.tensorboard import SummaryWriter

from sft_play.errors import StorageError
from sft_play.runlog import RunDir
from sft_play.train.disk import disk_errors_explained


def test_a_folder_of_tensorboard_that_was_removed_with_the_run_is_a_failure_of_the_disk(tmp_path):
    run = RunDir(tmp_path / "one")
    writer = SummaryWriter(str(run.path / "tensorboard"), max_queue=1)
    shutil.rmtree(run.path)
    run.checkpoints.mkdir(parents=True)  # as the next checkpoint makes it again
    found = pytest.raises(StorageError, match="cannot write to .*No such file.*: make resume NGPU=3")
    with found, disk_errors_explained(run, "make resume NGPU=3"):
        for step in range(1000):
            writer.add_scalar("loss", 1.0, step)
            writer.flush()

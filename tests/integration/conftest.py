"""One finished run for all that comes after training."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sft_play.runlog import RunDir
from tests.integration.cli import Done, finish, make_workspace, start


class Finished(NamedTuple):
    config: Path
    run: RunDir
    done: Done


@pytest.fixture(scope="module")
def one_thread():
    """For runs in this process: tests run side by side, and with more threads sums change their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def finished(tiny_model, make_cache, tmp_path_factory) -> Finished:
    """`python -m sft_play train`, as a person runs it: LoRA, one process."""
    folder = tmp_path_factory.mktemp("finished")
    config = make_workspace(folder, tiny_model)
    cache = str(make_cache(folder / "cache"))
    done = finish(start("train", "--config", config, SFT_PLAY_CACHE=cache, COLUMNS="80"))
    assert done.code == 0, done.err
    return Finished(config, RunDir(folder / "runs" / "one"), done)

"""One finished run for all that comes after training."""

from pathlib import Path
from typing import NamedTuple

import pytest

from sft_play.runlog import RunDir
from tests.integration.cli import Done, finish, make_workspace, start


class Finished(NamedTuple):
    config: Path
    run: RunDir
    done: Done


@pytest.fixture(scope="session")
def finished(tiny_model, make_cache, tmp_path_factory) -> Finished:
    """`python -m sft_play train`, as a person runs it on a CPU: LoRA, one process."""
    folder = tmp_path_factory.mktemp("finished")
    config = make_workspace(folder, tiny_model)
    values = {
        "SFT_PLAY_CACHE": str(make_cache(folder / "cache")),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
    }
    done = finish(start("train", "--config", config, **values))
    assert done.code == 0, done.err
    return Finished(config, RunDir(folder / "runs" / "one"), done)

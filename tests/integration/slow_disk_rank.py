"""scripts/train_distributed.py with a disk that takes rank 0 longer than parallel.timeout_s for what it saves.

SECONDS: of each save. SLOW_DISK: bytes per second that are waited for.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from sft_play.machine.process import die_with_parent


def slowed(function: Any, seconds: float) -> Any:
    """The function, which sleeps first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    die_with_parent()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone
    from sft_play.cli import run_rank
    from sft_play.train import disk, saving
    from sft_play.train.checkpoints import CheckpointWriter

    disk.SLOW_DISK = float(os.environ["SLOW_DISK"])
    if os.environ["RANK"] == "0":
        seconds = float(os.environ["SECONDS"])
        CheckpointWriter._complete = slowed(CheckpointWriter._complete, seconds)
        saving._write = slowed(saving._write, seconds)
    raise SystemExit(run_rank(sys.argv[1:]))

"""scripts/train_distributed.py whose probes find one plan the fastest, and may fail on rank 1.

FASTEST=<accumulation>: steps of other plans seem to take longer. FAULT=<fault>@<accumulation>: memory runs out
in the probe of that plan ("memory"), or the rank is killed in it ("kill").
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from sft_play.machine.process import die_with_parent


def favour(accumulation: int) -> None:
    """Makes the probes of this process find plans with this accumulation ten times as fast as others."""
    from sft_play.train import probe

    def seconds(session: Any, *_: Any) -> float:
        return 0.01 if session.job.plan.batch.accumulation == accumulation else 0.1

    probe._average_step = seconds


def fail(fault: str, accumulation: int) -> None:
    """Makes the probe of a plan with this accumulation fail in this process."""
    from sft_play.train import probe
    from tests.integration.memory_faults import run_out

    run = probe._run

    def failing(session: Any, *given: Any) -> None:
        if session.job.plan.batch.accumulation == accumulation:
            run_out() if fault == "memory" else os.kill(os.getpid(), signal.SIGKILL)
        run(session, *given)

    probe._run = failing


if __name__ == "__main__":
    die_with_parent()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone
    from sft_play.cli import run_rank

    favour(int(os.environ["FASTEST"]))
    fault, _, accumulation = os.environ.get("FAULT", "").partition("@")
    if fault and os.environ["RANK"] == "1":
        fail(fault, int(accumulation))
    raise SystemExit(run_rank(sys.argv[1:]))

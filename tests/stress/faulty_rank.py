"""scripts/train_distributed.py with a fault: FAULT=<fault>@<step> is injected into rank 1.

The time of the fault is written to the file FAULT_NOTE. Faults: see FAULTS.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sft_play.machine.process import die_with_parent

RANK = "1"


def _raise() -> None:
    raise ValueError("an injected fault")


def _spin() -> None:
    while True:  # a signal interrupts sleep(3)
        ctypes.PyDLL(None).sleep(3600)  # PyDLL does not release the GIL, so no other thread can run


FAULTS = {
    "raise": _raise,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda: time.sleep(3600),
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def inject(fault: str, step: int, note: Path) -> None:
    """Makes the trainer of this process call the fault at the beginning of a step."""
    from transformers import TrainerCallback

    from sft_play.train import session

    class Fault(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step + 1 == step:
                note.write_text(str(time.time()))
                FAULTS[fault]()

    callbacks = session._callbacks
    session._callbacks = lambda *given: [*callbacks(*given), Fault()]


if __name__ == "__main__":
    die_with_parent()
    from sft_play.cli import run_rank

    if os.environ.get("RANK") == RANK:
        fault, step = os.environ["FAULT"].split("@")
        inject(fault, int(step), Path(os.environ["FAULT_NOTE"]))
    raise SystemExit(run_rank(sys.argv[1:]))

"""scripts/train_distributed.py with a fault: FAULT=<what>@<step> strikes rank 1 and writes down when.

what: raise, exit, kill, segfault, sleep, spin, stop (see FAULTS)
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sft_play.launch.guard import die_with_parent

RANK = "1"


def _raise() -> None:
    raise ValueError("a fault on purpose")


def _spin() -> None:
    while True:  # a signal ends sleep(3)
        ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock: no other thread of this process runs


FAULTS = {
    "raise": _raise,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda: time.sleep(3600),
    "spin": _spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def strike_at(fault: str, step: int, note: Path) -> None:
    """Makes the trainer of this process do `fault` at the beginning of a step."""
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
        strike_at(fault, int(step), Path(os.environ["FAULT_NOTE"]))
    raise SystemExit(run_rank(sys.argv[1:]))

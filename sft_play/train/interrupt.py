"""Ctrl-C before the first step, when there is nothing to save."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 1.0


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within it, Ctrl-C raises KeyboardInterrupt until that arrives at the end of the block.

    Python drops an exception that a signal raises while a destructor or a weak reference's callback runs, as
    garbage collection does in a probe: one Ctrl-C may have no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    arrived = threading.Event()

    def again() -> None:
        while not arrived.wait(AGAIN_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)

    repeating = threading.Thread(target=again, daemon=True)

    def interrupt(number: int, frame: Any) -> None:
        if repeating.ident is None:
            repeating.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        arrived.set()
        signal.signal(signal.SIGINT, before)
        if repeating.ident is not None:
            repeating.join()
            raise KeyboardInterrupt

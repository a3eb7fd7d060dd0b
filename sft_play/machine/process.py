"""This process: it dies with its parent, and keeps the garbage collector from work that makes no garbage.

CLI -> (this module, which execs accelerate launch) -> ranks

Each of them asks the kernel to kill it when its parent dies, even if that is killed with SIGKILL.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sft_play.start import part
from sft_play.upstream.bitsandbytes import compiled_when_called
from sft_play.upstream.transformers import exports_read_once

LAUNCHER_VARIABLE = "SFT_PLAY_LAUNCHER"  # process id of the expected parent
PR_SET_PDEATHSIG = 1


def die_with_parent(expected: int | None = None) -> None:
    """Makes the kernel kill this process when its parent dies; call it first, before anything slow.

    That the parent died before the call is detected by its process id, `expected` or in the launcher's
    variable; under torchrun or plain python there is none.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = expected or int(os.environ.get(LAUNCHER_VARIABLE, "0"))
    if expected and os.getppid() != expected:  # it died during startup, so the kernel will not kill us
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within it, these signals call the handler; one that is ignored stays so, as SIGHUP under `nohup`.

    Only the main thread can set handlers: in another one, nothing changes.
    """
    known = numbers if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP (a closed terminal) raise KeyboardInterrupt, as Ctrl-C does.

    So they end the process with a word, and everything that is to be tidied up is.
    """
    owner = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a worker that was forked meanwhile ends as if this was not here
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")

    with handling((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def collector_off() -> Iterator[None]:
    """Turns the garbage collector off, which also frees cycles at random moments.

    It takes a sixth of the time of importing PyTorch and transformers, and a third of that of a trace.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing_libraries() -> Iterator[None]:
    """The same, for imports: they live as long as the process, so they are never looked at again.

    Otherwise each full collection, of which the start of a run needs several, takes a quarter of a second.
    """
    known = len(sys.modules)
    with collector_off(), part("imports"), compiled_when_called(), exports_read_once():
        yield
        if len(sys.modules) > known:  # else it would only keep the garbage of what ran before
            gc.freeze()  # before the collector is on again, and looks at all of it at once


def main(command: list[str]) -> None:
    """Execs `command`, which stays tied to its parent and is the parent that the ranks expect."""
    die_with_parent()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.execvp(command[0], command)  # no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])

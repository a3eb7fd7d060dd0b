"""Limits on what a chat template may take for a row, or a pattern for names; neither has any of its own.

Time is measured by a timer of the kernel that interrupts this process, memory by its address space.
"""

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sft_play.units import MIB

Result = TypeVar("Result")

ROW_SECONDS, ROW_BYTES, ROW_CHARACTERS = 5.0, 512 * MIB, 2**26  # CPU time, memory and text of one rendering
AGAIN_SECONDS = 0.5  # the signal is repeated: Python drops an exception that is raised within a destructor
STATM = Path("/proc/self/statm")

_inside = False  # whether a `limited_renderings` block is running


class TemplateOverrun(RuntimeError):
    """A template took more time, memory or text for a row than it may."""


@contextmanager
def limited_renderings() -> Iterator[None]:
    """Prepares the limits once for all calls of `within_limits` in the block; nested blocks have no effect.

    A single operation that takes long, such as 9**9**9, is not interrupted. In threads other than the main
    one there are no limits, without /proc none on memory.
    """
    global _inside
    timed = threading.current_thread() is threading.main_thread()
    if _inside or not timed:
        yield
        return
    earlier, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, _overrun)
    _limit_memory()
    _inside = True
    try:
        yield
    finally:
        _inside = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, earlier)


def within_limits(call: Callable[[], Result]) -> Result:
    """What `call` returns; raises TemplateOverrun beyond ROW_SECONDS of CPU time or ROW_BYTES more memory."""
    with limited_renderings():
        if _inside:
            signal.setitimer(signal.ITIMER_PROF, ROW_SECONDS, AGAIN_SECONDS)
        try:
            return call()
        except MemoryError:
            if _inside:
                _limit_memory()  # what earlier rows of the block have taken does not count
        try:
            return call()
        except MemoryError:
            text = f"it uses more than {ROW_BYTES // MIB} MiB of memory on one row"
            raise TemplateOverrun(text) from None


def require_length(text: str) -> str:
    """The text itself; raises TemplateOverrun if it is too long."""
    if len(text) > ROW_CHARACTERS:
        raise TemplateOverrun(f"it writes more than {ROW_CHARACTERS:,} characters for one row")
    return text


def _overrun(number: int, frame: object) -> None:
    raise TemplateOverrun(f"it ran for more than {ROW_SECONDS:g} s on one row")


def _limit_memory() -> None:
    """Limits this process to ROW_BYTES more than it has now."""
    if not STATM.exists():
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = int(STATM.read_text().split()[0]) * resource.getpagesize() + ROW_BYTES
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))

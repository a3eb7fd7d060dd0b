"""Python's garbage collector, kept away from work that makes many objects and hardly any garbage."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
    with collector_off():
        yield
        if len(sys.modules) > known:  # else it would only keep the garbage of what ran before
            gc.freeze()  # before the collector is on again, and looks at all of it at once

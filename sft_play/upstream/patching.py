"""How this room changes a library: for a block, or until the command that needs the change is over."""

import atexit
import builtins
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sft_play.errors import ConfigError
from sft_play.spelling import make

# The blocks of `undone` that are open, the innermost last, each with what lasts until its end. The first one
# is the process, which a command ends with.
_OPEN: list[tuple[ExitStack, set[Any]]] = [(ExitStack(), set())]


@contextmanager
def undone() -> Iterator[None]:
    """After the block, libraries are as they were before it: what `lasting` has begun there is undone."""
    with ExitStack() as stack:
        _OPEN.append((stack, set()))
        try:
            yield
        finally:
            _OPEN.pop()


def lasting(change: Callable[..., AbstractContextManager[Any]], *args: object) -> None:
    """Enters `change(*args)` until the innermost block of `undone` ends, unless the same lasts already.

    For what several share, none of whom can end it.
    """
    if not any((change, *args) in known for _, known in _OPEN):
        stack, known = _OPEN[-1]
        if len(_OPEN) == 1 and not known:
            atexit.register(stack.close)  # while what it puts back is still there
        stack.enter_context(change(*args))
        known.add((change, *args))


@contextmanager
def patched(target: Any, name: str, value: object, *, builtin: bool = False) -> Iterator[None]:
    """In the block, `target.name`, or with `builtin` one of Python's own names there, is `value`.

    Raises:
        ConfigError: there is no such name, so the patch would have no effect.
    """
    if not hasattr(builtins if builtin else target, name):
        raise ConfigError(
            f"{target.__name__} has no {name}, which SFT-Play replaces: this version of the library is not "
            f"supported; run `{make('install')}` for one that is"
        )
    missing = object()
    before = vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name) if before is missing else setattr(target, name, before)

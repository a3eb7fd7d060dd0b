"""How this room changes a library: for a block, or until the command that needs the change is over."""

import builtins
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sft_play.errors import ConfigError

# The blocks of `undone` that are open, the innermost last. What begins outside of them lasts as long as the
# process, as in a command that ends with it.
_OPEN = [ExitStack()]


@contextmanager
def undone() -> Iterator[None]:
    """After the block, libraries are as they were before it: what `lasting` has begun there is undone."""
    with ExitStack() as stack:
        _OPEN.append(stack)
        try:
            yield
        finally:
            _OPEN.remove(stack)


def lasting(patch: AbstractContextManager[Any]) -> None:
    """Begins a change that many share, and none of them can end: it ends with the block of `undone`."""
    _OPEN[-1].enter_context(patch)


@contextmanager
def patched(target: Any, name: str, value: Any, *, builtin: bool = False) -> Iterator[None]:
    """In the block, `target.name`, or with `builtin` one of Python's own names there, is `value`.

    Raises:
        ConfigError: there is no such name, so the patch would have no effect.
    """
    if not hasattr(builtins if builtin else target, name):
        raise ConfigError(
            f"{target.__name__} has no {name}, which SFT-Play replaces: this version of the library is not "
            "supported; run `make install` for one that is"
        )
    missing = object()
    before = vars(target).get(name, missing)
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name) if before is missing else setattr(target, name, before)

"""What we change in accelerate, and take of its private parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def forget_state() -> None:
    """Lets accelerate find out anew which processes there are, and with what precision they compute."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it has no public way


@contextmanager
def state_of_a_run() -> Iterator[None]:
    """After the block, accelerate's state is as before it.

    It is one for the process: an `Accelerator` of the user's own would be refused where its precision
    differs. What makes this unnecessary: a state that belongs to an `Accelerator`.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept: list[tuple[Any, dict[str, Any]]] = [
        (kind, dict(kind._shared_state)) for kind in (PartialState, AcceleratorState, GradientState)
    ]
    try:
        yield
    finally:
        for kind, before in kept:
            kind._shared_state.clear()
            kind._shared_state.update(before)

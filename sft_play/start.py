"""Where the seconds go from the command to the first step of a run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Set by the launcher for its ranks: when the command began, in seconds since the epoch.
BEGAN_VARIABLE = "SFT_PLAY_BEGAN"


@dataclass
class Clock:
    """The one of this process: it gives all seconds to the part that runs."""

    running: list[str] = field(default_factory=list)  # the innermost part last
    seconds: dict[str, float] = field(default_factory=dict)
    counted_until: float = 0.0  # time.monotonic()
    began: float | None = None  # of a run that is not the first of this process, since the epoch
    result: dict[str, float] | None = None  # of the run that has begun to train

    def count(self) -> None:
        """Gives the seconds since the last call to the innermost part."""
        now = time.monotonic()
        if self.running:
            name = self.running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.counted_until
        self.counted_until = now


_clock = Clock()


@contextmanager
def part(name: str) -> Iterator[None]:
    """The seconds of the block are those of this part; what another part takes within it is not."""
    _clock.count()
    _clock.running.append(name)
    try:
        yield
    finally:
        _clock.count()
        _clock.running.pop()


def run_begins() -> None:
    """Forgets an earlier run of this process; the first one began with the process."""
    if _clock.result is not None:
        _clock.seconds.clear()
        _clock.began, _clock.result = time.time(), None


def began() -> float:
    """When the command began that this process serves, in seconds since the epoch."""
    return _clock.began or float(os.environ.get(BEGAN_VARIABLE, 0)) or _process_began()


def _process_began() -> float:
    import psutil

    return psutil.Process().create_time()


def seconds_of_start() -> dict[str, float]:
    """Part -> seconds until this was first called, the longest first, then "other" and "all".

    In a rank, "launch" is what passed before it was started.
    """
    if _clock.result is None:
        _clock.count()
        parts, whole = dict(_clock.seconds), time.time() - began()
        if BEGAN_VARIABLE in os.environ and _clock.began is None:
            parts["launch"] = _process_began() - began()
        parts = dict(sorted(parts.items(), key=lambda each: -each[1]))
        parts |= {"other": whole - sum(parts.values()), "all": whole}
        _clock.result = {name: round(seconds, 2) for name, seconds in parts.items()}
    return _clock.result


def start_line(seconds: dict[str, float]) -> str:
    """The parts in one line."""
    parts = (f"{name} {took:.1f}" for name, took in seconds.items() if name != "all" and took >= 0.05)
    return f"{seconds['all']:.1f} s from the command to the first step: {', '.join(parts)}"

"""What runs have found out about kernels and compiled layers, timed on this device beside what was in use."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from sft_play.cache import entry, read_value, update_value, write_value
from sft_play.config.schema import RunConfig
from sft_play.plan import Plan
from sft_play.planning.speed.measured_speed import HALF_LIFE_S, in_common
from sft_play.sizing.estimate.corrections import record_path
from sft_play.units import format_duration

TO_COMPILE = "seconds to compile decoder layers"
LEAST_GAIN = 0.02  # of a step's time; what is faster by less may be so by chance


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How kernels did beside others: seconds of a step of each, or what spoke against them."""

    seconds: float | None = None
    beside: float | None = None
    spread: float = 0.0  # between steps of the same side, in seconds
    first_seconds: float = 0.0  # how much longer than that it took until the first step with them was done
    problem: str = ""
    at: float = 0.0  # seconds since 1970

    @property
    def share(self) -> float:
        """Of the time that a step took with the others; infinite if it could not be told."""
        return self.seconds / self.beside if self.seconds and self.beside and not self.problem else math.inf

    @property
    def wins(self) -> bool:
        """Whether they are faster by more than chance explains."""
        beside = self.beside or 0.0
        return (1 - self.share) * beside > max(self.spread, LEAST_GAIN * beside)

    def pays(self, steps: int, share: float = 1.0) -> bool:
        """Whether what a run of so many steps gains by them is more than the first step costs.

        It would take that share of the time `beside` without them.
        """
        gain = share * (self.beside or 0.0) - (self.seconds or 0.0)
        return self.wins and gain * steps > self.first_seconds

    def beside_own(self, in_use: "Verdict | None") -> "Verdict":
        """The same beside our own kernels, if those in use had been found to be faster than these."""
        if in_use is None or not self.beside or not in_use.wins:
            return self
        return replace(self, beside=self.beside / in_use.share)

    def said(self, label: str) -> str:
        """What was found, in a line; the label is that of the kernels."""
        if self.problem or not self.seconds or not self.beside:
            return f"{label}: left out, since {self.problem}"
        took = f"a step took {format_duration(self.seconds)} instead of {format_duration(self.beside)}"
        first = format_duration(self.first_seconds)
        after = f", after {first} of preparation" if self.first_seconds > 1 else ""
        return f"{label}: {took}{after}{'' if self.wins else ', not a clear gain'}"


def kernels_path(architecture: str, device: str, config: RunConfig, plan: Plan) -> Path:
    """Where it is kept for all plans that a run may have instead of this one."""
    plain = in_common(plan).with_layers("own").with_compiled(False)
    return entry("kernels", record_path(architecture, device, config, plain).name)


def read_verdicts(path: Path, now: Callable[[], float] = time.time) -> dict[str, Verdict]:
    """Beside our own, by name, from the file of `kernels_path`; after a week they may be timed again."""
    known = TypeAdapter(dict[str, Verdict]).validate_python(read_value(path) or {})
    return {name: one for name, one in known.items() if now() - one.at < HALF_LIFE_S}


def write_verdict(path: Path, name: str, verdict: Verdict, now: Callable[[], float] = time.time) -> None:
    """Keeps what was found out about kernels."""
    dated = asdict(replace(verdict, at=now()))
    update_value(path, lambda known: known | {name: dated})


def winners_of(verdicts: Mapping[str, Verdict]) -> list[str]:
    """The kernels that won, the fastest first."""
    won = {name: one.share for name, one in verdicts.items() if one.wins}
    return sorted(won, key=won.__getitem__)


def seconds_to_compile(device: str, otherwise: float) -> float:
    """The most that compiling has taken on a device of this name, `otherwise` where it has not been seen."""
    return read_value(entry("kernels", TO_COMPILE, device)) or otherwise


def keep_seconds_to_compile(device: str, seconds: float) -> None:
    """Notes how long it took; less is no news, since code is kept."""
    write_value(entry("kernels", TO_COMPILE, device), max(seconds, seconds_to_compile(device, 0.0)))

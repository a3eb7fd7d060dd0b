"""What earlier runs measured of the seconds of steps: ratios that correct later predictions.

Beside other programs all steps take longer, so seconds of different moments are not compared. The latest step
that was measured says how much longer than predicted steps take on this machine, whatever the plan. Which
plans are faster than others than predicted is told by those alone that one run timed in turn; it loses weight
with its age.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import TypeAdapter

from sft_play.cache import entry, read_value, update_value
from sft_play.config.schema import RunConfig
from sft_play.parts import Activations, Sharing, flat
from sft_play.plan import EARLIER, PROFILED, Clock, Plan
from sft_play.planning.speed.profile import DeviceProfile
from sft_play.sizing.estimate.corrections import record_path

ALIKE = 0.02  # micro-batches whose tokens differ by less count as equally fast
HALF_LIFE_S = 7 * 24 * 3600.0  # a comparison of plans then counts half, and they may be timed again


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long an average step of a plan took."""

    choices: str
    micro_batch_tokens: int
    seconds_per_token: float  # of a process, padding not counted
    ratio: float | None  # measured / predicted by the device profile alone; None if nothing was predicted
    at: float = 0.0  # seconds since 1970

    @classmethod
    def of(cls, plan: Plan, step_seconds: float | None, seconds_per_token: float) -> "Timing":
        """An average step of a plan that took so long."""
        predicted = plan.profile_seconds
        return cls(
            choices=_choices_of(plan),
            micro_batch_tokens=plan.rows.most_tokens,
            seconds_per_token=seconds_per_token,
            ratio=step_seconds / predicted if step_seconds and predicted else None,
        )

    def is_of(self, choices: str, tokens: int) -> bool:
        """Whether these choices were timed, with about so many tokens in a micro-batch."""
        return self.choices == choices and abs(self.micro_batch_tokens - tokens) <= ALIKE * tokens

    def is_like(self, other: "Timing") -> bool:
        """Whether both are of the same plan, as far as that matters for seconds."""
        return self.is_of(other.choices, other.micro_batch_tokens)


def _choices_of(plan: Plan) -> str:
    """What a plan chooses, besides the micro-batch; the speeds of all its choices are kept together."""
    return " ".join(map(str, [*flat(plan.sharing).values(), *flat(plan.activations.kind).values()]))


@dataclass(frozen=True)
class MeasuredSpeed:
    """How fast steps were: the latest one, and `rivals`, whose ratios are as if timed at one moment."""

    latest: Timing | None = None
    rivals: tuple[Timing, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Measured / predicted seconds of the latest step."""
        return self.latest.ratio if self.latest else None

    def rival(self, plan: Plan) -> Timing | None:
        """What the plan took when it was timed beside others."""
        return _find(self.rivals, _choices_of(plan), plan.rows.most_tokens)

    def timed_lately(self, plan: Plan, now: float) -> bool:
        """Whether the plan was predicted and timed beside others less than a half-life ago."""
        found = self.rival(plan)
        return found is not None and found.ratio is not None and now - found.at < HALF_LIFE_S

    def seconds(self, plan: Plan, tokens: float, predicted: float | None) -> float | None:
        """Seconds of an average step of the plan, of so many tokens a process.

        `predicted` are those of the device profile. Without them there is only what such steps took.
        """
        if predicted is None:
            known = self._measured(plan)
            return known.seconds_per_token * tokens if known else None
        if self.latest is None or self.ratio is None:
            return predicted
        ours = self._deviation(_choices_of(plan), plan.rows.most_tokens)
        latest = self._deviation(self.latest.choices, self.latest.micro_batch_tokens)
        return predicted * self.ratio * ours / latest

    def origin_of(self, plan: Plan, predicted: float | None) -> str:
        """Where the seconds of a step of the plan come from; `predicted` are those of the profile."""
        measured = self._measured(plan) if predicted is None else self.ratio
        return PROFILED if measured is None else EARLIER

    def labelled(self, plan: Plan, predicted: float | None) -> Plan:
        """The plan, which says what the profile predicts, and where its own seconds come from."""
        return replace(plan, profile_seconds=predicted, step_seconds_origin=self.origin_of(plan, predicted))

    def _measured(self, plan: Plan) -> Timing | None:
        latest = [self.latest] if self.latest else []
        return _find([*self.rivals, *latest], _choices_of(plan), plan.rows.most_tokens)

    def _deviation(self, choices: str, tokens: int) -> float:
        """The ratio of a plan that was timed beside others, over their mean; 1 for all other plans."""
        found = _find(self.rivals, choices, tokens)
        return found.ratio / _mean_ratio(self.rivals) if found and found.ratio else 1.0

    def faded(self, now: float) -> "MeasuredSpeed":
        """The speed with rivals that are closer to their mean, the more so the older they are."""
        mean = _mean_ratio(self.rivals)

        def aged(rival: Timing) -> Timing:
            weight = 0.5 ** (max(0.0, now - rival.at) / HALF_LIFE_S)
            return replace(rival, ratio=rival.ratio and mean * (rival.ratio / mean) ** weight)

        return replace(self, rivals=tuple(map(aged, self.rivals)))

    def measured_again(self, timed: Sequence[Timing]) -> "MeasuredSpeed":
        """The speed with plans that one run timed in turn, the first of which it trains.

        What was known of their rivals is kept if some of them were among these, as if timed now.
        """
        unpredicted = timed[0].ratio is None and self.ratio is not None  # which says nothing of other plans
        latest = self.latest if unpredicted else timed[0]
        if len(timed) == 1:
            return replace(self, latest=latest)
        pairs = [(new, old) for new in timed for old in self.rivals if new.is_like(old)]
        changes = [new.ratio / old.ratio for new, old in pairs if new.ratio and old.ratio]
        replaced = [old for _, old in pairs]
        kept = [
            replace(old, ratio=old.ratio * geometric_mean(changes))
            for old in self.rivals
            if changes and old.ratio and old not in replaced
        ]
        return MeasuredSpeed(latest, (*timed, *kept))


def _find(among: Iterable[Timing], choices: str, tokens: int) -> Timing | None:
    """That of about so many tokens, the nearest."""
    found = [one for one in among if one.is_of(choices, tokens)]
    return min(found, key=lambda one: abs(one.micro_batch_tokens - tokens), default=None)


def _mean_ratio(rivals: Iterable[Timing]) -> float:
    ratios = [rival.ratio for rival in rivals if rival.ratio]
    return geometric_mean(ratios) if ratios else 1.0


SpeedOf = Callable[[RunConfig, Plan], MeasuredSpeed]  # of the plans that a run may have instead of this one


def speed_path(
    architecture: str, device: str, config: RunConfig, plan: Plan, profile: DeviceProfile | None
) -> Path:
    """Where the speeds of a run's plans are kept, in proportion to what this profile predicts."""
    path = record_path(architecture, device, config, in_common(plan))
    return entry("speeds", path.name, profile and profile.to_json())


def in_common(plan: Plan) -> Plan:
    """What the plans have in common that a run may have instead of this one."""
    sharing = Sharing(engine="", world_size=plan.sharing.world_size, machines=plan.sharing.machines)
    return replace(plan, sharing=sharing, activations=Activations())


def read_speed(path: Path, now: Callable[[], float] = time.time) -> MeasuredSpeed:
    """What is known now, in the file that `speed_path` names."""
    return _speed_in(read_value(path) or {}).faded(now())


def _speed_in(record: dict[str, Any]) -> MeasuredSpeed:
    return TypeAdapter(MeasuredSpeed).validate_python(record)


def write_times(path: Path, timed: Sequence[Timing], now: Callable[[], float] = time.time) -> None:
    """Keeps what plans took that were timed in turn until now; the first of them is trained."""
    dated = [replace(one, at=now()) for one in timed]
    update_value(path, lambda record: asdict(_speed_in(record).measured_again(dated)))


def speeds_of(architecture: str, device: str, profile: DeviceProfile | None) -> SpeedOf:
    """A function that gives the speed of a run's plans; it reads each file once."""
    read = cache(read_speed)
    return lambda config, plan: read(speed_path(architecture, device, config, plan, profile))


def corrected_clock(clock: Clock, speed_of: SpeedOf, tokens_of: Callable[[Plan], float]) -> Clock:
    """The clock, corrected by earlier runs; `tokens_of` a plan's average step, for each process."""

    def seconds(config: RunConfig, plan: Plan) -> float | None:
        return speed_of(config, plan).seconds(plan, tokens_of(plan), clock(config, plan))

    return seconds

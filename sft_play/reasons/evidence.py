"""What a plan rests on: how much memory there is, what was measured, what is assumed."""

from collections.abc import Sequence
from typing import Literal

from sft_play.reasons.reason import Reason
from sft_play.units import counted, format_bytes

Range = tuple[float, float]  # of relative errors; negative if the prediction was too low


class UnknownFreeMemory(Reason):
    """Nothing tells how much memory is free."""

    device: str
    text = (
        "the driver does not say how much memory of {device} is free, as where GPU and CPU share the RAM "
        "(DGX Spark): parallel.memory_gib says how much of it a run may have, and lets it be planned"
    )


class Untraceable(Reason):
    """Memory cannot be predicted; the first line of the error."""

    message: str
    text = "{message}"


class ScratchOffRule(Reason):
    """What a CPU's products in a type take beside operands and results follows no rule; the worst error."""

    dtype: str
    worst: float
    text = "scratch of {dtype} products follows no rule on this CPU, off by {worst:.0%}"


class MemoryLimit(Reason):
    """parallel.memory_gib, and the bytes that are free if they are fewer."""

    asked_gib: float
    free_bytes: int | None

    def __str__(self) -> str:
        less = f", but only {format_bytes(self.free_bytes)} are free" if self.free_bytes is not None else ""
        return f"each process may use {self.asked_gib:g} GiB (parallel.memory_gib){less}"


class GuardKept(Reason):
    """Bytes that stay free, and where the number comes from."""

    bytes: int
    why: str
    text = "guard {bytes}: {why}"


class Assumed(Reason):
    """Parts of each process that are assumed, not measured."""

    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"assumed, not measured: {' and '.join(self.parts)} of each process"


class UnknownCapability(Reason):
    """The GPU's compute capability is unknown; its kernels are assumed to be those of another."""

    assumed: tuple[int, int]
    text = "compute capability unknown: kernels of {assumed[0]}.{assumed[1]} assumed"


class PredictionErrors(Reason):
    """Errors of predictions in published runs on such GPUs, by what was predicted; unknown without runs."""

    capability: tuple[int, int]
    quantized: bool
    runs: int
    errors: tuple[tuple[str, Range], ...]

    def __str__(self) -> str:
        name = "compute capability {}.{}".format(*self.capability)
        if not self.runs:
            return f"no measurements on {name} are published, so prediction errors there are unknown"
        errors = ", ".join(f"{what} {_range_text(*one)}" for what, one in self.errors)
        weights = "4-bit" if self.quantized else "16-bit"
        runs = counted(self.runs, "published run")
        return f"prediction errors in {runs} with {weights} weights and fixed segments on {name}: {errors}"


def _range_text(lowest: float, highest: float) -> str:
    text = f"{lowest:+.2%}"
    return text if lowest == highest else f"{text} to {highest:+.2%}"


class ProfileSource(Reason):
    """Where the predicted seconds come from."""

    device: str
    source: str
    text = "seconds from the profile of {device}, {source}"


class OnlyWhileBusy(Reason):
    """The device was measured, but other programs used the machine meanwhile."""

    device: str
    text = "{device} was busy when measured: the result is not used, and it is measured again once idle"


class SecondsOfEarlierRun(Reason):
    """An earlier run measured seconds, in proportion to which those of this plan are."""

    text = "seconds scaled from those measured in an earlier run, not predicted"


class Communication(Reason):
    """Where the seconds of communication come from."""

    processes: int
    measured: bool
    links: tuple[float, ...]  # bytes a second by the data sheet, as `machine.links.links_of`
    measured_later: bool  # by the first run
    may_be_faster: bool = False  # the links, than these, which are the slowest that there may be

    def __str__(self) -> str:
        if self.measured:
            return f"communication: as measured between {self.processes} processes here"
        later = f"; the first run of {self.processes} processes measures it" if self.measured_later else ""
        if self.links:
            speeds = link_text(self.links) + ", the slowest possible" * self.may_be_faster
            return f"communication: derived from the data sheet ({speeds}), not measured{later}"
        return f"communication: not counted, since the link between processes is unknown{later}"


def link_text(links: Sequence[float]) -> str:
    """Speeds of links (`machine.links.links_of`) in words."""
    places = ("between devices",) if len(links) == 1 else ("inside a machine", "between machines")
    return ", ".join(f"{link / 1e9:.3g} GB/s {place}" for link, place in zip(links, places, strict=True))


class AssumedRows(Reason):
    """There are no training rows yet."""

    rows: int
    tokens: int
    text = "no training rows found: planned for {rows:,} rows of {tokens:,} tokens, with loss on every token"


class DescribedLengths(Reason, kw_only=True):
    """The training rows are not here; their lengths are drawn from a lognormal distribution."""

    rows: int
    median: int  # tokens, as p95
    p95: int
    longest: int  # of those that are left
    longer: int  # rows above the limit
    overlong: str  # what becomes of these: data.overlong

    def __str__(self) -> str:
        lengths = f"half of them up to {self.median:,} tokens and 95% up to {self.p95:,} (lognormal)"
        if self.median == self.p95:
            lengths = f"of {self.median:,} tokens"
        found = (
            f"planned without data: {self.rows:,} rows assumed, {lengths}, the longest {self.longest:,}, "
            "with loss on every token"
        )
        if not self.longer:
            return found
        cut = {"drop": "left out", "truncate": "cut"}.get(self.overlong, "split")
        are = "is" if self.longer == 1 else "are"
        return f"{found}; {counted(self.longer, 'row')} above the limit {are} {cut}"


class DescribedImages(Reason):
    """The images of training rows that are not here."""

    images: int  # of each row
    width: int  # of each, in pixels
    height: int
    tokens: int  # that stand for its features
    row_tokens: int  # with those around them

    def __str__(self) -> str:
        return (
            f"to the text of each row, {counted(self.images, 'image')} of {self.width} x {self.height} "
            f"pixels: {self.tokens:,} tokens each, {self.row_tokens:,} with those around it, without loss"
        )


class Corrected(Reason):
    """An earlier probe corrects the predicted memory."""

    ratio: float
    text = "corrected by an earlier probe of such a step: memory beyond the weights x {ratio:.3f}"


class RanOutBefore(Reason):
    """Memory ran out in an earlier run of this kind."""

    tokens: int  # in a micro-batch
    outcome: Literal["again", "more_free", "smaller"]  # what this plan makes of it

    def __str__(self) -> str:
        now = {
            "again": "; the config allows no smaller plan that fits, so this one is tried again",
            "more_free": ", when less of it was free",
            "smaller": "",
        }
        found = f"in an earlier run of this kind, memory ran out with {self.tokens:,} tokens in a micro-batch"
        return f"{found}{now[self.outcome]}"

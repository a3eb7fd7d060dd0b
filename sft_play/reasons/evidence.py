"""What a plan rests on, in sentences: how much memory there is, what was measured, what is assumed."""

from collections.abc import Mapping, Sequence
from typing import Literal

from sft_play.units import counted, format_bytes

SECONDS_OF_EARLIER_RUN = "seconds scaled from those measured in an earlier run, not predicted"


def unknown_free_memory(device: str) -> str:
    """Nothing tells how much memory is free."""
    return (
        f"the driver does not say how much memory of {device} is free, as where GPU and CPU share the RAM "
        "(DGX Spark): parallel.memory_gib says how much of it a run may have, and lets it be planned"
    )


def scratch_off_rule(dtype: str, worst: float, most_bytes: int | None) -> str:
    """What a CPU's products in a type take beside operands and results follows no rule.

    The worst error, and the most bytes that a product takes, if that is bounded.
    """
    text = f"scratch of {dtype} products follows no rule on this CPU"
    if most_bytes is None:
        return f"{text}, off by {worst:.0%}"
    return f"{text}; no product takes more than {format_bytes(most_bytes)}"


def memory_limit(asked_gib: float, free_bytes: int | None) -> str:
    """parallel.memory_gib, and the bytes that are free if they are fewer."""
    less = f", but only {format_bytes(free_bytes)} are free" if free_bytes is not None else ""
    return f"each process may use {asked_gib:g} GiB (parallel.memory_gib){less}"


def prediction_errors(
    capability: tuple[int, int], quantized: bool, runs: int, errors: Mapping[str, tuple[float, float]]
) -> str:
    """Errors of predictions in published runs on such GPUs; unknown without runs.

    The lowest and the highest relative error, by what was predicted; negative if the prediction was too low.
    """
    name = "compute capability {}.{}".format(*capability)
    if not runs:
        return f"no measurements on {name} are published, so prediction errors there are unknown"
    found = ", ".join(f"{what} {_range_text(*one)}" for what, one in errors.items())
    weights = "4-bit" if quantized else "16-bit"
    published = counted(runs, "published run")
    return f"prediction errors in {published} with {weights} weights and fixed segments on {name}: {found}"


def _range_text(lowest: float, highest: float) -> str:
    text = f"{lowest:+.2%}"
    return text if lowest == highest else f"{text} to {highest:+.2%}"


def only_while_busy(device: str) -> str:
    """The device was measured, but other programs used the machine meanwhile."""
    return f"{device} was busy when measured: the result is not used, and it is measured again once idle"


def communication(
    processes: int,
    links: Sequence[float],
    *,
    measured: bool,
    measured_later: bool,
    may_be_faster: bool = False,
) -> str:
    """Where the seconds of communication come from: measured here, by the first run, or by the data sheet.

    The links are as `machine.links.links_of` has them, the slowest if they may be faster.
    """
    if measured:
        return f"communication: as measured between {processes} processes here"
    later = f"; the first run of {processes} processes measures it" if measured_later else ""
    if links:
        speeds = link_text(links) + ", the slowest possible" * may_be_faster
        return f"communication: derived from the data sheet ({speeds}), not measured{later}"
    return f"communication: not counted, since the link between processes is unknown{later}"


def link_text(links: Sequence[float]) -> str:
    """Speeds of links (`machine.links.links_of`) in words."""
    places = ("between devices",) if len(links) == 1 else ("inside a machine", "between machines")
    return ", ".join(f"{link / 1e9:.3g} GB/s {place}" for link, place in zip(links, places, strict=True))


def assumed_rows(rows: int, tokens: int) -> str:
    """There are no training rows yet."""
    return f"no training rows found: planned for {rows:,} rows of {tokens:,} tokens, with loss on every token"


def described_lengths(
    *,
    rows: int,
    median: int,  # tokens, as p95
    p95: int,
    longest: int,  # of those that are left
    longer: int,  # rows above the limit
    overlong: str,  # what becomes of these: data.overlong
) -> str:
    """The training rows are not here; their lengths are drawn from a lognormal distribution."""
    lengths = f"half of them up to {median:,} tokens and 95% up to {p95:,} (lognormal)"
    if median == p95:
        lengths = f"of {median:,} tokens"
    found = (
        f"planned without data: {rows:,} rows assumed, {lengths}, the longest {longest:,}, "
        "with loss on every token"
    )
    if not longer:
        return found
    cut = {"drop": "left out", "truncate": "cut"}.get(overlong, "split")
    are = "is" if longer == 1 else "are"
    return f"{found}; {counted(longer, 'row')} above the limit {are} {cut}"


def described_images(images: int, width: int, height: int, tokens: int, row_tokens: int) -> str:
    """The images of each of the training rows, which are not here, of so many pixels each.

    Tokens stand for the features of one; `row_tokens` are those with what is around them.
    """
    return (
        f"to the text of each row, {counted(images, 'image')} of {width} x {height} "
        f"pixels: {tokens:,} tokens each, {row_tokens:,} with those around it, without loss"
    )


def ran_out_before(tokens: int, outcome: Literal["again", "more_free", "smaller"]) -> str:
    """Memory ran out with so many tokens in a micro-batch, and what this plan makes of it."""
    now = {
        "again": "; the config allows no smaller plan that fits, so this one is tried again",
        "more_free": ", when less of it was free",
        "smaller": "",
    }
    found = f"in an earlier run of this kind, memory ran out with {tokens:,} tokens in a micro-batch"
    return f"{found}{now[outcome]}"

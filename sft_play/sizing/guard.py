"""Memory that is never planned with, and why it is as much as it is: derived from recorded errors of the prediction. Pure.

A recording is a result of benchmarks/; tests/unit/sizing/test_recorded.py holds these figures against it.
"""

from dataclasses import dataclass

from sft_play.units import MIB

SAFETY = 2  # times the worst under-prediction that was recorded: a grid does not hold the worst case
LEAST_SHARE, UNRECORDED_SHARE, LEAST_BYTES = 0.01, 0.03, 256 * MIB


@dataclass(frozen=True)
class Recorded:
    """The most by which memory was under-predicted, relative to the prediction."""

    worst: float
    where: str


# cpu: allocated bytes, benchmarks/results/sizing_cpu.json. cuda: reserved bytes, benchmarks/results/sizing_gpu.json.
RECORDED: dict[str, Recorded | None] = {
    "cpu": Recorded(1.34e-5, "288 steps of small models on a CPU"),
    "cuda": None,
}


@dataclass(frozen=True)
class Guard:
    """Bytes, and the reason in words."""

    bytes: int
    why: str


def guard(kind: str, free_bytes: int) -> Guard:
    """What stays free of the memory that is free.

    Args:
        kind: cuda or cpu.
        free_bytes: before the process starts.
    """
    share, why = _share(kind, RECORDED[kind])
    if share * free_bytes < LEAST_BYTES:
        return Guard(LEAST_BYTES, f"the least that is kept free; otherwise {why}")
    return Guard(int(share * free_bytes), why)


def _share(kind: str, recorded: Recorded | None) -> tuple[float, str]:
    if kind == "cpu" and recorded:
        taken = f"{UNRECORDED_SHARE:.0%} for what Python and its libraries take unseen"
        return UNRECORDED_SHARE, f"{taken}; recorded errors are {recorded.worst:.4%} at most"
    if recorded is None:
        return UNRECORDED_SHARE, f"no GPU recording yet: a conservative {UNRECORDED_SHARE:.0%}"
    share = max(LEAST_SHARE, SAFETY * recorded.worst)
    return share, f"{share:.1%}, from at most {recorded.worst:.2%} under-predicted in {recorded.where}"

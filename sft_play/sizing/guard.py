"""The guard: memory that no plan may use, derived from the measured errors of the prediction. Pure.

The errors come from benchmarks/results; tests/unit/sizing/test_benchmark_results.py compares the figures
below with them.
"""

from dataclasses import dataclass

from sft_play.units import MIB

SAFETY = 2  # times the worst measured under-prediction: a benchmark grid does not contain the worst case
LEAST_SHARE = 0.01
UNMEASURED_SHARE = 0.03  # if no benchmark has been run
LEAST_BYTES = 256 * MIB


@dataclass(frozen=True)
class MeasuredError:
    """The worst under-prediction in a benchmark, relative to the prediction."""

    worst: float
    where: str


# cpu: allocated bytes, benchmarks/results/sizing_cpu.json
# cuda: reserved bytes, benchmarks/results/sizing_gpu.json
MEASURED_ERRORS: dict[str, MeasuredError | None] = {
    "cpu": MeasuredError(0.0194, "288 steps of small models on a CPU, the worst of them in bf16"),
    "cuda": None,
}


@dataclass(frozen=True)
class Guard:
    """Bytes that stay free, and the reason for the user."""

    bytes: int
    why: str


def guard(kind: str, free_bytes: int) -> Guard:
    """The part of the free memory that a plan must not use.

    Args:
        kind: "cuda" or "cpu".
        free_bytes: free memory before the process starts.
    """
    share, why = _share(kind, MEASURED_ERRORS[kind])
    if share * free_bytes < LEAST_BYTES:
        return Guard(LEAST_BYTES, f"the minimum; on a larger device {why}")
    return Guard(int(share * free_bytes), why)


def _share(kind: str, measured: MeasuredError | None) -> tuple[float, str]:
    if kind == "cpu" and measured:
        share = max(UNMEASURED_SHARE, SAFETY * measured.worst)
        why = f"{share:.1%} for memory that Python and its libraries use outside of PyTorch"
        return share, f"{why}; measured prediction errors are at most {measured.worst:.2%}"
    if measured is None:
        return UNMEASURED_SHARE, f"a conservative {UNMEASURED_SHARE:.0%}, since no GPU benchmark has been run"
    share = max(LEAST_SHARE, SAFETY * measured.worst)
    return share, f"{share:.1%}, from under-predictions of at most {measured.worst:.2%} in {measured.where}"

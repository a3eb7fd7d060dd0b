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
# The worst under-prediction of reserved bytes in published runs with NF4 weights and fixed segments, a share
# of what was measured, hence of the free memory: benchmarks/results/evidence.json
LOOSE_SHARE = 0.127


@dataclass(frozen=True)
class MeasuredError:
    """The worst under-prediction in a benchmark, relative to the prediction."""

    worst: float
    where: str


# cpu: allocated bytes, benchmarks/results/sizing_cpu.json
# cuda: reserved bytes, benchmarks/results/sizing_gpu.json
MEASURED_ERRORS: dict[str, MeasuredError | None] = {
    "cpu": MeasuredError(0.0196, "288 steps of small models on a CPU, the worst of them in bf16"),
    "cuda": None,
}


Range = tuple[float, float]  # of relative errors; negative if the prediction was too low


@dataclass(frozen=True)
class KnownErrors:
    """The lowest and the highest error in published runs on a generation of GPUs, with fixed segments."""

    runs: int
    allocated: Range
    reserved: Range
    process: Range | None = None  # None if not measured


# By compute capability, and whether weights are quantized while they are loaded (NF4):
# benchmarks/results/evidence.json, compared by tests/unit/benchmarks/test_evidence.py
KNOWN = {
    ((7, 5), False): KnownErrors(20, (-0.0004, 0.0), (-0.0003, 0.0028), (-0.0002, 0.0027)),
    ((7, 5), True): KnownErrors(51, (-0.0035, 0.0034), (-0.1262, 0.1527), (-0.1229, 0.1484)),
    ((8, 9), False): KnownErrors(1, (-0.0004, -0.0004), (-0.0298, -0.0298)),
    ((8, 9), True): KnownErrors(10, (-0.0002, 0.0001), (0.0, 0.0552)),
}


def known_errors(compute_capability: tuple[int, int] | None, quantized: bool) -> KnownErrors | None:
    """What is known of predictions for runs on such GPUs; None if nothing was published."""
    return None if compute_capability is None else KNOWN.get((compute_capability, quantized))


@dataclass(frozen=True)
class Guard:
    """Bytes that stay free, and the reason for the user."""

    bytes: int
    why: str


def guard(kind: str, free_bytes: int, *, loose: bool = False) -> Guard:
    """The part of the free memory that a plan must not use.

    Args:
        kind: "cuda" or "cpu".
        free_bytes: free memory before the process starts.
        loose: whether reserved bytes are known less well: 4-bit weights in segments of fixed size, where
            holes that loading leaves can only be filled by what fits.
    """
    share, why = _share(kind, MEASURED_ERRORS[kind])
    if loose and share < LOOSE_SHARE:
        share = LOOSE_SHARE
        why = f"{share:.1%}, the most by which published 4-bit runs with fixed segments exceeded predictions"
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

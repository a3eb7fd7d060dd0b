"""Runs the tests of tests/gpu on a GPU; those that have a result are not run again.

    python -m benchmarks.gpu_tests                          # on a CUDA machine
    python -m benchmarks.gpu_tests --device cpu --quick     # a few of them on the CPU

The first form writes benchmarks/results/gpu_tests.json.
"""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.alone import LEAST_S, ended
from benchmarks.measurement_log import MeasurementLog, write_result
from benchmarks.sizing_gpu import arguments, local_device, results_of

WORKERS = 4  # more are in each other's way: many tests run commands, each of which measures the GPU
LINES, DEVICE = "SFT_PLAY_TEST_LINES", "SFT_PLAY_TEST_DEVICE"  # variables for the plugin that this module is
QUICK = "tests/gpu/test_attention.py"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Logs the result of a test at once, in the process that collects them."""
    collects = LINES in os.environ and "PYTEST_XDIST_WORKER" not in os.environ
    if collects and (report.when == "call" or not report.passed):  # a setup may skip, and an end may fail
        log = MeasurementLog(Path(os.environ[LINES]), torch.device(os.environ[DEVICE]))
        log.add({"test": report.nodeid, "outcome": report.outcome})


def outcomes(lines: MeasurementLog) -> dict[str, str]:
    """Test -> "passed", "failed" or "skipped"; a test whose end failed has failed."""
    found: dict[str, str] = {}
    for line in lines.read():
        if found.get(line["test"]) != "failed":
            found[line["test"]] = line["outcome"]
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the tests that have no result; returns 1 if one failed, or pytest did."""
    began = time.monotonic()
    args = arguments(__doc__, 9.0).parse_args(argv)
    device, results = local_device(args), results_of(args)
    lines = MeasurementLog(results.absolute() / f"tests_{device.type}.lines.jsonl", device)
    words = ["-m", "pytest", "-p", "benchmarks.gpu_tests", "--tb=line", "-q"]
    words += [QUICK, "-m", "not gpu"] if args.quick else ["tests/gpu", "-m", "gpu", "-n", str(WORKERS)]
    words += [f"--deselect={name}" for name in outcomes(lines)]
    left_s = began + 60 * args.minutes - time.monotonic()
    if left_s < LEAST_S:
        return 0
    variables = {LINES: str(lines.path), DEVICE: device.type}
    code = ended([sys.executable, *words], left_s, **variables)
    found = outcomes(lines)
    by_outcome = {
        outcome: [name for name in found if found[name] == outcome] for outcome in ("failed", "skipped")
    }
    record = {"what": "Tests of tests/gpu", **lines.made, "finished": code is not None}
    passed = len(found) - sum(map(len, by_outcome.values()))
    write_result(results / "gpu_tests.json", record | {"passed": passed, **by_outcome}, {})
    return int(bool(by_outcome["failed"]) or code not in (None, 0, 1, pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    sys.exit(main())

"""Memory that stays free: as much as measured errors demand, with the reason."""

import pytest

from sft_play.sizing.estimate import budget
from sft_play.units import GIB, MIB


def test_without_a_benchmark_it_is_conservative_and_says_so():
    for measured_on in (None, (8, 0)):
        found = budget.guard("cuda", 80 * GIB, measured_on=measured_on)
        assert found.bytes == int(0.03 * 80 * GIB)
        assert found.why.startswith("a conservative 3%, since prediction errors of such runs have not been")


@pytest.mark.parametrize(("worst", "share"), [(0.0, 0.01), (0.002, 0.01), (0.02, 0.04)])
def test_with_one_it_is_twice_the_worst_error_and_never_nothing(monkeypatch, worst, share):
    monkeypatch.setitem(budget.GPU_ERRORS, (8, 0), budget.MeasuredError(worst, "68 steps on a GPU"))
    found = budget.guard("cuda", 80 * GIB, measured_on=(8, 0))
    assert found.bytes == int(share * 80 * GIB)
    assert f"{share:.1%}" in found.why and "68 steps on a GPU" in found.why


def test_what_was_measured_on_a_gpu_counts_for_one_process_on_such_a_gpu():
    alone, several, fixed, other = (
        budget.device_budget("cuda", 80 * GIB, **{"compute_capability": (9, 0), **changes}).guard.bytes
        for changes in ({}, {"world_size": 2}, {"expandable": False}, {"compute_capability": (8, 6)})
    )
    assert alone < several == fixed == other == int(0.03 * 80 * GIB)


def test_small_devices_keep_a_minimum_free():
    for kind in ("cuda", "cpu"):
        found = budget.guard(kind, 2 * GIB)
        assert found.bytes == 256 * MIB and "the minimum" in found.why

"""Memory that stays free: as much as measured errors demand, with the reason."""

import pytest

from sft_play.sizing import budget
from sft_play.units import GIB, MIB


def guard_for(monkeypatch, measured):
    monkeypatch.setitem(budget.MEASURED_ERRORS, "cuda", measured)
    return budget.guard("cuda", 80 * GIB)


def test_without_a_benchmark_it_is_conservative_and_says_so(monkeypatch):
    found = guard_for(monkeypatch, None)
    assert found.bytes == int(0.03 * 80 * GIB)
    assert found.why == "a conservative 3%, since no GPU benchmark has been run"


@pytest.mark.parametrize(("worst", "share"), [(0.0, 0.01), (0.002, 0.01), (0.02, 0.04)])
def test_with_one_it_is_twice_the_worst_error_and_never_nothing(monkeypatch, worst, share):
    found = guard_for(monkeypatch, budget.MeasuredError(worst, "68 steps on a GPU"))
    assert found.bytes == int(share * 80 * GIB)
    assert f"{share:.1%}" in found.why and "68 steps on a GPU" in found.why


def test_small_devices_keep_a_minimum_free():
    for kind in ("cuda", "cpu"):
        found = budget.guard(kind, 2 * GIB)
        assert found.bytes == 256 * MIB and "the minimum" in found.why

"""Figures that a device cannot have are neither believed nor printed; slow ones that it can have are."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.machine.gpus import Machine, what_if
from sft_play.machine.host import Host
from sft_play.planning.speed import devices
from sft_play.planning.speed.plausible import believed
from sft_play.planning.speed.profile import Curve, DeviceProfile, derived_from_data_sheet

SHEET = derived_from_data_sheet("H200", "cuda", 989e12, 4.8e12)
HOST = Host(
    cpu_model="A CPU", cpu_cores=2, cpu_bf16=None, ram_total_bytes=None, ram_free_bytes=None, ram_limited=False
)  # fmt: skip
GPUS = replace(what_if("H100 80GB", 2), what_if=False)  # as if they were here


def slower(profile: DeviceProfile, times: float, *names: str) -> DeviceProfile:
    """A measured profile whose figures of these names take so many times as long."""

    def scaled(figure):
        if isinstance(figure, dict):
            return {dtype: scaled(grid) for dtype, grid in figure.items()}
        if isinstance(figure, float):
            return times * figure
        return replace(figure, seconds=tuple(times * seconds for seconds in figure.seconds))

    changes = {name: scaled(getattr(profile, name)) for name in names}
    return replace(profile, measured=True, source="measured in 4.0 s", **changes)


ALL = ("products", "attention", "attention_backward", "elementwise", "transcendental", "update_element_s",
       "unpack_s", "call_forward_s", "call_backward_s", "update_tensor_s")  # fmt: skip


@pytest.mark.parametrize("times", [0.8, 1.0, 2.0, 6.0])
def test_a_part_of_the_data_sheet_is_believed(times):
    measured = slower(SHEET, times, *ALL)
    assert believed(measured, SHEET) is measured


def test_a_lie_is_replaced_and_said():
    found = believed(slower(SHEET, 1000.0, *ALL), SHEET)
    assert found == replace(SHEET, measured=True, source=found.source)
    names = "bfloat16 products", "float16 products", "float32 products", "attention", "memory", "calls"
    said = ", ".join(f"{name} (1,000 times too slow)" for name in names)
    assert found.source == f"measured in 4.0 s, implausible figures replaced by those {SHEET.source}: {said}"


def test_only_the_unit_that_lies_is_replaced():
    """As on the first H200, whose grid of products ran out of time: 120 GFLOP/s."""
    measured = slower(slower(SHEET, 1.5, "attention", "elementwise"), 6600.0, "products")
    found = believed(measured, SHEET)
    assert found.products == SHEET.products
    assert found.attention == measured.attention and found.elementwise == measured.elementwise
    assert "too slow" in found.source and "memory" not in found.source


def test_no_product_runs_above_the_peak():
    found = believed(slower(SHEET, 0.5, "products"), SHEET)
    assert found.products["bfloat16"] == SHEET.products["bfloat16"]
    assert found.products["float32"].seconds == slower(SHEET, 0.5, "products").products["float32"].seconds
    assert "bfloat16 products (2.0 times too fast)" in found.source


def test_fewer_sizes_are_compared_where_they_were_measured():
    short = Curve((64, 256), tuple(float(s) for s in SHEET.attention.at(np.array([64, 256]))))
    measured = replace(slower(SHEET, 1.0), attention=short)
    assert believed(measured, SHEET) is measured


@pytest.mark.parametrize("machine", [GPUS, Machine(gpus=(), note="", host=HOST)], ids=["gpus", "cpu"])
@pytest.mark.parametrize("processes", [1, 2])
def test_plans_do_not_count_on_a_lie(machine, processes, tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    name, threads = devices.device_name(machine), None if machine.gpus else 2 // processes
    sheet = devices.derived_profile(machine, 1 if machine.gpus else processes)
    lie = replace(slower(sheet, 1000.0, "products", "elementwise"), threads=threads)
    devices.write_profile(name, threads, lie)
    found = devices.profile_of(machine, processes)
    assert found.products["float32"] == sheet.products["float32"] and found.elementwise == sheet.elementwise
    assert "1,000 times too slow" in found.source
    assert devices.checked(lie, machine) == found  # as printed

"""What is measured of a device when there is little time, by a clock that the tests turn."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from sft_play.machine.catalogue import known_gpus
from sft_play.machine.gpus import what_if
from sft_play.model.attention.table import FUSED
from sft_play.model.attention.varlen import type_name
from sft_play.planning.speed.devices import derived_profile, device_name, saved_profile, write_profile
from sft_play.planning.speed.measurement import GRID_S, HEAD_DIM, LARGE_SIDE, measured_products, types_of_gpu
from sft_play.planning.speed.profile import SIDES, STRETCHES, Curve, ProductGrid, product_seconds

# An H200's, measured: products of 8,192 cubed in bf16, and a multiplication of 64 MiB of numbers
RATE, STREAM, LAUNCH_S = 780e12, 3.6e12, 5e-6
H200 = product_seconds(RATE, STREAM, LAUNCH_S, 2)
ELEMENTWISE = Curve.of(STRETCHES, lambda size: LAUNCH_S + size / STREAM)


def grid(kind: str, true: Callable[[int, int, int], float], each_s: float) -> tuple[ProductGrid, list]:
    """The grid of a device whose products take as long as `true` says, and what was measured for it."""
    passed, measured = [0.0], []

    def seconds(*sizes: int) -> float:
        passed[0] += each_s
        measured.append(sizes)
        return true(*sizes)

    return measured_products(kind, seconds, ELEMENTWISE, 2, lambda: passed[0]), measured


def rates(found: ProductGrid) -> dict[tuple[int, ...], float]:
    sizes = itertools.product(found.sides, repeat=3)
    return {each: 2 * math.prod(each) / s for each, s in zip(sizes, found.seconds, strict=True)}


def test_large_products_of_a_gpu_are_measured_however_long_a_figure_takes():
    free, all_of_them = grid("cuda", H200, 0.0)
    slow, few = grid("cuda", H200, 0.15)
    assert len(all_of_them) == len(SIDES["cuda"]) ** 3 and len(few) == round(GRID_S / 0.15)
    assert all(min(sizes) >= LARGE_SIDE for sizes in few)
    for sizes, rate in rates(free).items():
        if min(sizes) >= LARGE_SIDE:
            assert rates(slow)[sizes] == pytest.approx(rate, rel=0.01)
        # and nothing that was not measured is off by more than how long a kernel takes to start
        assert rates(slow)[sizes] == pytest.approx(rate, rel=0.2), sizes


def test_one_figure_is_measured_even_if_it_takes_all_the_time():
    found, few = grid("cuda", H200, 100.0)
    assert few == [(8192, 8192, 8192)]
    assert rates(found)[1024, 8192, 8192] == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("each_s", [0.05, 100.0])
def test_a_cpu_that_measures_little_knows_its_rate(each_s):
    found, few = grid("cpu", product_seconds(60e9, 10e9, 1e-6, 4), each_s)
    assert few[:2] == [(512, 512, 512), (8, 8, 8)][: len(few)] and len(few) == max(1, round(GRID_S / each_s))
    assert rates(found)[2048, 2048, 2048] == pytest.approx(60e9, rel=0.1)


@pytest.mark.parametrize("name", known_gpus())
def test_a_gpu_is_measured_in_what_training_computes_in(name):
    gpu = what_if(name).gpus[0]
    if gpu.compute_capability is None:
        pytest.skip("the catalogue does not say its compute capability")
    names = [type_name(each) for each in types_of_gpu(gpu.compute_capability)]
    assert names[0] == ("bfloat16" if gpu.bf16 else "float16") and ("bfloat16" in names) == gpu.bf16
    # else PyTorch would measure its math kernel
    assert any(kernel.takes(gpu.compute_capability, names[0], HEAD_DIM) for kernel in FUSED)


def test_a_gpu_without_bf16_that_was_measured_is_not_measured_again():
    machine = what_if("T4")
    sheet = derived_profile(machine, 1)
    known = replace(sheet, measured=True, products={"float16": sheet.products["float16"]})
    write_profile(device_name(machine), None, known)
    assert saved_profile(machine, 1) == known

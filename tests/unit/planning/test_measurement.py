"""What is measured of a device when there is little time, by a clock that the tests turn."""

import itertools
import math
from collections.abc import Callable

import pytest

from sft_play.planning.speed.measurement import GRID_S, LARGE_SIDE, measured_products
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

"""Device profiles: what they say between their sizes, in files, and for devices that have not been measured."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.planning.speed.profile import (
    Curve,
    DeviceProfile,
    MicroBatch,
    ProductGrid,
    derived_from_data_sheet,
)
from sft_play.work import ATTENTION, ELEMENTWISE, PRODUCT, Work, fused
from tests.unit.sizing.handmade import NO_WORK

H100 = derived_from_data_sheet("H100", "cuda", 989e12, 3.35e12)
CPU = derived_from_data_sheet("CPU", "cpu", 60e9, 10e9)


def work(*rows, backward_from=None) -> Work:
    """Operations given as (kind, m, n, k, bytes), in bf16."""
    table = np.array(rows, float)
    count = len(rows)
    return Work(
        kinds=table[:, 0].astype(np.int8),
        dtypes=np.ones(count, np.int8),
        by_python=np.ones(count, bool),
        by_engine=np.zeros(count, np.int8),
        sizes=np.column_stack([table[:, 1:4], np.ones(count), table[:, 4], np.zeros(count)]),
        order=np.arange(count),
        layers=np.zeros(count, np.int16),
        backward_from=count if backward_from is None else backward_from,
        trained_elements=0,
        trained_tensors=0,
    )


def test_a_profile_survives_its_file():
    assert DeviceProfile.from_json(H100.to_json()) == H100


def test_a_product_takes_longer_the_larger_it_is_on_and_off_the_grid():
    wavering = ProductGrid.of((8, 64, 512), lambda m, n, k: m * n * k * (1.3 if k == 64 else 1.0) + 1e4)
    sides = np.unique(np.geomspace(2, 4000, 60).round())
    for fixed in ((30, 100), (512, 8), (5000, 5000)):
        for axis in range(3):
            sizes = [np.full(len(sides), value, float) for value in fixed]
            sizes.insert(axis, sides)
            assert (np.diff(wavering.at(*sizes)) >= 0).all()


def test_a_grid_says_what_was_measured_and_keeps_its_rate_beyond():
    grid = ProductGrid.of((8, 64), lambda m, n, k: 1e-9 * m * n * k)
    one = np.ones(1)
    assert grid.at(8 * one, 64 * one, 8 * one)[0] == pytest.approx(1e-9 * 8 * 64 * 8)
    assert grid.at(640 * one, 64 * one, 64 * one)[0] == pytest.approx(1e-9 * 640 * 64 * 64)
    assert grid.at(20 * one, 20 * one, 20 * one)[0] == pytest.approx(8e-6, rel=1e-6)
    assert grid.at(1 * one, 8 * one, 8 * one)[0] == pytest.approx(1e-9 * 8**3)  # no product takes less


def test_a_curve_bends_at_its_sizes_and_goes_on_in_proportion():
    curve = Curve((10, 1000), (1.0, 10.0))
    assert curve.at(np.array([1, 10, 100, 1000, 5000])) == pytest.approx([1, 1, 10**0.5, 10, 50])


def test_attention_is_paid_by_the_lengths_of_the_sequences():
    attends = work((ATTENTION, 4096, 0, 1024, 0))
    quiet = replace(H100, call_forward_s=0.0)
    one, four = (
        quiet.micro_batch_seconds(attends, MicroBatch(4096, n * (4096 // n) ** 2))[0] for n in (1, 4)
    )
    assert one == pytest.approx(4 * four, rel=1e-6)


def test_a_product_that_is_added_to_its_result_reads_that_too():
    m, n, k = 8000, 14000, 16
    plain, added = (
        H100.seconds(work((PRODUCT, m, n, k, 2 * (m * n + m * k + n * k + more))), MicroBatch(m, m))[1][0]
        for more in (0, m * n)
    )
    assert added - plain == pytest.approx(2 * m * n / (0.8 * 3.35e12), rel=0.2)


def test_attention_on_hopper_is_slower_the_shorter_sequences_are_as_published():
    h100 = derived_from_data_sheet("H100", "cuda", 989e12, 3.35e12, compute_capability=(9, 0))
    for curve, passes, rates in (
        (h100.attention, 1, {1024: 260e12, 4096: 319e12}),
        (h100.attention_backward, 2.5, {1024: 260e12, 4096: 310e12}),
    ):
        for tokens, rate in rates.items():
            assert curve.at(np.array(tokens)) == pytest.approx(passes * 2 * tokens / rate, rel=0.01)
        assert curve.at(np.array(64)) == curve.at(np.array(256)) < curve.at(np.array(1024))


def test_compiled_element_wise_operations_are_one_kernel_for_each_chain():
    steps = [(PRODUCT, 64, 64, 64, 0), (ELEMENTWISE, 0, 0, 0, 3e6), (ELEMENTWISE, 0, 0, 0, 7e6)]
    steps += [(ELEMENTWISE, 0, 0, 0, 5e6), (PRODUCT, 64, 64, 64, 0), (ELEMENTWISE, 0, 0, 0, 1e6)]
    layer = replace(work(*steps, backward_from=3), layers=np.array([0, 0, 0, 0, 0, -1]))
    found = fused(replace(layer, order=np.array([0, 1, 2, 3, 4, 5])))
    assert found.order.tolist() == [0, 2, 3, 4, 5] and found.backward_from == 2
    two = replace(layer, layers=np.array([0, 0, 1, 1, 1, 1]), backward_from=6)
    assert fused(two).order.tolist() == [0, 1, 2, 4, 5]
    outside = replace(layer, layers=np.full(6, -1))
    assert fused(outside).order.tolist() == layer.order.tolist()


def test_a_cpu_adds_what_a_gpu_does_at_the_same_time():
    both = work((PRODUCT, 64, 64, 64, 0), (ELEMENTWISE, 0, 0, 0, 1e6))
    batch = MicroBatch(64, 64**2)
    dispatch, spent = CPU.seconds(both, batch)
    assert CPU.micro_batch_seconds(both, batch) == pytest.approx((dispatch.sum() + spent.sum(), 0.0))
    dispatch, spent = H100.seconds(both, batch)
    forward, _ = H100.micro_batch_seconds(both, batch)
    assert dispatch.sum() + spent[-1] == pytest.approx(forward)  # small kernels wait for their launches
    large = work((PRODUCT, 8192, 8192, 8192, 0), (PRODUCT, 8192, 8192, 8192, 0))
    dispatch, spent = H100.seconds(large, batch)
    assert H100.micro_batch_seconds(large, batch)[0] == pytest.approx(dispatch[0] + spent.sum())


def test_large_products_run_at_a_share_of_the_data_sheet():
    side = np.full(1, 8192.0)
    seconds = H100.products["bfloat16"].at(side, side, side)[0]
    assert 0.6 < 2 * 8192**3 / seconds / 989e12 < 0.7


def test_processes_on_a_cpu_share_it():
    batch, large = MicroBatch(64, 64**2), work((PRODUCT, 512, 512, 512, 0))
    alone, shared = (CPU.shared_by(n).seconds(large, batch) for n in (1, 4))
    assert shared[1] == pytest.approx(4 * alone[1]) and (shared[0] == alone[0]).all()
    assert H100.shared_by(4) is H100


def test_nothing_takes_no_time():
    assert H100.micro_batch_seconds(NO_WORK, MicroBatch(1, 1)) == (0.0, 0.0)

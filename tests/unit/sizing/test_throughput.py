import pytest

from sft_play.sizing.throughput import UTILISATION, Speed, Workload, exchange, seconds_per_step

LORA_8B = Workload(
    matmul_parameters=8_000_000_000, trained_parameters=40_000_000, weight_bytes=16_000_000_000, quantised_parameters=0,
    layers=32, attention_width=4096,
)  # fmt: skip
H100 = Speed(flops=989e12, bandwidth=3.35e12)


def step(work=LORA_8B, speed=H100, **changes):
    values = dict(tokens=8192, sequence=4096, accumulation=1, checkpointing=False) | changes
    return seconds_per_step(work, speed, **values)


def test_large_batches_run_at_the_assumed_share_of_the_peak():
    tokens = 2**20
    flops = 2 * tokens * (2 * LORA_8B.matmul_parameters + 2 * 4096 * 4096 * 32) + tokens * 2 * LORA_8B.trained_parameters
    assert step(tokens=tokens) == pytest.approx(flops / (H100.flops * UTILISATION), rel=0.02)


def test_a_tiny_batch_takes_as_long_as_reading_the_weights():
    assert step(tokens=1) == pytest.approx(step(tokens=2), rel=1e-6)


def test_recomputing_costs_about_half_more_for_a_frozen_base():
    assert step(checkpointing=True) / step() == pytest.approx(1.5, rel=0.05)


def test_full_training_pays_for_weight_gradients():
    full = Workload(8_000_000_000, 8_000_000_000, 32_000_000_000, 0, 32, 4096)
    assert step(work=full) > 1.3 * step()


def test_four_bit_weights_are_unpacked_in_each_pass():
    packed = Workload(8_000_000_000, 40_000_000, 5_000_000_000, 7_500_000_000, 32, 4096)
    assert step(work=packed) > step()


def test_what_is_exchanged_comes_on_top_where_the_link_is_known():
    slow = Speed(flops=989e12, bandwidth=3.35e12, link_bandwidth=10e9)
    assert step(speed=slow, exchanged_bytes=10**9) - step(speed=slow) == pytest.approx(0.1)
    assert step(exchanged_bytes=10**9) == step()


@pytest.mark.parametrize(
    ("engine", "world", "accumulation", "expected"),
    [
        ("none", 1, 8, 0),
        ("ddp", 2, 1, 4000),  # 2 (n - 1) / n of 4000 bytes of gradients
        ("ddp", 2, 8, 4000),  # once a step, however many micro-batches
        ("ddp", 8, 1, 7000),
        ("deepspeed_z2", 2, 1, 4000),  # half is sent while gradients are reduced, half while weights are collected
        ("deepspeed_z2", 2, 8, 18000),
        ("deepspeed_z2", 1, 8, 0),
    ],
)
def test_each_engine_exchanges_what_its_algorithm_says(engine, world, accumulation, expected):
    assert exchange(engine, world, 1000, 4, accumulation) == expected


def test_an_unknown_device_has_no_time():
    assert step(speed=Speed(flops=None, bandwidth=1e12)) is None

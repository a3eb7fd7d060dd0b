"""What processes exchange in a step, and how long it takes: measured, or derived from the link's data sheet."""

import pytest

from sft_play.engines.ddp import bucket_mib
from sft_play.engines.registry import engine_of
from sft_play.planning.clock import sent_bytes
from sft_play.planning.profile import Curve
from sft_play.planning.speed import Collectives, read_collectives, write_collectives
from sft_play.units import GIB, MIB

MEASURED = Collectives(Curve((1e4, 1e6), (1e-3, 1e-2)), Curve((1e4, 1e6), (1e-4, 1e-3)))


@pytest.mark.parametrize(
    ("gradient_bytes", "mib"), [(0, 1), (10 * MIB, 1), (160 * MIB, 10), (1 * GIB, 64), (28 * GIB, 100)]
)  # adapters of a toy, of a 1B and an 8B model; all weights of a 0.3B and a 7B model
def test_buckets_leave_little_to_send_at_the_end(gradient_bytes, mib):
    assert bucket_mib(gradient_bytes) == mib


@pytest.mark.parametrize(
    ("engine", "processes", "accumulation", "expected"),
    [
        ("none", 1, 8, 0),
        ("ddp", 2, 1, 4000),  # 2 (n - 1) / n of 4000 bytes of gradients
        ("ddp", 2, 8, 4000),  # once a step, however many micro-batches
        ("ddp", 8, 1, 7000),
        ("deepspeed_z2", 2, 1, 6000),  # as DDP, and half of the weights
        ("deepspeed_z2", 2, 8, 34000),
        ("deepspeed_z2", 1, 8, 0),
    ],
)
def test_each_engine_exchanges_what_its_algorithm_says(engine, processes, accumulation, expected):
    assert sent_bytes(engine_of(engine).messages(4000, accumulation), processes) == expected


def test_ddp_sends_its_buckets_one_by_one():
    [message] = engine_of("ddp").messages(160 * MIB, 4)
    assert (message.times, message.tensor_bytes) == (16, 10 * MIB)


def test_seconds_of_the_messages_add_up():
    assert MEASURED.seconds(engine_of("ddp").messages(10_000, 4)) == pytest.approx(1e-3)
    assert MEASURED.seconds(engine_of("deepspeed_z2").messages(10_000, 4)) == pytest.approx(4e-3 + 1e-4)
    # in proportion above what was measured, in 16 buckets
    assert MEASURED.seconds(engine_of("ddp").messages(160 * MIB, 1)) == pytest.approx(160 * MIB / 1e6 * 1e-2)
    assert MEASURED.seconds(()) == 0


def test_over_a_link_of_known_speed_both_rounds_of_the_ring_are_paid():
    link = Collectives.over_link(10e9, 2, latency_s=0.0)
    assert not link.measured
    assert link.seconds(engine_of("deepspeed_z2").messages(10**9, 2)) == pytest.approx(0.1 + 0.1 + 0.05)


def test_what_was_measured_survives_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    write_collectives("x", 2, MEASURED)
    assert read_collectives("x") == {2: MEASURED} != {2: Collectives.over_link(1e9, 2)}

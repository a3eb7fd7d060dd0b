"""What processes exchange in a step, and how long it takes: measured, or derived from the link's data sheet."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.engines.base import Message
from sft_play.engines.ddp import bucket_mib
from sft_play.engines.registry import engine_of
from sft_play.planning.speed.clock import sent_bytes
from sft_play.planning.speed.devices import Collectives, read_collectives, write_collectives
from sft_play.planning.speed.profile import Curve
from sft_play.units import GIB, MIB
from sft_play.work import ALL_GATHER, ALL_REDUCE, BYTES, PRODUCT, REDUCE_SCATTER
from tests.plans import plan_with
from tests.unit.sizing.handmade import NO_WORK
from tests.unit.train.plans import PLAN


def work(**changes):
    """No operations, or some."""
    return replace(NO_WORK, **changes)


def trains(gradient_bytes):
    """The work of a micro-batch that gives this many bytes of fp32 gradients."""
    return work(trained_elements=gradient_bytes // 4)


def accumulating(micro_batches, **changes):
    """A plan with so many micro-batches per step of each process."""
    return plan_with(PLAN, gradient_accumulation_steps=micro_batches, **changes)


MEASURED = Collectives(
    Curve((1e4, 1e6), (1e-3, 1e-2)), Curve((1e4, 1e6), (1e-4, 1e-3)), Curve((1e4, 1e6), (5e-4, 5e-3))
)


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
    assert (
        sent_bytes(engine_of(engine).messages(trains(4000), 4, accumulating(accumulation)), processes)
        == expected
    )


def test_ddp_sends_its_buckets_one_by_one():
    [message] = engine_of("ddp").messages(trains(160 * MIB), 4, accumulating(4))
    assert (message.times, message.tensor_bytes) == (16, 10 * MIB)


def test_seconds_of_the_messages_add_up():
    assert MEASURED.seconds(engine_of("ddp").messages(trains(10_000), 4, accumulating(4))) == pytest.approx(
        1e-3
    )
    assert MEASURED.seconds(
        engine_of("deepspeed_z2").messages(trains(10_000), 4, accumulating(4))
    ) == pytest.approx(4e-3 + 1e-4)
    # in proportion above what was measured, in 16 buckets
    assert MEASURED.seconds(
        engine_of("ddp").messages(trains(160 * MIB), 4, accumulating(1))
    ) == pytest.approx(160 * MIB / 1e6 * 1e-2)
    scattered = [Message("reduce_scatter", 10_000, 2), Message("all_gather", 10_000, 1)]
    assert MEASURED.seconds(scattered) == pytest.approx(2 * 5e-4 + 1e-4)
    assert MEASURED.seconds(()) == 0


def test_over_a_link_of_known_speed_both_rounds_of_the_ring_are_paid():
    link = Collectives.over_link(10e9, 2, latency_s=0.0)
    assert not link.measured
    assert link.seconds(
        engine_of("deepspeed_z2").messages(trains(10**9), 4, accumulating(2))
    ) == pytest.approx(0.1 + 0.1 + 0.05)


def test_what_was_measured_survives_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    write_collectives("x", 2, MEASURED)
    assert read_collectives("x") == {2: MEASURED} != {2: Collectives.over_link(1e9, 2)}


def test_fsdp2_sends_what_its_trace_has_sent_for_each_micro_batch():
    """Three gathers, of two sizes, a product, and a reduce-scatter."""
    sizes = np.zeros((4, 6))
    sizes[:, BYTES] = (8_000_000, 2_000_000, 7, 4_000_000)
    kinds = np.array([ALL_GATHER, ALL_GATHER, PRODUCT, REDUCE_SCATTER])
    sent = work(kinds=kinds, sizes=sizes, order=np.array([0, 2, 1, 0, 3]))
    messages = engine_of("fsdp2").messages(sent, 4, accumulating(2))
    found = {(message.kind, message.tensor_bytes): message.times for message in messages}
    assert found == {
        ("all_gather", 8_000_000): 4,
        ("all_gather", 2_000_000): 2,
        ("reduce_scatter", 4_000_000): 2,
    }
    assert sent_bytes(messages, 4) == 2 * (8_000_000 + 8_000_000 + 2_000_000 + 4_000_000) * 3 // 4
    assert sent_bytes([*messages, Message("all_reduce", 1_000_000, 1)], 8, 2) == (
        2 * (8_000_000 + 8_000_000 + 2_000_000 + 4_000_000) * 3 // 4 + 2 * 1_000_000 // 2
    )  # inside each machine of four as before, and once around two machines
    link = Collectives.over_link(1e9, 4, latency_s=0.0)
    assert link.seconds(messages) == pytest.approx(sent_bytes(messages, 4) / 1e9, rel=0.01)


def test_fsdp2_reduces_once_per_step_what_waits_for_the_last_micro_batch():
    """Among replicas always; inside one, if gradients are kept whole. Weights are gathered each time."""
    sizes = np.zeros((3, 6))
    sizes[:, BYTES] = (8000, 4000, 2000)
    kinds = np.array([ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE])
    sent = work(kinds=kinds, sizes=sizes, order=np.array([0, 1, 2]))
    for defers, reduced in ((False, 3), (True, 1)):
        messages = engine_of("fsdp2").messages(sent, 4, accumulating(3, defers_exchange=defers))
        found = {message.kind: message.times for message in messages}
        assert found == {"all_gather": 3, "reduce_scatter": reduced, "all_reduce": 1}

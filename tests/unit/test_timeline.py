"""Traces with a few layers, repeated to any depth."""

from dataclasses import replace

import numpy as np
import pytest

from sft_play.timeline import PHASES, Buffer, LayersDiffer
from tests.unit.sizing.handmade import TraceBuilder, step_of


def live_bytes(step):
    return np.cumsum(step.timeline.changes(step.sizes))


@pytest.mark.parametrize("depth", [3, 4, 30])
def test_three_traced_layers_represent_any_number(depth):
    few = step_of(3, (0, *[1] * (depth - 2), 2)).step
    all_of_them = step_of(depth, tuple(range(depth))).step
    assert few.peaks() == all_of_them.peaks()
    assert np.array_equal(live_bytes(few), live_bytes(all_of_them))
    assert few.peaks()["forward"].bytes == 1000 + depth * 110 + 2 + 7


def test_terms_of_a_peak_add_up_to_it():
    peak = step_of(3, (0, 1, 1, 2)).step.peaks()["forward"]
    assert peak.terms["weights"] == 1400
    assert sum(peak.terms.values()) == peak.bytes


def test_blocks_are_rounded_up_one_by_one():
    peaks = step_of(3, (0, 1, 2)).step.rounded(512).peaks()
    assert peaks["load"].bytes == 1024 + 3 * 512


def test_a_step_without_an_evaluation_has_no_such_phase():
    assert set(step_of(3, (0, 1, 2)).step.peaks()) < set(PHASES)


def test_peaks_inside_layers_leave_out_the_loss():
    step = step_of(3, (0, 1, 2)).step
    assert step.peaks()["forward"].bytes - step.peaks(in_layers=True)["forward"].bytes == 7 - 2


def test_the_worked_example_of_expand():
    r = TraceBuilder()
    r.segment("forward")
    previous = None
    for layer in range(3):
        r.segment("forward", layer)
        r.allocate(10 * layer)  # what the layer saves for its backward pass
        output = r.allocate(10 * layer + 1)
        if previous:
            r.free(previous)
        previous = output
    timeline = r.trace((0, 1, 1, 1, 2)).step.timeline
    assert timeline.events.tolist() == [1, 2, 3, 4, -2, 5, 6, -4, 7, 8, -6, 9, 10, -8]
    assert timeline.source.tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 4, 5]


def test_traces_that_differ_in_sizes_alone_are_repeated_once():
    one = step_of(3, (0, 1, 1, 2))
    larger, deeper = replace(one, sizes=2 * one.sizes), replace(one, stand_ins=(0, 1, 1, 1, 2))
    assert one.step.timeline is larger.step.timeline is not deeper.step.timeline
    assert larger.step.peaks()["forward"].bytes == 2 * one.step.peaks()["forward"].bytes
    assert deeper.step.peaks()["forward"].bytes == one.step.peaks()["forward"].bytes + 110


def test_a_step_with_more_blocks_keeps_one_timeline_and_small_numbers():
    """A plan keeps those of all its steps, each with hundreds of thousands of events."""
    step = step_of(3, (0, *[1] * 28, 2)).step
    begins, ends = (Buffer("engine", 10, phase, "backward") for phase in ("forward", "backward"))
    line = step.with_buffers(begins, ends).timeline
    assert [longer for longer, _ in step.timeline.longer.values()] == [line]
    assert step.timeline.events.dtype == line.events.dtype == line.source.dtype == np.int32


@pytest.mark.parametrize(("stand_ins", "fails"), [((0, 1, 2, 2, 2, 3, 4), False), ((0, 1, 1, 2, 3, 4), True)])
def test_what_a_layer_hands_to_the_one_after_the_next_passes_over_no_layer_that_stands_for_others(
    stand_ins, fails
):
    """Each of five traced layers frees what the one before the last has allocated."""
    r = TraceBuilder()
    r.segment("forward")
    held = []
    for layer in range(5):
        r.segment("forward", layer)
        if layer > 1:
            r.free(held[layer - 2])
        held.append(r.allocate(2))
    r.segment("forward")
    for block in held[3:]:
        r.free(block)
    trace = r.trace(stand_ins)
    if fails:
        with pytest.raises(LayersDiffer):
            trace.step  # noqa: B018
    else:
        assert trace.step.timeline.events.tolist() == [1, 2, -1, 3, -2, 4, -3, 5, -4, 6, -5, 7, -6, -7]


def test_layers_that_pass_on_different_blocks_cannot_represent_each_other():
    r = TraceBuilder()
    r.segment("forward")
    r.allocate(1)
    r.segment("forward", 0)
    first = r.allocate(2)
    r.segment("forward", 1)
    r.free(first)
    r.allocate(2)
    r.allocate(2)
    # Nobody frees the two blocks of the middle layer, so a copy of it finds nothing to free.
    r.segment("forward", 2)
    with pytest.raises(LayersDiffer):
        _ = r.trace((0, 1, 1, 2)).step


def test_the_same_structure_may_have_other_sizes_but_no_other_events():
    one, other = step_of(3, (0, 1, 2)), step_of(3, (0, 1, 2), saved=999)
    assert one.same_structure(other)
    assert not one.same_structure(step_of(4, (0, 1, 2, 3)))

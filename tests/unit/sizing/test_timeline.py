"""Recordings with a few layers, repeated to any depth."""

import numpy as np
import pytest

from sft_play.sizing.timeline import PHASES, LayersDiffer
from tests.unit.sizing.recorded import Recorder, step_of


@pytest.mark.parametrize("depth", [3, 4, 30])
def test_three_recorded_layers_stand_for_any_number(depth):
    few = step_of(3, (0, *[1] * (depth - 2), 2)).step
    all_of_them = step_of(depth, tuple(range(depth))).step
    assert few.peaks() == all_of_them.peaks()
    assert np.array_equal(few.live_bytes(), all_of_them.live_bytes())
    assert few.peaks()["forward"].bytes == 1000 + depth * 110 + 2 + 7


def test_terms_of_a_peak_add_up_to_it():
    peak = step_of(3, (0, 1, 1, 2)).step.peaks()["forward"]
    assert peak.terms["weights"] == 1400
    assert sum(peak.terms.values()) == peak.bytes


def test_blocks_are_rounded_up_one_by_one():
    peaks = step_of(3, (0, 1, 2)).step.peaks(granularity=512)
    assert peaks["load"].bytes == 1024 + 3 * 512


def test_a_step_without_an_evaluation_has_no_such_phase():
    assert set(step_of(3, (0, 1, 2)).step.peaks()) < set(PHASES)


def test_peaks_inside_layers_leave_out_the_loss():
    step = step_of(3, (0, 1, 2)).step
    assert step.peaks()["forward"].bytes - step.peaks(in_layers=True)["forward"].bytes == 7 - 2


def test_layers_that_hand_on_different_things_cannot_stand_for_each_other():
    r = Recorder()
    r.segment("forward")
    r.allocate(1)
    r.segment("forward", 0)
    first = r.allocate(2)
    r.segment("forward", 1)
    r.free(first)
    r.allocate(2)
    r.allocate(2)
    r.segment("forward", 2)  # the middle layer leaves two blocks that nobody frees, so a copy of it finds nothing to free
    with pytest.raises(LayersDiffer):
        _ = r.trace((0, 1, 1, 2)).step


def test_the_same_structure_may_have_other_sizes_but_no_other_events():
    one, other = step_of(3, (0, 1, 2)), step_of(3, (0, 1, 2), saved=999)
    assert one.same_structure(other)
    assert not one.same_structure(step_of(4, (0, 1, 2, 3)))

"""The order of the first steps of a run, ours and published ones."""

import pytest

from benchmarks.evidence.habits import Habits, history
from sft_play.sizing.estimate.allocator import EMPTY_CACHE, replay, replay_steps
from sft_play.timeline import TERMS
from sft_play.units import MIB
from tests.unit.sizing.handmade import TraceBuilder, step_of

WEIGHTS, STATES, GRADIENTS = (TERMS.index(name) for name in ("weights", "optimizer", "gradients"))


def small_run():
    """Sizes tell the blocks apart: weights 1, state 2, activation 3, gradient 4, output 5, roots 6."""
    r = TraceBuilder()
    r.segment("load")
    r.allocate(1, WEIGHTS)
    r.segment("forward")
    r.allocate(2, STATES)
    activation = r.allocate(3)
    output = r.allocate(5)
    r.segment("backward")
    gradient = r.allocate(4, GRADIENTS)
    r.free(activation)
    r.segment("optimizer")
    roots = r.allocate(6)
    r.free(roots)
    r.segment("evaluation")
    r.free(output)
    r.free(gradient)
    return r.trace((0,)).step


def sizes_in_order(habits):
    """The sizes of the history; frees are negative."""
    sizes, order = {}, []
    for number, size in history(small_run(), habits):
        if (number, size) == EMPTY_CACHE:
            order.append(0)
        elif size:
            sizes[number] = size
            order.append(size)
        else:
            order.append(-sizes.pop(number))
    return order


def test_states_are_born_after_the_first_backward_pass_and_the_second_step_has_them():
    step = [3, 5, 4, -3, 2, 6, -6, -5, -4]
    again = [3, 5, 4, -3, 6, -6, -5, -4]
    assert sizes_in_order(Habits()) == [1, *step, *again]


def test_workspaces_stay_and_loading_can_begin_with_a_large_block_and_end_with_an_empty_cache():
    habits = Habits(workspace_bytes=8, warmup_bytes=9, clears_cache=True)
    assert sizes_in_order(habits)[:10] == [9, -9, 1, 0, 8, 3, 5, 8, 4, -3]
    assert sizes_in_order(habits).count(8) == 2


def test_outputs_can_live_until_the_next_forward_pass_has_ended():
    order = sizes_in_order(Habits(holds_outputs=True))
    assert order == [1, 3, 5, 4, -3, 2, 6, -6, -4, 3, 5, -5, 4, -3, 6, -6, -5, -4]


@pytest.mark.parametrize("expandable", [True, False])
def test_a_workspace_is_reserved(expandable):
    step = step_of(3, (0, 1, 2), saved=30 * MIB).step
    without = replay_steps(step, expandable=expandable)
    found = replay_steps(step, workspace_bytes=32 * MIB, expandable=expandable)
    assert found.allocated == without.allocated + 64 * MIB and found.reserved > without.reserved


def test_without_habits_published_runs_are_as_ours():
    step = step_of(3, (0, 1, 2), saved=30 * MIB).step
    habits = Habits(workspace_bytes=32 * MIB, warmup_bytes=40 * MIB)
    assert replay(history(step, habits)) == replay_steps(
        step, workspace_bytes=32 * MIB, warmup_bytes=40 * MIB
    )

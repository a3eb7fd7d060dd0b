"""Micro-batches in between, engines and budgets."""

from dataclasses import replace

import pytest

from sft_play.plan import Memory
from sft_play.sizing.estimate.budget import (
    ASSUMED_COMMUNICATOR,
    ASSUMED_CONTEXT,
    COMPILER_RAM,
    LOOSE_SHARE,
    DeviceBudget,
    device_budget,
    guard,
    host_budget,
)
from sft_play.sizing.estimate.memory import SizedStep, estimate, scaled_step
from sft_play.sizing.estimate.samples import basis
from sft_play.sizing.step import StepSpec
from sft_play.units import GIB, MIB
from tests.unit.sizing.handmade import step_of


def test_a_phase_has_a_kink_where_another_moment_becomes_the_highest():
    """Here only what layers save grows with the rows, not the loss: the peak is not linear."""
    traces = {rows: step_of(3, (0, *[1] * 8, 2), saved=10 * rows) for rows in (2, 3, 40)}
    known = [traces[2], traces[3]], [(2, 2), (3, 3)]
    assert scaled_step(*known, (40, 40), (40, 40)).peaks() == traces[40].step.peaks()
    one = step_of(3, (0, *[1] * 8, 2), saved=10).step.peaks()
    assert scaled_step(*known, (1, 1), (1, 1)).peaks() == one


def test_nothing_follows_from_traces_of_different_structure():
    spec, trace, other = StepSpec(mode="full"), step_of(3, (0, 1, 2)), step_of(4, (0, 1, 2, 3))
    assert basis(spec, {(2, 1.0): trace, (3, 1.0): trace}) == [(2, 1.0), (3, 1.0)]
    assert basis(spec, {(2, 1.0): trace, (3, 1.0): other}) == []


def test_the_budget_is_for_the_process_with_its_context_and_communicator():
    free = 80 * GIB
    one = device_budget("cuda", free, compute_capability=(10, 0))
    two = device_budget("cuda", free, world_size=2, compute_capability=(8, 0))
    assert one.budget_bytes == two.budget_bytes == free - guard("cuda", free).bytes
    step = step_of(3, (0, 1, 2)).step
    alone, together = (estimate([SizedStep(step)], device, complete=True) for device in (one, two))
    assert alone.process_bytes == alone.reserved_bytes + ASSUMED_CONTEXT
    assert together.process_bytes == together.reserved_bytes + ASSUMED_CONTEXT + ASSUMED_COMMUNICATOR
    assert one.workspace_bytes == 2 * 32 * MIB and two.workspace_bytes == 2 * (8 * MIB + 128 * 1024)
    assert one.assumed == ("context",) and two.assumed == ("context", "communicator")


@pytest.mark.parametrize(
    ("capability", "workspace"),
    [((7, 5), 8.125), ((8, 0), 8.125), ((8, 9), 8.125), (None, 8.125)]
    + [(since, 32) for since in ((9, 0), (10, 0), (10, 3), (12, 0))],
)
def test_workspaces_are_larger_on_hopper_and_on_every_blackwell_gpu(capability, workspace):
    device = device_budget("cuda", 80 * GIB, compute_capability=capability)
    assert device.workspace_bytes == 2 * workspace * MIB


def test_the_context_is_that_of_the_generation_where_it_was_measured():
    turing = device_budget("cuda", 15 * GIB, compute_capability=(7, 5))
    assert turing.context_bytes == 141 * MIB and turing.assumed == ("context",)
    assert device_budget("cuda", 80 * GIB, compute_capability=(9, 0)).context_bytes == 753 * MIB
    assert device_budget("cuda", 15 * GIB, compute_capability=(8, 9)).context_bytes == ASSUMED_CONTEXT


def test_measured_overheads_are_not_called_assumed():
    device = device_budget("cuda", GIB, context_bytes=300 * MIB, world_size=2)
    assert device.assumed == () and device.context_bytes == 300 * MIB


def test_the_ram_of_processes_that_compile_stays_free():
    plain, compiling = (device_budget("cpu", 10 * GIB, compilers=count) for count in (0, 4))
    assert compiling.guard.bytes == plain.guard.bytes + 4 * COMPILER_RAM
    assert compiling.budget_bytes == plain.budget_bytes - 4 * COMPILER_RAM
    assert compiling.guard.why == f"{plain.guard.why}; with 2.00 GiB for 4 compilers"
    assert host_budget(None, 2, compilers=3).own_bytes == host_budget(None, 2).own_bytes + 3 * COMPILER_RAM


def test_the_estimate_takes_the_highest_phase_and_its_terms_add_up():
    device = device_budget("cuda", 10 * GIB)
    memory = estimate([SizedStep(step_of(3, (0, 1, 2)).step)], device)
    assert memory.peak_bytes == max(memory.phases.values()) == memory.phases[memory.peak_phase]
    assert sum(size for name, size in memory.terms.items() if name != "context") == memory.peak_bytes
    assert memory.budget_bytes == device.budget_bytes
    assert {phase: sum(terms.values()) for phase, terms in memory.phase_terms.items()} == memory.phases


def test_the_cpu_rounds_nothing_and_has_no_context():
    memory = estimate([SizedStep(step_of(3, (0, 1, 2)).step)], device_budget("cpu", 10 * GIB))
    assert (
        memory.peak_bytes == 1000 + 3 * 110 + 2 + 7 + 2
    )  # the loss and its gradient, while the stream is there
    assert memory.terms["context"] == 0


def test_on_a_gpu_fragmentation_counts():
    step = step_of(3, (0, 1, 2), saved=300 * MIB).step
    tight = DeviceBudget(budget_bytes=GIB)
    memory = estimate([SizedStep(step)], tight)
    assert memory.reserved_bytes > memory.peak_bytes and memory.process_bytes == memory.reserved_bytes
    device = device_budget("cuda", 80 * GIB)
    roomy = estimate([SizedStep(step)], device)
    assert roomy.reserved_bytes is None  # it cannot decide
    assert roomy.process_bytes == roomy.peak_bytes + device.context_bytes
    complete = estimate([SizedStep(step)], device, complete=True)
    assert complete.reserved_bytes > complete.peak_bytes == roomy.peak_bytes
    on_cpu = estimate([SizedStep(step_of(3, (0, 1, 2)).step)], device_budget("cpu", GIB), complete=True)
    assert on_cpu.process_bytes == on_cpu.peak_bytes < 2000 and on_cpu.reserved_bytes is None


def test_json_has_all_three_numbers_and_on_a_cpu_the_first_alone():
    step = step_of(3, (0, 1, 2)).step
    gpu = estimate([SizedStep(step)], device_budget("cuda", 80 * GIB), complete=True)
    tree = gpu.to_json()
    assert tree["peak_bytes"] < tree["reserved_bytes"] < tree["process_bytes"] == gpu.process_bytes
    assert Memory.from_json(tree) == gpu
    cpu = estimate([SizedStep(step)], device_budget("cpu", GIB)).to_json()
    assert cpu["peak_bytes"] > 0 and cpu["reserved_bytes"] is cpu["process_bytes"] is None


def test_what_a_process_takes_at_most_must_fit_too():
    memory = estimate([SizedStep(step_of(3, (0, 1, 2)).step)], device_budget("cuda", 80 * GIB))
    most = replace(memory, at_most_bytes=memory.budget_bytes)
    assert memory.fits and most.fits and not replace(most, at_most_bytes=memory.budget_bytes + 1).fits


def test_4_bit_weights_in_fixed_segments_have_a_larger_guard():
    free = 15 * GIB
    settings = dict(compute_capability=(7, 5))
    plain, fixed, expandable, loose = (
        device_budget("cuda", free, **settings, quantized=quantized, expandable=grows).guard.bytes
        for quantized, grows in ((False, True), (False, False), (True, True), (True, False))
    )
    assert plain == fixed == expandable == guard("cuda", free).bytes
    assert loose == int(LOOSE_SHARE * free) > plain


def test_fixed_segments_need_more_than_expandable_ones_and_matter_earlier():
    step = step_of(3, (0, 1, 2), saved=31 * MIB + 600 * 1024).step
    fixed, expandable = (
        estimate([SizedStep(step)], DeviceBudget(budget_bytes=170 * MIB, expandable=value))
        for value in (False, True)
    )
    assert fixed.peak_bytes == expandable.peak_bytes < 0.8 * 170 * MIB
    assert fixed.reserved_bytes > fixed.peak_bytes and expandable.reserved_bytes is None

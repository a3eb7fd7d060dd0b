"""What each engine makes of a step: its blocks, phase by phase."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from sft_play.choices.optimizers import state_bytes
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Division
from sft_play.engines.deepspeed import configuration
from sft_play.engines.registry import ALONE, ENGINES, engine_of, offload_problem
from sft_play.engines.zero2 import Buckets, parts_of
from sft_play.engines.zero3 import sub_groups
from sft_play.sizing.estimate.allocator import as_changes, first_steps
from sft_play.sizing.estimate.budget import device_budget
from sft_play.sizing.estimate.memory import SizedStep, estimate
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.trace import update_bytes
from sft_play.timeline import PHASES, TERMS, WHOLE_MODEL, Buffer
from sft_play.units import GIB, MIB
from tests.unit.sizing.handmade import TraceBuilder, step_of

DDP, ZERO2, ZERO3 = engine_of("ddp"), engine_of("deepspeed_z2"), engine_of("deepspeed_z3")
TRAINED = 1_000_000  # elements of 2 bytes, with 4 bytes of states in the step of one process


def trained_step(trained=TRAINED, frozen=0):
    """A step with weights, gradients that are freed in the optimizer phase, and states.

    Beside frozen weights of so many bytes, adapters are trained.
    """
    r = TraceBuilder()
    r.segment("load")
    if frozen:
        r.allocate(frozen, TERMS.index("weights"))
    r.allocate(2 * trained, TERMS.index("adapters" if frozen else "weights"))
    r.segment("forward")
    gradients = r.allocate(2 * trained, TERMS.index("gradients"))
    r.allocate(4 * trained, TERMS.index("optimizer"))
    activations = r.allocate(500)
    r.segment("backward")
    r.free(activations)
    r.segment("optimizer")
    temporary = r.allocate(100, TERMS.index("temporaries"))
    r.free(temporary)
    r.free(gradients)
    r.segment("evaluation")
    r.free(r.allocate(50))
    return r.trace(()).step


def division(world_size=2, accumulates=False, states=8, **settings):
    return Division(
        world_size=world_size,
        accumulates=accumulates,
        element_bytes=2,
        state_bytes=lambda elements: states * elements,
        **settings,
    )


def more_than_alone(engine, **settings):
    """Bytes that the peak of each phase is higher than that of a single process."""
    alone = trained_step().peaks()
    shared = engine.transform(trained_step(), division(**settings)).peaks()
    return {phase: shared[phase].bytes - alone[phase].bytes for phase in alone}


def test_a_single_process_is_left_as_it_is():
    step = trained_step()
    assert ALONE.transform(step, division(1)) is step


def test_ddp_keeps_its_gradient_buckets_during_evaluation():
    kept = 2 * TRAINED
    expected = dict.fromkeys(PHASES, 0) | {"load": 2 * TRAINED, "evaluation": kept}
    assert more_than_alone(DDP) == expected


def test_gradients_that_ddp_has_not_exchanged_yet_are_beside_its_buckets():
    kept = 2 * TRAINED
    expected = {"load": 2 * TRAINED, "forward": kept, "backward": kept, "optimizer": 0, "evaluation": kept}
    assert more_than_alone(DDP, accumulates=True) == expected


def test_the_first_micro_batch_of_several_makes_its_gradients_beside_ddps_buckets():
    kept = more_than_alone(DDP, precedes=True)
    assert kept["forward"] == kept["backward"] == 2 * TRAINED and kept["optimizer"] == 0


def test_the_broadcast_of_weights_has_a_bound():
    step = trained_step(GIB)
    assert DDP.transform(step, division()).peaks()["load"].terms["engine"] == 250 * MIB


TENTHS = [[TRAINED // 10] * 10]  # a group of ten tensors, the third of which is in two of four parts


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(("autocasts", "cast"), [(True, 0), (False, 4)])
def test_zero2_holds_a_share_of_states_and_gradients(autocasts, cast, accumulates):
    """Without autocast, DeepSpeed keeps and reduces those of 16-bit weights in fp32."""
    world, share = 4, TRAINED // 4
    of_four = division(world, accumulates, autocasts=autocasts, trained=lambda: TENTHS)
    kept = 2 * TRAINED * 3 // 10 if autocasts else 4 * share  # tensors on borders are kept whole
    shared = ZERO2.transform(trained_step(), of_four).peaks()
    assert shared["forward"].terms["optimizer"] == 12 * share
    assert shared["forward"].terms["gradients"] == (kept if accumulates else 0)
    # all fit into one bucket, which is flattened, and cast, when the backward pass is done
    joined = (2 + 2 + cast) * TRAINED - (0 if accumulates or cast else kept)
    assert shared["backward"].terms["engine"] == joined
    assert shared["backward"].terms["gradients"] == kept
    assert shared["backward"].terms["activations"] == 0
    assert shared["optimizer"].terms["gradients"] == kept
    # the norm of the largest piece, in 64 bits, or the gradients of the part flat and in fp32
    assert shared["optimizer"].terms["engine"] == (6 * share if autocasts else 8 * TRAINED // 10)
    assert shared["evaluation"].terms["gradients"] == 0
    assert all(sum(peak.terms.values()) == peak.bytes for peak in shared.values())


@pytest.mark.parametrize(("room", "copied"), [(None, 2), (4 * TRAINED, 2), (4 * TRAINED - 1, 0)])
def test_zero2_copies_what_is_trained_on_a_device_that_has_room_for_it_twice(room, copied):
    """Before it makes the states of its part, since it has freed what it copied by then."""
    for processes in (2, 64):
        of_many = replace(division(processes), room_bytes=room)
        peaks = ZERO2.transform(trained_step(), of_many).peaks()
        states = peaks["forward"].terms["optimizer"]
        assert states >= 12 * TRAINED / processes
        assert peaks["load"].bytes == 2 * TRAINED + max(copied * TRAINED, states)


def test_zero2_keeps_reduced_gradients_during_the_backward_pass_if_buckets_are_filled(monkeypatch):
    monkeypatch.setattr(Buckets, "shipped", lambda: Buckets(elements=TRAINED // 10, overlap=False))
    share = TRAINED // 2
    halves = division(2, accumulates=True, autocasts=True, trained=lambda: TENTHS)
    shared = ZERO2.transform(trained_step(), halves).peaks()
    assert shared["backward"].terms["gradients"] == 2 * 2 * share
    assert (
        shared["backward"].terms["engine"] == 2 * 2 * TRAINED // 10
        and shared["backward"].terms["activations"]
    )


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("autocasts", [True, False])
@pytest.mark.parametrize("groups", [TENTHS, [TENTHS[0][:8], TENTHS[0][:2]]], ids=["one", "two"])
def test_zero2_updates_the_part_of_a_group_at_once(autocasts, accumulates, groups):
    """What the optimizer allocates is beside the gradients in fp32, and the sums of groups that wait."""
    shares = [sum(group) // 2 for group in groups]
    sums = sum(shares) * (4 if not autocasts else 2 * (len(groups) > 1))
    updating = division(
        autocasts=autocasts,
        accumulates=accumulates,
        trained=lambda: groups,
        update_bytes=lambda elements: 20 * elements,
    )
    peak = ZERO2.transform(trained_step(), updating).peaks()["optimizer"]
    allocated = peak.terms["engine"] + peak.terms["gradients"]
    assert allocated == (20 + 4 * autocasts) * shares[0] + sums
    assert peak.terms["temporaries"] == 0  # of an update of one tensor after the other


def test_parts_of_zero2_are_those_of_deepspeed():
    """Padded, and with the tensors on their borders, as `get_partition_info` of DeepSpeed cuts them."""
    groups, processes = [[5, 90, 7, 300, 1, 1], [], [3, 3]], 3
    sizes = [136, 2]
    for rank, part in enumerate(parts_of(groups, processes)):
        assert part.sizes == sizes
        inside = []
        for group, size in zip([groups[0], groups[2]], sizes, strict=True):
            start, end, at = size * rank, size * (rank + 1), 0
            for elements in group:
                if start <= at < end or at < start < at + elements:
                    inside.append((elements, min(at + elements, end) - max(at, start)))
                at += elements
        assert part.whole == sum(elements for elements, _ in inside)
        assert part.largest == max(piece for _, piece in inside)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_zero3_holds_fp32_weights_states_and_flat_gradients_of_its_share(device):
    """The step is that of one of two processes: its gradients are those of its share. All fill a bucket."""
    share = TRAINED
    two = replace(division(), device=device)
    shared = ZERO3.transform(trained_step(), two).peaks()
    ahead = 2 * 50_000_000 if device == "cuda" else 0
    reduced = 4 * share * (2 if device == "cpu" else 1)  # with gloo's copy
    assert shared["forward"].terms["optimizer"] == 12 * share
    assert shared["evaluation"].terms["gradients"] == 2 * share
    assert shared["forward"].terms["engine"] == 4 * share + ahead
    whole = 2 * 2 * share  # no weights of this step are a layer's, so they are gathered until its end
    assert shared["backward"].terms["engine"] == 4 * share + reduced + whole + ahead
    assert not shared["backward"].terms["activations"]  # they are gone when all gradients are there
    assert shared["optimizer"].terms["engine"] == 10 * share + ahead
    assert all(sum(peak.terms.values()) == peak.bytes for peak in shared.values())


def test_zero3_reduces_among_the_layers_what_does_not_fit_into_one_bucket():
    share = 50_000_000
    backward = ZERO3.transform(trained_step(share), replace(division(), device="cuda")).peaks()["backward"]
    assert backward.terms["activations"]
    assert backward.terms["engine"] == 2 * 2 * share + 2 * share  # two buckets, and what is gathered ahead


def test_zero3_leaves_its_share_to_ram_with_gradients_in_fp32_besides():
    """What a GPU has left are buckets, and what is gathered ahead."""
    share, step = TRAINED, trained_step()
    held = ("weights", "gradients", "optimizer")
    in_ram = tuple(np.flatnonzero(np.isin(step.timeline.terms, [TERMS.index(name) for name in held])))
    step = replace(step, timeline=replace(step.timeline, in_ram=in_ram))
    whole = ZERO3.transform(step, replace(division(), device="cuda", offloads=True))
    ram, left = whole.in_ram().peaks()["evaluation"], whole.on_device().peaks()["optimizer"]
    assert [ram.terms[name] for name in held] == [2 * share, (2 + 4) * share, (4 + 8) * share]
    assert ram.bytes == 20 * share
    assert left.terms["engine"] == 4 * share + 2 * 50_000_000
    assert not any(left.terms[name] for name in held)


@pytest.mark.parametrize("world", [1, 3])
def test_fp32_vectors_are_deepspeeds(world):
    """As many, and of the same sizes; at a limit, one parameter above it, and in groups of one."""
    limit = configuration(3)["zero_optimization"]["sub_group_size"]
    groups = [[limit * world, 7], [limit * world - 8, 7, 7 * world, 4 * limit, 1], [5]]

    def parameter(elements: int) -> SimpleNamespace:
        return SimpleNamespace(partition_numel=lambda: -(-elements // world))

    found = [
        sum(each.partition_numel() for each in vector)
        for group in groups
        for vector in DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups(
            SimpleNamespace(sub_group_size=limit), [parameter(elements) for elements in group]
        )
    ]
    assert sub_groups(groups, world) == found
    assert len(found) > len(groups)


@pytest.mark.parametrize("frozen", [0, 7_000_000])
def test_zero3_leaves_gradients_in_ram_where_the_rest_is_on_a_disk(frozen):
    """Frozen weights, trained ones in both types, and the states, which the division leaves out itself."""
    away = replace(division(), device="cpu", offloads=True)
    ram, files = (
        ZERO3.transform(trained_step(frozen=frozen), replace(away, states_on_disk=on_disk)).peaks()
        for on_disk in (False, True)
    )
    for phase, peak in files.items():
        assert ram[phase].bytes - peak.bytes == frozen + (2 + 4) * TRAINED, phase
        assert peak.terms["gradients"] == (2 + 4) * TRAINED


def test_zero3_with_offload_on_a_cpu_has_all_of_it_in_its_only_memory():
    two = replace(division(), device="cpu")
    plain, away = (
        ZERO3.transform(trained_step(), replace(two, offloads=offloads)).peaks() for offloads in (False, True)
    )
    assert away["evaluation"].bytes == plain["evaluation"].bytes + 4 * TRAINED
    assert away["optimizer"].terms["engine"] == 4 * TRAINED  # nothing is flattened and cast


@pytest.mark.parametrize("elements", [4000, 1_000_000])
@pytest.mark.parametrize(("optimizer", "each"), [("adamw", 8), ("adamw_8bit", 2)])
def test_states_of_a_share_are_those_of_the_optimizer(optimizer, each, elements):
    """In 8 bits, those of 4,096 elements or more, with a scale for every 256."""
    found = state_bytes(optimizer, "cpu", elements)
    scales = 0 if each == 8 else 2 * 4 * -(-elements // 256)
    assert found == (8 * elements if elements < 4096 else each * elements + scales)


@pytest.mark.parametrize(
    ("optimizer", "device", "each"),
    [("adamw", "cpu", 0), ("adamw_8bit", "cpu", 20), ("adamw_8bit", "cuda", 0)],
)
def test_an_update_of_8_bits_on_a_cpu_makes_five_fp32_copies(optimizer, device, each):
    """Both moments, the scaled gradient, and the root before and after its correction."""
    elements = 10_000
    assert (
        update_bytes(StepSpec(mode="full", optimizer=optimizer, device=device), elements) == each * elements
    )


def test_more_processes_with_zero2_never_need_more():
    totals = [
        max(peak.bytes for peak in ZERO2.transform(trained_step(), division(world)).peaks().values())
        for world in (1, 2, 4, 8)
    ]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_a_checkpoint_finds_weights_and_states_and_under_ddp_the_gradients_too(engine):
    terms = {"weights": 400, "adapters": 50, "optimizer": 100, "gradients": 50, "activations": 400}
    saved = engine.saved_from_memory(terms)
    assert sum(saved.values()) == (600 if engine is DDP else 550) and saved["activations"] == 0


@pytest.mark.parametrize("engine", [DDP, ZERO2], ids=lambda engine: engine.name)
def test_an_engines_buffers_are_in_the_replay_of_the_allocator(engine):
    """In both of its steps, and those that live through the run are never freed."""
    changes = list(as_changes(*first_steps(engine.transform(trained_step(), division(accumulates=True)))))
    alone = list(as_changes(*first_steps(trained_step())))
    assert len(changes) > len(alone)
    allocated = {number for number, size in changes if size}
    freed = {number for number, size in changes if number and not size}
    assert freed <= allocated
    estimated = estimate(
        [SizedStep(trained_step(16 * MIB))],
        device_budget("cuda", 80 * GIB),
        engine,
        division(),
        complete=True,
    )
    assert estimated.reserved_bytes >= estimated.peak_bytes


def test_events_keep_the_layer_that_they_belong_to():
    line = step_of(3, (0, 1, 1, 1, 2)).step.timeline
    forward = line.layers[(line.phases == PHASES.index("forward")) & (line.layers != WHOLE_MODEL)]
    assert list(dict.fromkeys(forward.tolist())) == [0, 1, 2, 3, 4]
    shared = DDP.transform(step_of(3, (0, 1, 1, 1, 2)).step, division()).timeline
    assert len(shared.layers) == len(shared.events) == len(shared.phases)


def test_a_buffer_of_phases_that_a_step_lacks_is_left_out():
    step = step_of(3, (0, 1, 2)).step
    same = step.with_buffers(Buffer("engine", 10, "evaluation", "evaluation"))
    assert same.timeline is step.timeline and same.sizes is step.sizes


def test_blocks_that_are_taken_out_leave_the_others_alone():
    peaks, without = trained_step().peaks(), trained_step().without("optimizer", "gradients").peaks()
    assert without["forward"].bytes == peaks["forward"].bytes - 6 * TRAINED
    assert without["load"] == peaks["load"]


@pytest.mark.parametrize(
    ("change", "measured_mib"),
    [
        (dict(elements=10_000_000), 21152 - 19284),
        (dict(elements=100_000_000), 21152 - 19625),
        (dict(overlap=False), 21152 - 20198),
    ],
)
def test_zero2_buckets_cost_what_deepspeed_1302_measured(change, measured_mib):
    """https://github.com/deepspeedai/DeepSpeed/issues/1302: 21152 MiB with 5e8 elements and overlap."""
    trained = 10**10
    saved = Buckets().bytes(trained, 2) - replace(Buckets(), **change).bytes(trained, 2)
    assert saved / MIB == pytest.approx(measured_mib, abs=1.5)


def test_one_bucket_that_holds_all_needs_no_second_one():
    assert Buckets().bytes(40_000_000, 2) == 2 * 40_000_000
    assert Buckets(elements=10_000_000).bytes(40_000_000, 2) == 2 * 2 * 10_000_000


def test_the_deepspeed_config_gives_the_buckets():
    assert Buckets.shipped().elements < 500_000_000


def config(tuning=None, **train) -> RunConfig:
    tree = {"model": {"name": "a/b"}, "data": {"train_path": "x"}, "tuning": tuning or {}, "train": train}
    return RunConfig.model_validate(tree)


def test_an_optimizer_that_zero2_cannot_divide_is_a_problem_of_it_alone():
    assert [engine.problem(config()) for engine in ENGINES] == [None] * len(ENGINES)
    problems = [engine.problem(config(optimizer="adafactor")) for engine in ENGINES]
    assert problems[:2] == [None, None] and "or parallel.engine=ddp" in problems[2]


def test_only_zero3_does_not_divide_weights_in_4_bits_that_dora_unpacks():
    dora = config({"mode": "qlora", "lora": {"use_dora": True}})
    problems = {engine.name: engine.problem(dora) for engine in ENGINES}
    assert [name for name, problem in problems.items() if problem] == ["deepspeed_z3"]
    assert "use parallel.engine=fsdp2 or deepspeed_z2" in problems["deepspeed_z3"]
    assert engine_of("deepspeed_z3").problem(config({"mode": "lora", "lora": {"use_dora": True}})) is None
    for name, refused in (("fsdp2", False), ("deepspeed_z3", True)):
        parallel = dora.parallel.model_copy(update={"engine": name, "offload": "ram"})
        assert bool(offload_problem(dora.model_copy(update={"parallel": parallel}), "cpu", "no")) is refused

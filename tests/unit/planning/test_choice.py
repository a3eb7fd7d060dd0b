"""The search on memory models that are simple enough to know the right answer."""

import re
from dataclasses import replace

import pytest

from sft_play.config.parallel import ParallelConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import DoesNotFitError, UntraceableModel
from sft_play.plan import Device, HostMemory, Memory, Plan
from sft_play.planning.candidates.drafts import draft_plans
from sft_play.planning.search.choice import choose_plan
from sft_play.reasons import choices
from sft_play.reasons.method import master_weights
from sft_play.units import GIB
from tests.plans import plan_with

GPU = Device(kind="cuda", name="NVIDIA A100", bf16=True)
CPU = Device(kind="cpu", name="CPU", bf16=True)


def config(mode: str = "lora", engine: str = "auto", **train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "data": {"train_path": "d"},
            "tuning": {"mode": mode},
            "train": {"effective_batch_size": 32, **train},
            "parallel": {"engine": engine},
        }
    )


def memory_of(
    budget_gib: float, base: float = 10, row: float = 4, recomputed_row: float = 1, shared: float = 2
):
    """Peak = weights + rows x activations; ZeRO-2 partitions `shared` GiB, QLoRA has a third of the base."""

    def estimate(run: RunConfig, plan, complete=False) -> Memory:
        per_row = (recomputed_row if plan.activations.recomputes else row) * plan.rows.max_seq_len / 1024
        weights = base / 3 if run.tuning.mode == "qlora" else base
        if plan.sharing.engine == "deepspeed_z2":
            weights -= shared * (1 - 1 / plan.sharing.world_size)
        terms = {"weights": int(weights * GIB), "activations": int(plan.rows_per_micro_batch * per_row * GIB)}
        return Memory(
            budget_bytes=int(budget_gib * GIB),
            peak_bytes=sum(terms.values()),
            peak_phase="backward",
            terms=terms,
            phases={"backward": sum(terms.values())},
        )

    return estimate


def clock(overhead: float, per_row: float = 1.0):
    """A step's time: accumulation x (overhead + rows), a third more where activations are recomputed."""

    def seconds(run, plan) -> float:
        work = per_row * plan.rows_per_micro_batch * (4 / 3 if plan.activations.recomputes else 1)
        return plan.batch.accumulation * (overhead + work)

    return seconds


def choose(run: RunConfig, estimate, time, world_size: int = 1, machines: int = 1) -> Plan:
    return chosen_because(run, estimate, time, world_size, machines)[0]


def chosen_because(
    run: RunConfig, estimate, time, world_size: int = 1, machines: int = 1, device: Device = GPU
) -> tuple[Plan, list[str]]:
    count = dict(world_size=world_size, machines=machines)
    drafts = draft_plans(run, device=device, **count, rows=1000, max_seq_len=1024, attention="sdpa")
    return choose_plan(run, drafts, estimate, time)


def why_engine(why: list[str]) -> str:
    [said] = [reason for reason in why if re.match("[^ ]+( hybrid)? over [0-9]+ processes", reason)]
    return said


def test_the_effective_batch_is_kept_whatever_fits():
    for budget in (11.5, 15, 20, 40, 200):
        plan = choose(config(), memory_of(budget), clock(0.5))
        assert plan.batch.micro * plan.batch.accumulation == 32
        assert plan.memory.peak_bytes <= plan.memory.budget_bytes


def test_activations_are_kept_when_they_fit_and_recomputed_when_they_do_not():
    assert not choose(config(), memory_of(40), clock(0.1)).activations.recomputes
    tight, why = chosen_because(config(), memory_of(13), clock(0.1))
    assert tight.activations.recomputes and choices.recomputing(True, "exceed") in why


def test_the_fastest_is_taken_and_on_a_tie_the_larger_micro_batch():
    flat, why = chosen_because(
        config(), memory_of(1000), lambda config, plan: 1.0 + 0.2 * plan.activations.recomputes
    )
    assert (flat.batch.micro, flat.step_seconds) == (32, 1.0)
    assert choices.micro_batch(32, timed=True, whole_step=True) in why
    steep = choose(config(), memory_of(1000), clock(5.0))
    assert steep.batch.micro == 32


def test_a_larger_micro_batch_that_is_slower_is_left():
    plan, why = chosen_because(
        config(), memory_of(1000), lambda config, plan: 1.0 + abs(plan.batch.micro - 8)
    )
    assert plan.batch.micro == 8 and choices.micro_batch(8, timed=True, fits=32) in why


def test_the_reason_for_the_micro_batch_speaks_of_the_plans_in_the_table():
    """What would fit with activations recomputed would not fit without; both are said."""
    plan, why = chosen_because(config(), memory_of(20), clock(0.1))
    assert choices.micro_batch(2, timed=True, misfit=4, other=8, activations="recompute") in why
    fits = {
        (row["micro_batch_size"], row["gradient_checkpointing"]): row["fits"] for row in plan.alternatives
    }
    assert fits[4, False] is False and any(fits[key] for key in fits if key[1])


def test_every_micro_batch_of_the_chosen_kind_is_listed():
    plan = choose(config(), memory_of(1000), clock(5.0))
    alike = [row for row in plan.alternatives if not row["gradient_checkpointing"]]
    assert sorted(row["micro_batch_size"] for row in alike) == [1, 2, 4, 8, 16]


def test_recomputing_is_never_shown_as_faster_than_the_same_plan_without():
    """As a clock would have it that was corrected by a measurement of the chosen plan alone."""
    plan = choose(
        config(batch_size=4), memory_of(1000), lambda run, plan: 1.0 - plan.activations.recomputes / 2
    )
    assert [row["relative_speed"] for row in plan.alternatives if row["gradient_checkpointing"]] == [1.0]


def test_checkpointing_is_taken_where_the_larger_micro_batch_is_worth_its_compute():
    plan, why = chosen_because(config(), memory_of(20), clock(5.0))
    assert plan.activations.recomputes and plan.batch.micro == 8
    assert choices.recomputing(True, "faster") in why


def test_unknown_speed_takes_the_largest_micro_batch_that_fits_without_checkpointing():
    plan = choose(config(), memory_of(40), None)
    assert plan.batch.micro > 1 and not plan.activations.recomputes
    assert plan.memory.peak_bytes <= plan.memory.budget_bytes


LAYERS = 16


def of_layers(kept_row: float = 4, recomputed_row: float = 1, base: float = 10, budget: float = 20):
    """Memory and seconds in proportion to the layers that are recomputed, and what was asked for."""
    asked: list[Plan] = []

    def share(plan: Plan) -> float:
        return (1 - plan.activations.kept_layers / LAYERS) * plan.activations.recomputes

    def estimate(run: RunConfig, plan: Plan, complete=False) -> Memory:
        asked.append(plan)
        row = kept_row + share(plan) * (recomputed_row - kept_row)
        return memory_of(budget, base, row, row)(run, plan)

    def seconds(run: RunConfig, plan: Plan) -> float:
        work = plan.rows_per_micro_batch * (1 + share(plan) / 3)
        return plan.batch.accumulation * (0.5 + work)

    return estimate, seconds, asked


def mixed_plan(run: RunConfig, estimate, seconds, world_size: int = 1) -> tuple[Plan, list[str]]:
    drafts = draft_plans(
        run, device=GPU, world_size=world_size, rows=1000, max_seq_len=1024, attention="sdpa"
    )
    return choose_plan(run, drafts, estimate, seconds, layers=LAYERS)


def test_as_many_layers_keep_their_activations_as_fit():
    """4 rows take 4 GiB with all layers recomputed, and each of 16 layers that is not takes 0.75 more."""
    estimate, seconds, asked = of_layers()
    plan, why = mixed_plan(config(batch_size=4), estimate, seconds)
    assert (plan.batch.micro, plan.activations.policy, plan.activations.kept_layers) == (4, "recompute", 8)
    assert plan.memory.peak_bytes == 20 * GIB
    assert choices.partly_recomputing(8, LAYERS) in why
    # half of them, a guess, the next one, and the result with all its parts
    assert len([each for each in asked if each.activations.kept_layers]) <= 4
    rows = {row["activations"]: row for row in plan.alternatives}
    assert rows["recompute"]["fits"] and not rows["keep"]["fits"] and rows["recompute"]["relative_speed"] < 1


def test_a_larger_micro_batch_may_be_worth_more_than_layers_that_keep_theirs():
    """Of 8 rows, a single layer can; that is 1.1% faster than none, and more is a tie."""
    estimate, seconds, _ = of_layers()
    plan, why = mixed_plan(config(), estimate, lambda run, plan: seconds(run, plan) + plan.batch.accumulation)
    assert (plan.batch.micro, plan.activations.kept_layers) == (8, 1)
    assert choices.micro_batch(8, timed=True, misfit=16) in why


def test_layers_are_mixed_only_where_that_is_faster_than_either_extreme():
    estimate, seconds, asked = of_layers()

    def no_faster(run: RunConfig, plan: Plan) -> float:
        return seconds(run, plan_with(plan, kept_layers=0))

    assert mixed_plan(config(), estimate, no_faster)[0].activations.kept_layers == 0
    asked.clear()
    assert mixed_plan(config(), of_layers(budget=200)[0], seconds)[0].activations.policy == "keep"
    for fixed in ({"gradient_checkpointing": True}, {"activations": "recompute"}, {"activations": "keep"}):
        assert mixed_plan(config(**fixed), estimate, seconds)[0].activations.kept_layers == 0
    assert not any(plan.activations.kept_layers for plan in asked)


def test_layers_of_ddp_are_mixed_although_those_of_zero_would_be_faster():
    """ZeRO-2 is not taken for its predicted speed, so it is no mark that DDP has to be below."""
    estimate, seconds, _ = of_layers()

    def faster_zero(run: RunConfig, plan: Plan) -> float:
        return seconds(run, plan) * (0.98 if plan.sharing.engine == "deepspeed_z2" else 1)

    plan, _ = mixed_plan(config(batch_size=4), estimate, faster_zero, world_size=2)
    assert (plan.sharing.engine, plan.activations.kept_layers) == ("ddp", 8)


def test_a_model_whose_layers_cannot_be_told_apart_is_not_mixed():
    estimate, seconds, _ = of_layers()

    def whole_only(run: RunConfig, plan: Plan, complete=False) -> Memory:
        if plan.activations.kept_layers:
            raise UntraceableModel("all layers differ")
        return estimate(run, plan)

    plan, _ = mixed_plan(config(), whole_only, seconds)
    assert plan.activations.kept_layers == 0 and plan.memory.fits


def in_ram_of(budget: float, needed: int = 4):
    """As `memory_of`, of a GPU; inputs in RAM leave half a GiB of each row, and `needed` GiB of RAM."""

    def estimate(run: RunConfig, plan: Plan, complete=False) -> Memory:
        if plan.activations.policy != "offload":
            return memory_of(budget, recomputed_row=2)(run, plan)
        host = HostMemory(
            budget_bytes=8 * GIB, processes=1, own_bytes=0, terms={"activations": needed * GIB}, saved_bytes=0
        )
        return replace(memory_of(budget, recomputed_row=0.5)(run, plan), host=host)

    return estimate


def test_inputs_are_offloaded_only_if_nothing_else_fits():
    assert choose(config(), in_ram_of(12), clock(0.1)).activations.policy == "recompute"
    plan, why = chosen_because(config(), in_ram_of(11), clock(0.1))
    assert (plan.activations.policy, plan.batch.micro, plan.sharing.offload) == ("offload", 2, "none")
    assert choices.inputs_in_ram("cuda", "exceed", plan.memory.host) in why
    plan, why = chosen_because(config(activations="offload"), in_ram_of(100), clock(0.1))
    assert plan.activations.policy == "offload"
    assert choices.inputs_in_ram("cuda", "config", plan.memory.host) in why
    with pytest.raises(DoesNotFitError, match="1.00 GiB more than the budget of 11.00 GiB"):
        choose(config(), in_ram_of(11, needed=9), clock(0.1))


def test_a_link_of_unknown_speed_is_not_chosen_for_activations():
    def seconds(run: RunConfig, plan: Plan) -> float | None:
        return None if plan.activations.policy == "offload" else clock(0.1)(run, plan)

    with pytest.raises(DoesNotFitError, match="micro-batch 1, gradient checkpointing"):
        choose(config(), in_ram_of(11), seconds)
    assert choose(config(activations="offload"), in_ram_of(11), seconds).activations.policy == "offload"


def test_what_was_fixed_by_hand_stays_fixed():
    plan = choose(config(gradient_checkpointing=True, batch_size=4), memory_of(40), clock(0.1))
    assert (plan.batch.micro, plan.activations.recomputes) == (4, True)


def test_ddp_is_preferred_and_the_reason_says_what_zero_would_save():
    plan, why = chosen_because(config(), memory_of(40), clock(0.1), world_size=2)
    assert plan.sharing.engine == "ddp"
    assert re.fullmatch("DDP over 2 processes: .*; ZeRO-2 would save 1.00 GiB", why_engine(why))


def test_zero_is_not_taken_for_its_smaller_update_alone():
    """A clock sees that ZeRO-2 shares the update, not what it costs to partition."""

    def seconds(run, plan) -> float:
        return clock(0.5)(run, plan) * (0.8 if plan.sharing.engine == "deepspeed_z2" else 1)

    plan = choose(config(), memory_of(80), seconds, world_size=2)
    assert plan.sharing.engine == "ddp"


def test_zero_is_taken_where_only_it_fits():
    plan, why = chosen_because(config(gradient_checkpointing=True), memory_of(10.5), clock(0.1), world_size=4)
    assert plan.sharing.engine == "deepspeed_z2" and "ZeRO-2 over 4 processes" in why


def test_a_misfit_says_by_how_much():
    with pytest.raises(DoesNotFitError) as caught:
        choose(config(), memory_of(8), clock(0.1))
    text = str(caught.value)
    assert "needs 11.00 GiB in the backward phase, 3.00 GiB more than the budget of 8.00 GiB" in text


def in_halves(budget_gib: float, host_gib: float | None = None):
    """Weights of 10 GiB in fp32 and of 5 in bf16; if `host_gib` is given, RAM has them."""
    plain = memory_of(budget_gib, base=0, row=1)

    def estimate(run: RunConfig, plan, complete=False) -> Memory:
        if run.tuning.mode == "full":
            assert plan.precision.dtype == ("float32" if run.model.dtype == "auto" else run.model.dtype)
        weights, memory = (10 if plan.precision.dtype == "float32" else 5) * GIB, plain(run, plan)
        if host_gib:
            budget = int(host_gib * GIB)
            host = HostMemory(
                budget_bytes=budget, processes=1, own_bytes=0, terms={"weights": weights}, saved_bytes=0
            )
            return replace(memory, host=host)
        return replace(memory, peak_bytes=memory.peak_bytes + weights)

    return estimate


def test_the_plan_says_what_masters_cost_and_what_pure_bf16_saves():
    full = config("full", batch_size=1)
    pure = full.model_copy(update={"model": full.model.model_copy(update={"dtype": "bfloat16"})})
    for run, dtype in ((full, "float32"), (pure, "bfloat16")):
        plan, why = chosen_because(run, in_halves(40), None)
        assert plan.precision.dtype == dtype and master_weights(dtype, 5 * GIB) in why
        plan, why = chosen_because(run, in_halves(40, 40), None)
        assert master_weights(dtype, 5 * GIB, "RAM") in why
    assert "master weights" not in " ".join(chosen_because(config(), memory_of(40), None)[1])
    zero = config("full", "deepspeed_z2", batch_size=1)  # which keeps masters in any case
    assert "master weights" not in " ".join(chosen_because(zero, in_halves(40), None, world_size=2)[1])


def test_alternatives_are_the_best_of_each_other_kind_with_their_cost():
    plan = choose(config(), memory_of(40), clock(0.1), world_size=2)
    kinds = {(row["engine"], row["gradient_checkpointing"]): row for row in plan.alternatives}
    recomputed = kinds[("ddp", True)]
    assert recomputed["fits"] and 0.7 < recomputed["relative_speed"] < 1
    assert all(row["peak_bytes"] for row in plan.alternatives)


def test_larger_budgets_are_never_slower():
    times = [
        clock(2.0)(None, choose(config(), memory_of(budget), clock(2.0)))
        for budget in (11.5, 14, 18, 30, 60, 150)
    ]
    assert times == sorted(times, reverse=True)


def test_candidates_beyond_the_first_that_does_not_fit_are_not_sized():
    asked = []
    inner = memory_of(15)

    def counting(run, plan, complete=False):
        asked.extend([] if complete else [plan])  # the chosen one is asked for again
        return inner(run, plan)

    choose(config(gradient_checkpointing=True), counting, clock(0.1))
    assert [plan.batch.micro for plan in asked] == [1, 2, 4, 8]
    assert plan_with(asked[0], micro_batch_size=1) == asked[0]


def test_a_step_without_accumulation_may_fit_where_a_smaller_micro_batch_does_not():
    """Its forward pass has no gradients of an earlier micro-batch: 14 GiB for four rows, 19 for one."""
    asked = []

    def estimate(run, plan, complete=False):
        asked.append(plan.batch.micro)
        found = memory_of(budget, row=1)(run, plan)
        gradients = 8 * GIB * (plan.batch.accumulation > 1)
        return replace(
            found, terms=found.terms | {"gradients": gradients}, peak_bytes=found.peak_bytes + gradients
        )

    run, budget = config(mode="full", effective_batch_size=4, activations="keep"), 15
    assert choose(run, estimate, clock(0.1)).batch.micro == 4 and 2 not in asked
    budget = 10.5  # where it is no use without gradients, it is not even sized
    asked.clear()
    with pytest.raises(DoesNotFitError):
        choose(run, estimate, clock(0.1))
    assert set(asked) == {1}


def test_recomputing_activations_that_fit_is_sized_for_the_report_alone():
    asked = []
    inner = memory_of(1000)

    def counting(run, plan, complete=False):
        asked.extend([] if complete else [plan])  # the chosen one is asked for again
        return inner(run, plan)

    plan = choose(config(), counting, clock(0.1))
    recomputed = [other.batch.micro for other in asked if other.activations.recomputes]
    assert recomputed == [plan.batch.micro]
    assert any(row["gradient_checkpointing"] for row in plan.alternatives)


@pytest.mark.parametrize(
    ("budget", "train", "looked_at"),
    [
        (100, dict(gradient_checkpointing=True), 1),  # all 16 rows fit: nothing is left to win
        (13, dict(gradient_checkpointing=True), 4),  # two rows fit; with more memory there could be four
        (15, {}, 5),  # activations are recomputed for want of memory
    ],
)
def test_the_other_engine_is_searched_only_where_its_memory_could_help(budget, train, looked_at):
    asked = []
    inner = memory_of(budget)

    def counting(run, plan, complete=False):
        asked.extend([] if complete else [plan])  # the chosen one is asked for again
        return inner(run, plan)

    _, why = chosen_because(config(**train), counting, clock(2.0), world_size=2)
    assert sum(other.sharing.engine == "deepspeed_z2" for other in asked) == looked_at
    assert "ZeRO-2" in why_engine(why)


def that_ran_out(rows: int, checkpointing: bool = True):
    """Memory as in `memory_of(40)`; it ran out with so many rows in a micro-batch, or more."""

    def estimate(run, plan, complete=False) -> Memory:
        concerned = checkpointing or not plan.activations.recomputes
        ran_out = concerned and plan.rows_per_micro_batch >= rows
        return replace(memory_of(40)(run, plan), ran_out=ran_out)

    return estimate


def test_a_plan_with_which_memory_ran_out_is_left_for_a_smaller_one():
    assert choose(config(), memory_of(40), clock(0.1)).batch.micro == 4
    plan, why = chosen_because(config(gradient_checkpointing=False), that_ran_out(4), clock(0.1))
    assert plan.batch.micro == 2 and plan.memory.fits
    assert choices.micro_batch(2, timed=True, misfit=4, ran_out=True) in why
    [larger] = [row for row in plan.alternatives if row["micro_batch_size"] == 4]
    assert larger["ran_out"] and not larger["fits"] and larger["process_bytes"] < 40 * GIB


def test_where_memory_ran_out_with_one_row_it_is_tried_with_activations_recomputed():
    plan = choose(config(), that_ran_out(1, checkpointing=False), clock(0.1))
    assert plan.activations.recomputes and plan.memory.fits


def test_if_memory_ran_out_with_all_plans_the_one_that_needs_least_is_tried_again():
    """The prediction says that it fits, and who asks again may have made room for it."""
    plan = choose(config(), that_ran_out(1), clock(0.1))
    assert (plan.batch.micro, plan.activations.recomputes) == (1, True)
    fixed = choose(config(batch_size=4, gradient_checkpointing=False), that_ran_out(1), clock(0.1))
    assert fixed.batch.micro == 4 and fixed.memory.ran_out and fixed.memory.within_budget


def test_memory_that_ran_out_does_not_hide_that_a_plan_is_predicted_not_to_fit():
    with pytest.raises(DoesNotFitError, match="needs 26.00 GiB in the backward phase, 2.00 GiB more than"):
        choose(
            config(batch_size=4, gradient_checkpointing=False),
            lambda run, plan, complete=False: replace(memory_of(24)(run, plan), ran_out=True),
            clock(0.1),
        )


def divided_memory(budget_gib: float, weights: float = 40, layer: float = 2, row: float = 4):
    """Peak = weights + rows x activations; FSDP2 divides the weights and gathers a layer of them.

    Gradients that wait for the last micro-batch of a step take half a layer. Weights may stay gathered.
    """
    asked: list[tuple[str, int]] = []

    def estimate(run: RunConfig, plan, complete=False) -> Memory:
        asked.append((plan.sharing.engine, plan.sharing.world_size))
        held = weights / plan.sharing.shards + layer if plan.sharing.engine == "fsdp2" else weights
        held += layer / 2 if plan.sharing.defers_exchange else 0
        held += 0 if plan.sharing.reshard_after_forward else weights - layer
        size = int((held + plan.rows_per_micro_batch * row / (4 if plan.activations.recomputes else 1)) * GIB)
        return Memory(
            budget_bytes=int(budget_gib * GIB),
            peak_bytes=size,
            peak_phase="backward",
            terms={"weights": size},
            phases={"backward": size},
        )

    return estimate, asked


def slower_with_fsdp2(times: float | None):
    """The clock of `clock`, with steps of FSDP2 that take so many times as long; None: nobody knows."""
    usual = clock(0.1)

    def seconds(run, plan) -> float | None:
        if plan.sharing.engine != "fsdp2":
            return usual(run, plan)
        return times and times * usual(run, plan)

    return seconds


def test_weights_are_divided_where_nothing_else_fits():
    estimate, _ = divided_memory(30)
    plan, why = chosen_because(config(), estimate, slower_with_fsdp2(3.0), 4)
    assert plan.sharing.engine == "fsdp2" and why_engine(why).endswith("; no other engine fits")


def test_a_divided_step_is_not_even_sized_where_more_memory_would_gain_nothing():
    estimate, asked = divided_memory(200)
    assert choose(config(), estimate, slower_with_fsdp2(0.5), 4).sharing.engine == "ddp"
    assert "fsdp2" not in {engine for engine, _ in asked}


def test_more_memory_for_ddp_does_not_hide_that_divided_weights_are_sent_less_often():
    """Each of four micro-batches sends them; to recompute all rows at once takes less time than that."""
    usual, found = clock(0.1), []

    def seconds(run: RunConfig, plan: Plan) -> float:
        update = 1 if plan.sharing.engine == "fsdp2" else 16
        sent = 4 * plan.batch.accumulation if plan.sharing.engine == "fsdp2" else 0
        return usual(run, plan) + update + sent

    for budget in (30, 50):  # DDP does not fit, or keeps activations of two rows
        plan = choose(config("full"), divided_memory(budget)[0], seconds, 4)
        assert plan.sharing.engine == "fsdp2"
        found.append(seconds(config("full"), plan))
    assert found[1] <= found[0]


@pytest.mark.parametrize(("times", "engine"), [(1.5, "ddp"), (1.0, "fsdp2"), (0.76, "fsdp2"), (None, "ddp")])
def test_weights_are_divided_only_for_a_step_that_is_known_to_be_faster(times, engine):
    """Without it activations are recomputed, a third more work; with it they are kept."""
    estimate, asked = divided_memory(42.5)
    assert choose(config(), estimate, slower_with_fsdp2(times), 4).sharing.engine == engine
    assert "fsdp2" in {engine for engine, _ in asked}


@pytest.mark.parametrize(
    ("device", "times", "engine"),
    [(GPU, 0.9, "fsdp2"), (GPU, 0.96, "ddp"), (CPU, 0.9, "ddp"), (CPU, 0.7, "fsdp2")],
)
def test_a_gain_from_dividing_weights_that_would_fit_must_exceed_the_error_of_its_seconds(
    device, times, engine
):
    estimate, _ = divided_memory(200)
    plan, why = chosen_because(config("full"), estimate, slower_with_fsdp2(times), 4, device=device)
    assert plan.sharing.engine == engine
    if engine == "fsdp2":
        assert re.search(f"; DDP would .* and take {1 / times:.2f} times as long$", why_engine(why))
    else:
        assert "times as long" not in why_engine(why)


@pytest.mark.parametrize(("budget", "engine"), [(70, "fsdp2"), (60, "ddp")])
def test_an_engine_may_be_the_fastest_since_its_weights_stay_gathered(budget, engine):
    """It sends too much otherwise. Kept, the weights take 66 GiB beside four rows; DDP takes 56."""
    estimate, _ = divided_memory(budget)
    sends, keeps = slower_with_fsdp2(1.1), saves_by_keeping(0.3)

    def seconds(run, plan) -> float:
        return sends(run, plan) * keeps(run, plan) / clock(0.1)(run, plan)

    plan, why = chosen_because(config("full", batch_size=4), estimate, seconds, 4)
    assert (plan.sharing.engine, plan.sharing.reshard_after_forward) == (
        engine,
        engine == "ddp",
    ) and plan.memory.fits
    assert any("gathered" in reason for reason in why) == (engine == "fsdp2")


@pytest.mark.parametrize(
    ("budget", "rows", "micro_batch", "defers"),
    [(17, 32, 1, True), (16.5, 32, 1, False), (44.5, 32, 8, False), (1000, 32, 8, False)],
)
def test_gradients_are_exchanged_once_per_step_where_they_fit_until_then(budget, rows, micro_batch, defers):
    """A row takes 4 GiB, and 12 are taken by weights. With one micro-batch per step, nothing can wait."""
    estimate, _ = divided_memory(budget)
    settings = config(engine="fsdp2", effective_batch_size=rows, gradient_checkpointing=False)
    plan, why = chosen_because(settings, estimate, clock(0.1), 4)
    assert (plan.batch.micro, plan.sharing.defers_exchange) == (micro_batch, defers)
    assert ("which exchange gradients once per step" in why_engine(why)) == defers and plan.memory.fits


@pytest.mark.parametrize("least", [None, clock(0.1)])
def test_a_plan_is_not_timed_with_gradients_that_wait_if_it_takes_too_long_without_them(least):
    run, waiting = config(engine="fsdp2", effective_batch_size=32, gradient_checkpointing=False), list[bool]()
    drafts = draft_plans(run, device=GPU, world_size=4, rows=1000, max_seq_len=1024, attention="sdpa")

    def seconds(run, plan) -> float:
        waiting.append(plan.sharing.defers_exchange)
        return clock(0.1)(run, plan)

    plan, _ = choose_plan(run, drafts, divided_memory(1000)[0], seconds, least)
    assert (plan.batch.micro, any(waiting)) == (8, least is None)


@pytest.mark.parametrize(("asked", "budget"), [(True, 44.5), (False, 17)])
def test_gradients_wait_or_not_as_the_config_says(asked, budget):
    """Where the plan would not let them, since nothing can wait, and where it would."""
    estimate, _ = divided_memory(budget)
    settings = config(engine="fsdp2", gradient_checkpointing=False)
    parallel = ParallelConfig(engine="fsdp2", defer_exchange=asked)
    plan, _ = chosen_because(settings.model_copy(update={"parallel": parallel}), estimate, clock(0.1), 4)
    assert plan.sharing.defers_exchange == asked and plan.memory.fits


@pytest.mark.parametrize(("own_gib", "waits"), [(4, True), (5, False)])
def test_gradients_that_would_be_too_large_whole_are_not_sized(own_gib, waits):
    """Each of four processes has its part of them, and 17 GiB."""
    sizes, waiting = divided_memory(17)[0], list[bool]()

    def estimate(run: RunConfig, plan, complete=False) -> Memory:
        waiting.append(plan.sharing.defers_exchange)
        terms = {"optimizer": {"gradients": own_gib * GIB}}
        return replace(sizes(run, plan, complete), phase_terms=terms)

    settings = config(engine="fsdp2", effective_batch_size=32, gradient_checkpointing=False)
    assert choose(settings, estimate, clock(0.1), 4).sharing.defers_exchange == waits
    assert any(waiting) == waits


def saves_by_keeping(share: float | None):
    """The clock of `clock`; weights that stay gathered save this share of a step. None: nobody knows."""
    usual = clock(0.1)

    def seconds(run, plan) -> float | None:
        times = 1 if plan.sharing.reshard_after_forward else 1 - (share or 0)
        return None if share is None else usual(run, plan) * times

    return seconds


@pytest.mark.parametrize(
    ("asked", "budget", "saves", "cause", "kept", "defers"),
    [
        ("auto", 55, 0.3, "faster", True, True),
        (
            "auto",
            54.2,
            0.3,
            "faster",
            True,
            False,
        ),  # faster than gradients that wait, for which it leaves nothing
        ("auto", 53.9, 0.3, "exceed", False, True),
        ("auto", 100, 0.005, "tie", False, True),
        ("auto", 100, None, "unknown", False, True),
        (True, 100, 0.3, "freed", False, True),
        (False, 100, 0.0, "kept", True, True),
    ],
)
def test_weights_stay_gathered_where_that_fits_and_is_faster(asked, budget, saves, cause, kept, defers):
    """Of 40 GiB of weights a process has 10 and a layer of 2; a row takes 4 GiB."""
    estimate, _ = divided_memory(budget)
    settings = config(engine="fsdp2", batch_size=1, gradient_checkpointing=False)
    parallel = ParallelConfig(engine="fsdp2", reshard_after_forward=asked)
    plan, why = chosen_because(
        settings.model_copy(update={"parallel": parallel}), estimate, saves_by_keeping(saves), 4
    )
    assert choices.gathered_weights(cause, 0.3) in why and plan.memory.fits
    assert (not plan.sharing.reshard_after_forward, plan.sharing.defers_exchange) == (kept, defers)


@pytest.mark.parametrize(("budget", "policy"), [(51.5, "recompute"), (55, "keep"), (41, "keep")])
def test_what_fits_is_recomputed_if_weights_can_then_stay_gathered(budget, policy):
    """Then 38 GiB more are taken, and 30% of the time saved; a row takes 4 GiB, or 1 and a third more time."""
    estimate, _ = divided_memory(budget)
    plan, why = chosen_because(
        config(engine="fsdp2", effective_batch_size=4), estimate, saves_by_keeping(0.3), 4
    )
    gathered = not plan.sharing.reshard_after_forward
    assert (plan.activations.policy, gathered) == (policy, budget > 50) and plan.memory.fits
    assert (choices.recomputing(True, "gathered") in why) == (policy == "recompute")
    assert [row["activations"] for row in plan.alternatives if row["engine"] == "fsdp2"]


@pytest.mark.parametrize("processes", [4, 512])
def test_what_cannot_fit_is_not_traced(processes):
    """All weights take 40 GiB of the 30, wherever the peak of the plan is, on however many GPUs."""
    estimate, _ = divided_memory(30)
    usual, kept = saves_by_keeping(0.3), list[bool]()

    def with_terms(run, plan, complete=False) -> Memory:
        kept.append(not plan.sharing.reshard_after_forward)
        memory = estimate(run, plan)
        return replace(memory, phase_terms={"forward": {"weights": int(40 / plan.sharing.shards * GIB)}})

    def timed(run, plan) -> float | None:
        kept.append(not plan.sharing.reshard_after_forward)
        return usual(run, plan)

    settings = config(engine="fsdp2", effective_batch_size=512)
    plan, why = chosen_because(settings, with_terms, timed, processes)
    assert choices.gathered_weights("exceed", 0) in why and not any(kept) and plan.memory.fits


@pytest.mark.parametrize("engine", ["ddp", "deepspeed_z2", "deepspeed_z3"])
@pytest.mark.parametrize("setting", [{"reshard_after_forward": False}, {"defer_exchange": True}])
def test_an_engine_that_has_no_such_thing_is_refused(engine, setting):
    with pytest.raises(ValueError, match=f"does not work with parallel.engine={engine}, only with fsdp2"):
        RunConfig.model_validate(config().model_dump() | {"parallel": {"engine": engine, **setting}})


def test_a_tie_leaves_weights_whole():
    """Recomputing takes a third more; FSDP2, which keeps activations, takes as long here."""
    estimate, _ = divided_memory(42.5)

    def seconds(run, plan):
        return plan.batch.accumulation * 0.1 + 1.0

    assert choose(config(effective_batch_size=4), estimate, seconds, 4).sharing.engine == "ddp"


@pytest.mark.parametrize(("budget", "replicas"), [(30, 2), (12.5, 1)])
def test_each_of_two_machines_holds_the_model_where_it_can(budget, replicas):
    estimate, _ = divided_memory(budget)
    plan, why = chosen_because(config(), estimate, slower_with_fsdp2(None), 8, machines=2)
    assert (plan.sharing.engine, plan.sharing.replicas, plan.sharing.shards) == (
        "fsdp2",
        replicas,
        8 // replicas,
    )
    assert (f"on each of {replicas} machines" in why_engine(why)) == (replicas > 1)


@pytest.mark.parametrize(("network", "replicas"), [(1.0, 1), (2.0, 2)])
def test_all_machines_hold_the_model_once_if_activations_that_fit_then_are_worth_more_than_the_network(
    network, replicas
):
    """Divided among all, activations are kept; inside a machine they are recomputed, a third more work."""
    estimate, _ = divided_memory(14)

    def seconds(run, plan):
        return clock(0.1)(run, plan) * (
            network if plan.sharing.engine == "fsdp2" and plan.sharing.replicas == 1 else 1
        )

    plan = choose(config(effective_batch_size=8), estimate, seconds, 8, machines=2)
    assert (plan.sharing.engine, plan.sharing.replicas, plan.activations.recomputes) == (
        "fsdp2",
        replicas,
        replicas == 2,
    )


def offloading(budget_gib: float, ram_gib: float | None):
    """As `memory_of`; what offloads has no weights on the GPU, and needs 100 GiB of RAM."""
    plain = memory_of(budget_gib)

    def estimate(run: RunConfig, plan, complete=False) -> Memory:
        memory = plain(run, plan)
        if plan.sharing.offload == "none":
            return memory
        budget = None if ram_gib is None else int(ram_gib * GIB)
        host = HostMemory(
            budget_bytes=budget, processes=1, own_bytes=0, terms={"weights": 100 * GIB}, saved_bytes=0
        )
        rows = memory.terms["activations"]
        return replace(memory, peak_bytes=rows, terms={"activations": rows}, host=host)

    return estimate


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("ram", [None, 128])
def test_what_fits_nowhere_else_is_offloaded(world_size, ram):
    """Weights of 10 GiB: on 9 GiB only with them in RAM, on 40 never, even where that would be faster."""
    run, faster = config(), lambda run, plan: 1.0 if plan.sharing.offload == "none" else 0.1
    small, why = chosen_because(run, offloading(9, ram), faster, world_size)
    assert (small.sharing.engine, small.sharing.offload) == ("fsdp2", "ram")
    assert any("optimizer states in RAM" in reason and "since nothing else fits" in reason for reason in why)
    assert choose(run, offloading(40, ram), faster, world_size).sharing.offload == "none"


def test_what_does_not_fit_says_where():
    never = config().model_copy(update={"parallel": ParallelConfig(offload="none")})
    with pytest.raises(DoesNotFitError, match=r"needs 11.00 GiB in the backward phase"):
        choose(never, offloading(9, 128), None)
    with pytest.raises(DoesNotFitError, match=r"needs 11.00 GiB in the backward phase"):
        choose(config(), offloading(9, 64), None)  # neither the GPU nor RAM is enough
    asked = config().model_copy(update={"parallel": ParallelConfig(offload="ram")})
    with pytest.raises(
        DoesNotFitError, match=r"needs 100.00 GiB of RAM for 1 process, 36.00 GiB more than .* 64.00"
    ):
        choose(asked, offloading(9, 64), None)

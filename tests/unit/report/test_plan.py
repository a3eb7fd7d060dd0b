"""A plan on the screen: nothing is cut off at 80 columns, what is not known is said."""

from io import StringIO

import pytest
from rich.console import Console

from sft_play.report.choices import chosen_blocks
from sft_play.report.plan import plan_answer, plan_report, way_of
from sft_play.report.record import RunRecord
from sft_play.report.scaling import scaling_report
from sft_play.units import GIB


def screen(renderable) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(renderable)
    return console.file.getvalue()


def row(world=8, **changes):
    return {
        "world_size": world,
        "micro_batch_size": 131_072,
        "gradient_accumulation_steps": 16,
        "effective_batch_size": 16_777_216,
        "steps_per_epoch": 12_500,
        "learning_rates": {"none": 2e-4, "sqrt": 5.657e-4, "linear": 1.6e-3},
        "lr_scaling": "sqrt",
        "reference_batch_size": 16,
        "peak_bytes": 120 * GIB,
        "process_bytes": 123 * GIB,
        "exchanged_bytes": 7 * GIB,
        "engine": "ddp",
        "links": (450e9,),
        "speed_up": 7.5,
        "speed_up_at_most": 8.0,
    } | changes


def test_the_largest_numbers_fit_into_80_columns():
    text = screen(scaling_report([row(1, speed_up=1.0), row()]))
    for word in (
        "131,072",
        "16,777,216",
        "12,500",
        "2.0e-04",
        "5.7e-04",
        "1.6e-03",
        "123.00",
        "7.50x",
        "comm",
        "6%",
        "lr none",
        "linear",
    ):
        assert word in text, word
    assert "…" not in text and "in use: sqrt" in text
    said = " ".join(text.split())
    assert "each of 8 GPUs sends 7.00 GiB per step (ring) at 450 GB/s" in said and "added in full" in said


def test_an_unknown_link_gives_a_bound_and_says_so():
    text = screen(scaling_report([row(2, speed_up=None, links=())]))
    assert "<2.00x" in text and "the link is unknown" in text
    nothing = screen(
        scaling_report(
            [
                row(
                    2,
                    speed_up=None,
                    speed_up_at_most=None,
                    process_bytes=None,
                    peak_bytes=None,
                    exchanged_bytes=None,
                )
            ]
        )
    )
    assert nothing.count("n/a") == 3 and "speed:" not in nothing


def test_what_was_measured_between_processes_is_told_apart_from_data_sheets_and_unknown_links():
    rows = [
        row(2, exchange_measured=True, links=()),
        row(4, speed_up=None, links=()),
    ]
    said = " ".join(screen(scaling_report(rows, "process")).split())
    assert "speed on 2 processes: communication as measured here (each of 2 processes sends" in said
    assert "the link is unknown" in said and "GB/s" not in said
    said = " ".join(screen(scaling_report([rows[0], row(8)])).split())
    assert "as measured here" in said and "at 450 GB/s" in said and "unknown" not in said


def test_a_machine_without_gpus_has_processes():
    plan = PLAN["plan"] | {"device": "cpu"}
    rows = [row(1), row(2), {"world_size": 4, "problem": "too many"}]
    text = screen(plan_report(PLAN | {"plan": plan, "memory": MEMORY}, rows))
    assert "processes" in text and "each of 2 processes sends" in text and "4 processes: too many" in text
    assert "GPU" not in text


def test_a_problem_takes_a_line_of_its_own():
    problem = "train.effective_batch_size=6 is not divisible by 4 processes; nearest: 4 or 8"
    text = " ".join(screen(scaling_report([row(1), {"world_size": 4, "problem": problem}])).split())
    assert f"4 GPUs: {problem}" in text


PLAN = {
    "plan": {
        "packing": False, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 1,
        "effective_batch_size": 8, "steps_per_epoch": 1, "total_steps": 2, "engine": "none", "replicas": 1, "offload": "none",
        "gradient_checkpointing": False, "step_seconds": 0.5, "tokens_per_second": 1000.0, "device": "cuda",
    },
    "why": ["what was chosen", "a reason"], "alternatives": [],
}  # fmt: skip
MEMORY = {
    "phases": {"forward": 2 * GIB},
    "terms": {"weights": GIB},
    "peak_phase": "forward",
    "budget_bytes": 4 * GIB,
    "guard_bytes": GIB,
    "peak_bytes": 2 * GIB,
    "process_bytes": None,
}


def other(size: int, speed: float | None, gib: float, *, recomputed: bool = False):
    return {
        "micro_batch_size": size,
        "gradient_accumulation_steps": 8 // size,
        "gradient_checkpointing": recomputed,
        "engine": "none",
        "replicas": 1,
        "offload": "none",
        "process_bytes": int(gib * GIB),
        "fits": gib <= 4,
        "relative_speed": speed,
    }


def test_what_else_was_possible_stands_by_size_beside_what_was_chosen():
    others = [other(2, 0.5, 1), other(8, 1.2, 8), other(4, 0.75, 1.5, recomputed=True)]
    text = screen(plan_report(PLAN | {"memory": MEMORY, "alternatives": others}))
    lines = [line.split() for line in text.splitlines()]
    rows = [line for line in lines if "x" in line]
    assert rows[0] == ["2", "x", "4", "kept", "500", "██████", "1.00", "GiB", "█▌"]
    assert rows[1] == [">", "4", "x", "2", "kept", "1,000", "█" * 12, "2.00", "GiB", "███"]
    assert rows[2] == ["8", "x", "1", "kept", "does", "not", "fit", "8.00", "GiB", "█" * 12]
    assert rows[3][:5] == ["4", "x", "2", "recomputed", "750"]
    text = screen(
        plan_report(PLAN | {"memory": MEMORY, "alternatives": [other(8, 1.2, 8) | {"ran_out": True}]})
    )
    assert "ran out before" in text and "does not fit" not in text


def test_of_many_micro_batches_those_closest_to_the_chosen_one_are_shown():
    plan = PLAN["plan"] | {"micro_batch_size": 50}
    others = [other(1, 0.5, 1) | {"micro_batch_size": size} for size in range(1, 100) if size != 50]
    text = screen(plan_report(PLAN | {"plan": plan, "memory": MEMORY, "alternatives": others}))
    shown = [line.split()[0].removeprefix(">") for line in text.splitlines() if " x " in line]
    assert shown == ["47", "48", "49", "", "51", "52"]


def test_an_unknown_speed_has_no_bar():
    plan = PLAN["plan"] | {"step_seconds": None, "tokens_per_second": None}
    text = screen(plan_report(PLAN | {"plan": plan, "memory": MEMORY, "alternatives": [other(2, None, 1)]}))
    assert text.count("n/a") == 2 and "predicted:" not in text and "1 step per epoch, 2 in total\n" in text
    assert "time        n/a: no data sheet of this GPU" in screen(
        plan_answer(PLAN | {"plan": plan, "memory": MEMORY}, "it fits")
    )


def test_a_plan_says_what_was_chosen_first_and_then_how_long_it_takes():
    lines = [line.rstrip() for line in screen(plan_report(PLAN | {"memory": MEMORY})).splitlines()]
    assert lines[:4] == [
        "what was chosen",
        "1 step per epoch, 2 in total",
        "predicted: 500 ms a step, 1.0 s in total, 1,000 tokens/s",
        "  - a reason",
    ]


def test_a_plan_without_a_prediction_says_so():
    assert "memory: not predicted" in screen(plan_report(PLAN | {"memory": None}))


def test_the_guard_stands_beside_the_budget():
    phases = {"forward": GIB, "backward": 2 * GIB}
    memory = {
        "phases": phases,
        "terms": {"weights": GIB},
        "peak_phase": "backward",
        "budget_bytes": 4 * GIB,
        "guard_bytes": GIB,
    }
    assert "budget 4.00 GiB, guard 1.00 GiB" in screen(plan_report(PLAN | {"memory": memory}))


def test_a_gpu_shows_what_is_allocated_reserved_and_counted_by_the_driver():
    memory = {
        "phases": {"forward": GIB},
        "terms": {"weights": GIB, "context": GIB // 2},
        "peak_phase": "forward",
        "budget_bytes": 4 * GIB,
        "guard_bytes": GIB,
        "peak_bytes": GIB,
        "reserved_bytes": GIB + GIB // 2,
        "process_bytes": 2 * GIB,
    }
    text = screen(plan_report(PLAN | {"memory": memory}))
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "1.00 GiB" in lines["allocated"] and "25%" in lines["allocated"]
    assert "1.50 GiB" in lines["reserved"] and "2.00 GiB" in lines["process"] and "50%" in lines["process"]
    assert "…" not in text
    assert "at most" not in text
    lines = screen(plan_report(PLAN | {"memory": memory | {"at_most_bytes": 3 * GIB}})).splitlines()
    (most,) = (line for line in lines if line.startswith("at most"))
    assert "3.00 GiB" in most and "75%" in most and "if not compiled" in most
    on_cpu = memory | {"reserved_bytes": None, "process_bytes": None}
    assert "allocated" not in screen(plan_report(PLAN | {"memory": on_cpu}))


def test_the_answer_comes_in_a_few_lines_before_what_else_was_possible():
    plan = PLAN["plan"] | {"world_size": 2}
    memory = MEMORY | {"process_bytes": 3 * GIB, "host": {"needed_bytes": 5 * GIB}}
    tree = PLAN | {"plan": plan, "memory": memory, "alternatives": [other(2, 0.5, 1)]}
    tree["why"] = ["effective batch 8 sequences = micro-batch 4 x accumulation 1 x 2 processes", "a reason"]
    text = screen(plan_answer(tree, "it fits", ["a note"]))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:7] == [
        "it fits",
        "batch       8 sequences = micro-batch 4 x accumulation 1 x 2 processes",
        "memory      3.00 GiB a process, predicted: 75% of the budget of 4.00 GiB",
        "RAM         5.00 GiB of the machine, predicted",
        "time        predicted: 500 ms a step, 1.0 s in total, 1,000 tokens/s",
        "steps       1 step per epoch, 2 in total",
        "  - a note",
    ]
    assert "> 4 x 2" in text and "WHY=1" in text and "a reason" not in text


def test_other_methods_stand_beside_the_planned_one_which_is_marked():
    row = {
        "fits": True,
        "gpus": 1,
        "process_bytes": 3 * GIB,
        "ram_bytes": None,
        "hours": 2.0,
        "step_seconds": 1.0,
    }
    methods = [
        row | {"method": "full", "tokens_per_second": 100.0, "ram_bytes": 99 * GIB},
        row | {"method": "lora", "tokens_per_second": 1000.0},
        row | {"method": "qlora", "tokens_per_second": 1200.0},
    ]
    tree = PLAN | {"memory": MEMORY, "alternatives": [], "method": "lora", "methods": methods}
    text = screen(plan_answer(tree, "it fits"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "> LoRA 1 1,000 2.0 3.00 GiB" in lines and "QLoRA 1 1,200 2.0 3.00 GiB" in lines
    assert "Full fine-tuning 1 and 99 GiB of RAM 100 2.0 3.00 GiB" in lines
    assert "MODE=qlora plans another" in text and "QLoRA would be faster, but the method is yours" in text
    none = {"method": "qlora", "fits": False}
    assert "QLoRA no plan found" in " ".join(
        screen(plan_answer(tree | {"methods": [methods[1], none]}, "it fits")).split()
    )


ZERO_2 = "ZeRO-2 costs time that predictions leave out: DDP is preferred where it fits"


@pytest.mark.parametrize(
    ("chosen", "engine", "size", "said"),
    [
        ("ddp", "deepspeed_z2", 4, ZERO_2),
        ("fsdp2", "deepspeed_z2", 4, ZERO_2),
        ("ddp", "fsdp2", 4, "FSDP2 may take longer than predicted, by more than it would gain over DDP"),
        ("ddp", "ddp", 2, " is faster by less than predictions can resolve"),
    ],
)
def test_a_faster_plan_that_was_not_chosen_says_why(chosen, engine, size, said):
    plan = PLAN["plan"] | {"engine": chosen, "world_size": 2}
    tree = PLAN | {
        "plan": plan,
        "memory": MEMORY,
        "alternatives": [other(size, 1.05, 1) | {"engine": engine}],
    }
    assert said in " ".join(screen(plan_answer(tree, "it fits")).split())
    of_a_run = [*chosen_blocks(RunRecord(name="one", plan=tree))]
    assert said in " ".join(of_a_run[-1].lines)
    tree["alternatives"][0]["relative_speed"] = 0.95
    assert said not in " ".join(screen(plan_answer(tree, "it fits")).split())


@pytest.mark.parametrize(
    ("most", "said"), [(2.0, "are compared"), (2.2, "are compared, but not what divided")]
)
def test_the_speeds_of_a_table_say_which_of_their_range_they_are(most, said):
    plan = PLAN["plan"] | {"step_seconds": 2.0, "step_seconds_range": (1.5, most)}
    tree = PLAN | {"plan": plan | {"step_seconds_range_reason": "the links"}, "memory": MEMORY}
    found = " ".join(screen(plan_answer(tree | {"alternatives": [other(4, 0.9, 1)]}, "it fits")).split())
    assert f"as when plans {said}" in found and found.count("at worst") == (most > 2)


@pytest.mark.parametrize(
    ("row", "way"),
    [
        (dict(gradient_checkpointing=False), "kept"),  # as plans of earlier versions have it
        (dict(gradient_checkpointing=True), "recomputed"),
        (dict(gradient_checkpointing=True, activations="recompute", kept_layers=3), "partly kept"),
        (dict(gradient_checkpointing=True, activations="offload", kept_layers=0), "offloaded"),
    ],
)
def test_what_becomes_of_activations_is_said_in_a_word(row, way):
    assert way_of(row) == way

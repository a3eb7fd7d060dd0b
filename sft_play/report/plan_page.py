"""What `make plan` answers, as a page: one plan, or a model on each common GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.report.html import Block, Page, Section, Text
from sft_play.report.plan import (
    candidates,
    candidates_table,
    engine_label,
    notes_on_candidates,
)
from sft_play.report.record import RunRecord
from sft_play.report.scaling import process_unit
from sft_play.report.sections import memory_blocks, scaling_blocks
from sft_play.report.tables import by_duration, by_speed
from sft_play.report.ways import cheapest_table, gpus_legend, gpus_tables, methods_legend, methods_table
from sft_play.units import capitalized, counted, format_bytes, format_duration

TEMPLATE = "planner.html.j2"
TITLE = "Plan explorer"
INTRODUCTION = (
    "What fits on a GPU that you need not have, and how fast it would train: the training step is executed "
    "symbolically, from the shipped shapes of models and the data sheets of GPUs."
)


@dataclass(frozen=True)
class Field:
    """A choice of the form: its name in the address and for people, values with texts, the chosen one.

    Without values, it is a number that may be left out.
    """

    name: str
    title: str
    choices: Sequence[tuple[str, str]]
    chosen: str


def question_page(said: str = "") -> Page:
    """The page without a plan, and why there is none yet."""
    return Page(TITLE, INTRODUCTION, [], status=said)


def plan_page(tree: Mapping[str, Any], model: str, gpu: str, method: str, asked: str) -> Page:
    """The page of a plan, the JSON of `make plan`; `asked` is the command that answers the same."""
    plan, memory = tree["plan"], tree["memory"]
    unit = process_unit(plan["device"])
    batch = [plan[key] for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size")]
    tiles = [
        (f"micro-batch x accumulation x {unit}s", " x ".join(f"{number:,}" for number in batch)),
        ("tokens/s, predicted", by_speed(plan, plan.get("tokens_per_second"), "{:,.0f}".format)),
        ("step, predicted", by_duration(plan, plan.get("step_seconds"), format_duration)),
        ("engine", engine_label(plan)),
    ]
    if plan.get("gpu_hours"):  # of rows that are known
        seconds, cost = plan["step_seconds"] * plan["total_steps"], plan.get("cost")
        tiles.append(("total time, predicted", by_duration(plan, seconds, format_duration)))
        if cost is not None:
            tiles.append(("cost, predicted", by_duration(plan, cost, "{:,.2f}".format)))
    if memory:
        needed, budget = memory.get("process_bytes") or memory["peak_bytes"], memory["budget_bytes"]
        tiles.insert(0, (f"memory of a {unit}, predicted", f"{format_bytes(needed)} ({needed / budget:.0%})"))
        if host := memory.get("host"):
            tiles.insert(1, ("RAM, predicted", format_bytes(host["needed_bytes"])))
    record = RunRecord(name=model, plan=dict(tree), scaling=list(tree["scaling"]))
    sections = [
        Section("memory", "Memory", list(memory_blocks(record))),
        Section("why", "Why", [Text(tree["why"])]),
    ]
    if tree["alternatives"]:
        rows = candidates(tree)
        others, said = candidates_table(rows, plan), notes_on_candidates(rows, plan)
        sections.insert(1, Section("others", others.caption, [others, *([Text(said)] if said else [])]))
    if len(tree.get("methods") or []) > 1:
        methods = methods_table(tree)
        sections.insert(0, Section("methods", methods.caption, [methods, Text(methods_legend(tree))]))
    if scaled := list(scaling_blocks(record)):
        sections.append(Section("scaling", "More of these GPUs", scaled))
    return Page(
        title=TITLE,
        subtitle=INTRODUCTION,
        status=f"{capitalized(METHODS[method])} of {model} fits on {plan['world_size']} x {gpu}.",
        facts=[("to train", str(tree["command"])), ("the same in a shell", asked)],
        tiles=tiles,
        sections=sections,
    )


def gpus_page(tree: Mapping[str, Any], asked: str) -> Page:
    """The page of a model on each common GPU; arguments as in `plan_page`."""
    cheapest = [cheapest_table(tree)] if tree["cheapest"] else []
    blocks: list[Block] = [*cheapest, *gpus_tables(tree), Text([*gpus_legend(tree), *tree["why"]])]
    said = f"{tree['model']} on {counted(len(tree['cards']), 'common GPU')}."
    facts = [("the same in a shell", asked)]
    return Page(TITLE, INTRODUCTION, [Section("gpus", "Common GPUs", blocks)], status=said, facts=facts)

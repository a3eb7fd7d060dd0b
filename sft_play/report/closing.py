"""What a run has come to, in lines: for the end of `make train`, its report and its model card."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from sft_play.reasons.choices import group_of, mean_micro_batch, ranks_text
from sft_play.report.layout import apart, ending
from sft_play.report.table import on_screen
from sft_play.report.tables import (
    MISSING,
    answered,
    formatted,
    memory_line,
    metric_table,
    samples_table,
    step_line,
    step_seconds,
    unfinished_note,
    with_perplexity,
)
from sft_play.ui.screen import NamedValues
from sft_play.units import counted, format_count, format_duration

NOTABLE_WAIT = 0.01  # share of the time; less is not worth a word


def closing_screen(
    summary: Mapping[str, Any],
    samples: Sequence[Mapping[str, object]],
    places: Mapping[str, Any],
    next_commands: Sequence[str],
) -> RenderableType:
    """The report at the end of a training run, from summary.json with the scores before and after.

    `samples` are answers before and after, if there are any; `places` are the paths of the outputs by name.
    """
    scores = summary.get("eval") or {}
    before, after = (with_perplexity(scores.get(when) or {}) for when in ("before", "after"))
    blocks: list[RenderableType] = [NamedValues([*run_values(summary), *told_to_servers(summary)])]
    if before or after:
        name = "held-out rows"
        if "answered_rows" in after:  # losses are those of the validation rows
            losses = "losses on val, " if "loss" in after and after["split"] != "val" else ""
            name += f" ({losses}{answered(after)})"
        table = on_screen(metric_table({"before": before, "after": after}, name))
        table.columns[2].style = "bold"
        blocks.append(Group(table, unfinished_note(after)) if after.get("unfinished_answers") else table)
    if samples:
        blocks.append(samples_table(samples))
    title = Text(str(summary.get("status", MISSING)), style="bold")
    title += Text(f": trained for {training_time(summary)}" if summary.get("training_seconds") else "")
    return Group(Rule(title, align="left"), apart(*blocks, ending(places, next_commands)))


def run_values(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was trained, how fast, in how much memory and to which loss, by name."""
    keys = ("gradient_accumulation_steps", "effective_batch_size")
    accumulated, effective = (formatted(summary.get(key), "{:,}".format) for key in keys)
    of_step = (summary.get(keys[0]) or 0) * (summary.get("world_size") or 0) // group_of(summary)
    micro = formatted(summary.get(keys[1]), lambda whole: mean_micro_batch(whole, of_step))
    unit = "tokens" if summary.get("packing") else "sequences"
    processes = formatted(summary.get("world_size"), lambda count: ranks_text(count, group_of(summary)))
    steps = formatted(summary.get("optimizer_steps"), lambda count: counted(count, "step"))
    tokens = formatted(summary.get("supervised_tokens"), format_count)
    memory = memory_facts(summary, "memory", "reserved", "process")
    weights = weights_step(summary)
    return [
        ("plan", f"micro-batch {micro} x accumulation {accumulated} x {processes} = {effective} {unit}"),
        ("trained on", f"{steps}, {tokens} supervised tokens"),
        ("speed", _speed(summary)),
        ("step", step_line(*step_seconds(summary))),
        *(memory or [("memory", memory_line(None, None))]),
        *(("out of memory", text) for text in summary.get("out_of_memory") or []),
        ("train loss", formatted(summary.get("train_loss"), "{:.4f}".format)),
        *([("weights of", weights)] if weights else []),
        *saved_type(summary),
    ]


def _speed(summary: Mapping[str, Any]) -> str:
    text = formatted(summary.get("tokens_per_second"), "{:,.0f} tokens/s".format)
    padding, mfu, wait = (summary.get(key) for key in ("padding_share", "mfu", "data_wait"))
    text += f", padding not counted ({padding:.0%} of all tokens)" if padding else ", no padding"
    if mfu is not None:
        text += f", MFU {mfu:.0%}"
    return f"{text}, {wait:.0%} of the time waiting for data" if wait and wait >= NOTABLE_WAIT else text


def training_time(summary: Mapping[str, Any]) -> str:
    """How long the steps took since the run was begun or resumed: "52 s from step 40 on"."""
    text, since = formatted(summary.get("training_seconds"), format_duration), summary.get("resumed_step")
    return f"{text} from step {since:,} on" if since and text != MISSING else text


def weights_step(summary: Mapping[str, Any]) -> str | None:
    """The step of the published weights: "step 80 of 144, the best on held-out rows"; None without any."""
    step, steps = summary.get("weights_step"), summary.get("optimizer_steps")
    if not step or not steps:
        return None
    best = summary.get("best_checkpoint")
    return f"step {step:,} of {steps:,}, the best on held-out rows" if best else f"step {step:,}, the last"


def saved_type(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """In which type the weights of a whole model were saved, and why."""
    saved = summary.get("saved")
    if not saved:
        return []
    asked = "the type of the base" if saved["of_base"] else "as set by output.dtype"
    if saved["dtype"] != saved["asked"]:
        asked = f"since one overflows {saved['asked']}, {asked}"
    return [("weights", f"saved in {saved['dtype']}, {asked}")]


def told_to_servers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where a server of an adapter must be told to stop, which no file that it reads says."""
    tokens = summary.get("stop_tokens")
    if not tokens:
        return []
    listed = " and ".join(f"{text} (token {token_id})" for text, token_id in tokens.items())
    return [("to serve it", f"tell the server to stop at {listed}: the base does not; a merged model does")]


def memory_facts(summary: Mapping[str, Any], *labels: str) -> list[tuple[str, str]]:
    """Peak, reserved bytes and bytes of the process, under these labels, and RAM, as far as known."""
    facts, origin = [], summary.get("predicted_memory_origin")
    names = ("peak", "reserved", "process", "ram")
    for label, name in zip((*labels, "RAM of the machine"), names, strict=True):
        predicted, measured = (summary.get(f"{kind}_{name}_bytes") for kind in ("predicted", "measured"))
        if predicted or measured:
            facts.append((label, memory_line(predicted, measured, origin)))
    return facts

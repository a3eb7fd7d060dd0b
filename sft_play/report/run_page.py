"""The report of one run: what was asked, what was chosen and why, what was measured, and what it learned."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.config.resolved import Setting
from sft_play.engines.registry import label_of
from sft_play.report.card import public_name, without_folders
from sft_play.report.curves import curve_figures, step_figure
from sft_play.report.html import Block, Figure, Figures, Page, Sample, Samples, Section, Table, Text
from sft_play.report.plots import histogram
from sft_play.report.record import RunRecord, Tree, scores_of_models
from sft_play.report.sections import memory_blocks, scaling_blocks
from sft_play.report.tables import (
    METRICS,
    MISSING,
    harness_rows,
    step_line,
    unfinished_note,
)
from sft_play.units import format_bytes, format_duration

PATHS = {
    "model.name",
    "data.train_path",
    "data.val_path",
    "data.test_path",
    "data.chat_template",
    "output.dir",
    "train.resume",
}
# Key of an answer of `make eval` -> whose it is.
ANSWERS = {"reference": "reference", "base": "base", "generated": "answer", "merged": "merged"}
NOT_RECORDED = "Nothing was recorded."
# Setting -> the entry of the plan that was made from it.
CHOICES = {
    "train.effective_batch_size": "effective_batch_size",
    "train.batch_size": "micro_batch_size",
    "train.grad_accum": "gradient_accumulation_steps",
    "model.max_seq_len": "max_seq_len",
    "train.padding_free": "padding_free",
    "train.gradient_checkpointing": "gradient_checkpointing",
    "train.mixed_precision": "mixed_precision",
    "model.dtype": "dtype",
    "model.attention": "attention",
    "train.learning_rate": "learning_rate",
    "parallel.engine": "engine",
}


def run_page(run: RunRecord) -> Page:
    """The page of a run; a section whose files are damaged says so, one without files is short."""
    parts: list[tuple[str, str, Callable[[RunRecord], Sequence[Block]]]] = [
        ("asked", "What was asked", _asked),
        ("chosen", "What was chosen, and why", _chosen),
        ("memory", "Memory", memory_blocks),
        ("training", "Training", _training),
        ("speed", "Speed", _speed),
        ("scaling", "Scaling", scaling_blocks),
        ("data", "Data", _data),
        ("scores", "Scores", _scores),
        ("answers", "Answers", _answers),
        ("environment", "Environment", _environment),
    ]
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        status=status_line(run),
        tiles=_tiles(run),
        sections=[_section(run, *part) for part in parts],
    )


def _section(run: RunRecord, name: str, title: str, build: Callable[[RunRecord], Sequence[Block]]) -> Section:
    try:
        blocks = build(run)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # JSON that is sound but not what we wrote; the other sections can still be made
        reason = f"This part of the run's files is damaged ({type(error).__name__}: {error})."
        blocks = [Text([reason], warning=True)]
    return Section(name, title, blocks or [Text([NOT_RECORDED])])


def status_line(run: RunRecord) -> str:
    """How far the run came, in a sentence."""
    planned = run.chosen.get("total_steps")
    steps = (
        f"{run.last_step:,}" + (f" of {planned:,}" if isinstance(planned, int) else "") + " steps recorded"
    )
    damaged = f" Damaged and omitted: {', '.join(run.damaged)}." if run.damaged else ""
    status = run.summary.get("status")
    if status == "done" and run.summary.get("error"):
        return f"Trained, but what comes after training failed: {_reason(run)}{damaged}"
    if status == "done":
        return f"Done.{damaged}"
    if status == "failed":
        return f"Failed: {_reason(run)} After {steps}; log.txt says more.{damaged}"
    if status == "interrupted":
        return f"Interrupted with a checkpoint saved, {steps}; make resume continues it.{damaged}"
    return f"Not finished: it is still running, or it failed (log.txt says more); {steps}.{damaged}"


def _reason(run: RunRecord) -> str:
    """The first line of the error that ended the run, as a sentence."""
    lines = str(run.summary.get("error") or "for an unknown reason").splitlines()
    return f"{without_folders(lines[0]).rstrip('.')}."


def _subtitle(run: RunRecord) -> str:
    """Method, model and data of the run."""
    sources = run.value("data.sources") if "data.sources" in run.settings else None
    model, data = shown(run, "model.name"), shown(run, "data.train_path")
    if sources:
        data = ", ".join(public_name(source["path"]) for source in sources)
    if MISSING in (model, data):
        return "A run of SFT-Play"
    method = METHODS.get(str(run.value("tuning.mode")), "fine-tuning")
    return f"{method} of {model} on {data}"


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    """The key numbers; those that are not known are left out."""
    summary = run.summary
    losses = [run.scores(when).get("loss") for when in ("before", "after")]
    known = [f"{loss:.3f}" for loss in losses if isinstance(loss, float)]
    tiles = [
        ("held-out loss", " → ".join(known)),
        (f"peak memory, {run.memory_origin}", _of(run.predicted_peak_bytes, format_bytes)),
        ("peak memory, measured", _of(summary.get("measured_peak_bytes"), format_bytes)),
        ("speed", _of(summary.get("tokens_per_second"), lambda value: f"{value:,.0f} tokens/s")),
        ("training time", _of(summary.get("training_seconds"), format_duration)),
        ("optimizer steps", f"{run.last_step:,}" if run.metrics else ""),
    ]
    return [(name, value) for name, value in tiles if value]


def _of(value: Any, form: Callable[[Any], str]) -> str:
    return form(value) if isinstance(value, int | float) else ""


def shown(run: RunRecord, name: str) -> str:
    """The value of a setting as it may be shown: paths lose their folders; n/a if it is unknown."""
    if name not in run.settings:
        return MISSING
    value = run.value(name)
    return public_name(value) if name in PATHS and isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        known = {name: part for name, part in value.items() if part is not None}
        return " ".join(
            f"{name} {public_name(part) if name == 'path' else _text(part)}" for name, part in known.items()
        )
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def _origin(setting: Setting) -> str:
    """Where a value came from: a file without its folders."""
    return setting.origin if setting.origin in ("default", "override") else Path(setting.origin).name


def _asked(run: RunRecord) -> list[Block]:
    """The settings that a person gave, and all others folded."""
    rows: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for name, setting in run.settings.items():
        rows[setting.origin != "default"].append((name, shown(run, name), _origin(setting)))
    head = ("setting", "value", "origin")
    tables = [
        Table("Settings that were given", head, rows[True], numbers=False),
        Table(f"{len(rows[False])} settings left at their default", head, rows[False], False, folded=True),
    ]
    return [table for table in tables if table.rows]


def _chosen(run: RunRecord) -> list[Block]:
    """The plan beside the settings that it was made from, its reasons, and the other plans."""
    if not run.plan:
        return []
    plan = run.plan["plan"]
    rows = []
    for name, key in CHOICES.items():
        asked = run.settings.get(name)
        value = label_of(plan[key]) if key == "engine" else _text(plan[key])
        by_planner = asked is None or asked.value in ("auto", None) or _text(asked.value) != _text(plan[key])
        origin = "planner" if asked is None or by_planner else _origin(asked)
        rows.append((name, shown(run, name), value, origin))
    rows.append(("processes", MISSING, str(plan["world_size"]), "command line"))
    blocks: list[Block] = [
        Table("The plan", ("setting", "asked", "chosen", "origin"), rows, numbers=False),
        Text(run.plan["why"] or [NOT_RECORDED]),
    ]
    if run.plan["alternatives"]:
        blocks.append(_alternatives(run.plan["alternatives"]))
    said = run.summary.get("out_of_memory") or []
    return [*blocks, Text(said, warning=True)] if said else blocks


def _alternatives(plans: Sequence[Tree]) -> Table:
    rows = []
    for plan in plans:
        speed = plan["relative_speed"]
        rows.append(
            (
                f"{plan['micro_batch_size']:,} x {plan['gradient_accumulation_steps']}",
                "yes" if plan["gradient_checkpointing"] else "no",
                label_of(plan["engine"]),
                format_bytes(plan["peak_bytes"]) if plan["peak_bytes"] else MISSING,
                "yes" if plan["fits"] else "no",
                f"{speed:.0%} of the plan's" if speed else MISSING,
            )
        )
    head = ("micro-batch x accumulation", "checkpointing", "engine", "predicted peak", "fits", "speed")
    return Table("Other plans", head, rows)


def _training(run: RunRecord) -> list[Block]:
    figures = curve_figures([run])
    return [Figures(figures)] if figures else []


def _speed(run: RunRecord) -> list[Block]:
    """Seconds per step, predicted and measured, and what the time was spent on."""
    summary = run.summary
    predicted = summary.get("predicted_step_seconds") or run.chosen.get("step_seconds")
    origin = summary.get("predicted_step_origin") or run.chosen.get("step_seconds_origin")
    rows = [("optimizer step", step_line(predicted, summary.get("measured_step_seconds"), origin))]
    speed, padding = summary.get("tokens_per_second"), summary.get("padding_share")
    rows.append(("tokens per second, padding not counted", f"{speed:,.0f}" if speed else MISSING))
    rows.append(("padding", f"{padding:.1%} of all tokens" if padding is not None else MISSING))
    for name, key in (("model FLOPs utilization", "mfu"), ("time spent waiting for data", "data_wait")):
        share = summary.get(key)
        rows.append((name, f"{share:.1%}" if share is not None else MISSING))
    seconds = summary.get("training_seconds")
    rows.append(("training time, without evaluation", format_duration(seconds) if seconds else MISSING))
    figure = step_figure(run, predicted)
    if not summary and not predicted and figure is None:
        return []
    table = Table("Time", ("", "value"), rows, numbers=False)
    return [Figures([figure]), table] if figure else [table]


def _data(run: RunRecord) -> list[Block]:
    """Counts of each split, a histogram of lengths, and warnings."""
    data = run.data or run.summary.get("data") or {}
    splits = {split: data[split] for split in ("train", "val", "test") if data.get(split)}
    if not splits:
        return []
    rows = [_split_row(split, counts) for split, counts in splits.items()]
    head = ("split", "rows", "tokens", "supervised", "truncated", "dropped", "median", "p99", "longest")
    blocks: list[Block] = [Table("Tokenized rows; lengths in tokens", head, rows)]
    figures = [
        Figure(
            f"Length of the {split} rows",
            histogram(f"Histogram: rows of the {split} split by tokens", **counts["histogram"]),
            f"Bins of {_tokens(counts['histogram']['width'])}; {counts['rows']:,} rows",
        )
        for split, counts in splits.items()
        if counts.get("histogram")
    ]
    blocks += [Figures(figures)] if figures else []
    reasons = [
        f"{split}: {count:,} rows dropped: {reason}"
        for split, counts in splits.items()
        for reason, count in (counts.get("dropped") or {}).items()
        if count
    ]
    blocks += [Text(reasons)] if reasons else []
    blocks += [Text(data["warnings"], warning=True)] if data.get("warnings") else []
    return [*blocks, Text([f"Fingerprint of the tokenized rows: {data.get('fingerprint', MISSING)}"])]


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _split_row(split: str, counts: Tree) -> tuple[str, ...]:
    rows, tokens, lengths = counts["rows"], counts["tokens"], counts.get("lengths") or {}
    truncated, dropped = counts.get("truncated"), counts.get("dropped")
    return (
        split,
        f"{rows:,}",
        f"{tokens:,}",
        f"{counts['supervised_tokens'] / tokens:.1%}",
        MISSING if truncated is None else f"{truncated:,}",
        MISSING if dropped is None else f"{sum(dropped.values()):,}",
        *(f"{lengths[key]:,}" if key in lengths else MISSING for key in ("p50", "p99", "max")),
    )


def _scores(run: RunRecord) -> list[Block]:
    """The scores before and after training, of `make eval` and of `make eval-lm`."""
    return [*_held_out(run), *_harness(run)]


def _held_out(run: RunRecord) -> list[Block]:
    columns = {"before": run.scores("before"), "after": run.scores("after"), **_evaluated(run)}
    columns = {name: scores for name, scores in columns.items() if scores}
    rows = []
    for key, (label, form) in METRICS.items():
        found = [scores.get(key) for scores in columns.values()]
        if any(value is not None for value in found):
            rows.append((label, *(MISSING if value is None else form(value) for value in found)))
    if not rows:
        return []
    over = [_over(name, scores) for name, scores in columns.items() if scores.get("answered_rows")]
    blocks: list[Block] = [Table("Held-out rows", ("metric", *columns), rows)]
    return [*blocks, Text(over)] if over else blocks


def _harness(run: RunRecord) -> list[Block]:
    tasks = dict.fromkeys(task for found in run.harness.values() for task in found)
    if not tasks:
        return []
    head = ("task", "metric", "rows", *run.harness)
    return [Table("lm-eval, with the standard error", head, harness_rows(run.harness, tasks))]


def _evaluated(run: RunRecord) -> dict[str, Tree]:
    """Name of a column -> scores of `make eval`, for each split and model."""
    found = {}
    for split, result in run.evaluations.items():
        models = scores_of_models(result)
        for name, scores in models.items():
            found[f"make eval, {split}: {name}"] = {**scores, "split": split}
        if not models:
            found[f"make eval, {split}"] = result
    return found


def _over(name: str, scores: Tree) -> str:
    """Which rows the scores of a column are from."""
    text = f"{name}: answers to {scores['answered_rows']:,} rows of {scores['split']}"
    return f"{text}; {unfinished_note(scores)}" if scores.get("unfinished_answers") else text


def _answers(run: RunRecord) -> list[Block]:
    """Sample answers before and after training, and the first ones of `make eval`."""
    blocks: list[Block] = []
    names = {"reference": "reference", "before": "before training", "after": "after training"}
    samples = [
        Sample(sample["prompt"], [(name, sample[key]) for key, name in names.items() if key in sample])
        for sample in run.summary.get("samples") or []
    ]
    blocks += [Samples("Before and after training", samples)] if samples else []
    for split, answers in run.answers.items():
        found = [
            Sample(
                answer["messages"][-1]["content"],
                [(name, answer[key]) for key, name in ANSWERS.items() if key in answer],
            )
            for answer in answers
        ]
        blocks += [Samples(f"make eval, first rows of {split}", found)] if found else []
    return blocks


def _environment(run: RunRecord) -> list[Block]:
    """The machine and the versions."""
    found = run.environment
    versions = found.get("versions") or run.summary.get("versions") or {}
    rows = [*_machine(found), *((name.replace("_", "-"), str(version)) for name, version in versions.items())]
    return [Table("Machine and versions", ("", "value"), rows, numbers=False)] if rows else []


def _machine(found: Tree) -> list[tuple[str, str]]:
    if not found:
        return []
    gpus = [f"{gpu['name']}, {_of(gpu['total_bytes'], format_bytes) or MISSING}" for gpu in found["gpus"]]
    driver = f"{found['driver']} (CUDA {found['cuda']})" if found["driver"] else MISSING
    return [
        *((f"GPU {index}", name) for index, name in enumerate(gpus)),
        *([("driver", driver)] if gpus else []),
        ("CPU", f"{found['cpu'] or MISSING}, {found['cpu_cores']} cores"),
        ("RAM", _of(found["ram_bytes"], format_bytes) or MISSING),
        ("system", found["system"]),
        ("python", found["python"]),
    ]

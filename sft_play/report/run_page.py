"""The report of one run: what was asked, what was chosen and why, what was measured, and what it learned."""

from collections.abc import Callable, Iterator, Mapping
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
    MISSING,
    formatted,
    harness_rows,
    metric_rows,
    said_of,
    step_line,
    step_seconds,
    unfinished_note,
)
from sft_play.units import counted, format_bytes, format_count, format_duration

PATHS = {
    "model.name", "data.train_path", "data.val_path", "data.test_path", "data.chat_template", "output.dir",
    "train.resume",
}  # fmt: skip
# Key of an answer of `make eval` -> whose it is.
ANSWERS = {"reference": "reference", "base": "base", "generated": "answer", "merged": "merged"}
TILES = ("loss,", "peak memory", "tokens/s", "training time", "steps")  # the key numbers that say most
NOT_RECORDED = "Nothing was recorded."
Build = Callable[[RunRecord], Iterator[Block]]
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
    parts: list[tuple[str, str, Build]] = [
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
    tiles = [(name, text) for name, text in key_numbers(run) if name.startswith(TILES) and text != MISSING]
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        status=status_line(run),
        tiles=tiles,
        sections=[_section(run, *part) for part in parts],
    )


def _section(run: RunRecord, name: str, title: str, build: Build) -> Section:
    try:
        blocks: list[Block] = list(build(run))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # JSON that is sound but not what we wrote; the other sections can still be made
        reason = f"This part of the run's files is damaged ({type(error).__name__}: {error})."
        blocks = [Text([reason], warning=True)]
    return Section(name, title, blocks or [Text([NOT_RECORDED])])


def status_line(run: RunRecord) -> str:
    """How far the run came, in a sentence."""
    planned = run.chosen.get("total_steps")
    of_all = f" of {planned:,}" if isinstance(planned, int) else ""
    steps = f"{run.last_step:,}{of_all} steps recorded"
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


def key_numbers(run: RunRecord) -> list[tuple[str, str]]:
    """The key numbers of a run, as texts by name."""
    summary, plan = run.summary, run.chosen
    predicted, measured, origin = step_seconds(summary)
    batch = [plan.get(key) for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size")]
    found: list[tuple[str, str]] = [
        ("status", str(summary.get("status", "unfinished"))),
        ("steps", f"{run.last_step:,}"),
        ("effective batch", formatted(plan.get("effective_batch_size"), "{:,}".format)),
        ("micro-batch x accumulation x processes", MISSING if None in batch else " x ".join(map(str, batch))),
        ("training loss", formatted(summary.get("train_loss"), "{:.4f}".format)),
    ]
    for when in ("before", "after"):
        found += [(f"{label}, {when}", text) for label, text in metric_rows({when: run.scores(when)})]
    return [
        *found,
        (f"peak memory, {run.memory_origin}", formatted(run.predicted_peak_bytes, format_bytes)),
        ("peak memory, measured", formatted(summary.get("measured_peak_bytes"), format_bytes)),
        ("tokens/s", formatted(summary.get("tokens_per_second"), "{:,.0f}".format)),
        (f"step, {said_of(origin)}", formatted(predicted, format_duration)),
        ("step, measured", formatted(measured, format_duration)),
        ("training time", formatted(summary.get("training_seconds"), format_duration)),
        ("supervised tokens", formatted(summary.get("supervised_tokens"), format_count)),
    ]


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
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _origin(setting: Setting) -> str:
    """Where a value came from: a file without its folders."""
    return setting.origin if setting.origin in ("default", "override") else Path(setting.origin).name


def _asked(run: RunRecord) -> Iterator[Block]:
    """The settings that a person gave, and all others folded."""
    given: list[tuple[str, str, str]] = []
    others: list[tuple[str, str, str]] = []
    for name, setting in run.settings.items():
        row = (name, shown(run, name), _origin(setting))
        (others if setting.origin == "default" else given).append(row)
    head = ("setting", "value", "origin")
    if given:
        yield Table("Settings that were given", head, given, numbers=False)
    if others:
        yield Table(f"{len(others)} settings left at their default", head, others, False, folded=True)


def _chosen(run: RunRecord) -> Iterator[Block]:
    """The plan beside the settings that it was made from, its reasons, and the other plans."""
    if not run.plan:
        return
    plan = run.plan["plan"]
    rows = []
    for name, key in CHOICES.items():
        asked = run.settings.get(name)
        value = _engine_label(plan) if key == "engine" else _text(plan[key])
        by_planner = asked is None or asked.value in ("auto", None) or _text(asked.value) != _text(plan[key])
        origin = "planner" if asked is None or by_planner else _origin(asked)
        rows.append((name, shown(run, name), value, origin))
    rows.append(("processes", MISSING, str(plan["world_size"]), "command line"))
    yield Table("The plan", ("setting", "asked", "chosen", "origin"), rows, numbers=False)
    yield Text(run.plan["why"] or [NOT_RECORDED])
    if run.plan["alternatives"]:
        cells = [_alternative(plan) for plan in run.plan["alternatives"]]
        yield Table("Other plans", list(cells[0]), [list(row.values()) for row in cells])
    if said := run.summary.get("out_of_memory"):
        yield Text(said, warning=True)


def _engine_label(plan: Tree) -> str:
    return label_of(plan["engine"], plan.get("replicas", 1), plan.get("offload", "none"))


def _alternative(plan: Tree) -> dict[str, str]:
    """The texts of another plan, by the name of their column."""
    return {
        "micro-batch x accumulation": f"{plan['micro_batch_size']:,} x {plan['gradient_accumulation_steps']}",
        "checkpointing": _text(plan["gradient_checkpointing"]),
        "engine": _engine_label(plan),
        "predicted peak": formatted(plan["peak_bytes"] or None, format_bytes),
        "fits": _text(plan["fits"]),
        "speed": formatted(plan["relative_speed"] or None, "{:.0%} of the plan's".format),
    }


def _training(run: RunRecord) -> Iterator[Block]:
    if figures := curve_figures([run]):
        yield Figures(figures)


def _speed(run: RunRecord) -> Iterator[Block]:
    """Seconds per step, predicted and measured, and what the time was spent on."""
    summary = run.summary
    predicted = summary.get("predicted_step_seconds") or run.chosen.get("step_seconds")
    origin = summary.get("predicted_step_origin") or run.chosen.get("step_seconds_origin")
    figure = step_figure(run, predicted, origin)
    if not summary and not predicted and figure is None:
        return
    if figure:
        yield Figures([figure])
    percent = "{:.1%}".format
    rows = [
        ("optimizer step", step_line(predicted, summary.get("measured_step_seconds"), origin)),
        (
            "tokens per second, padding not counted",
            formatted(summary.get("tokens_per_second"), "{:,.0f}".format),
        ),
        ("padding", formatted(summary.get("padding_share"), "{:.1%} of all tokens".format)),
        ("model FLOPs utilization", formatted(summary.get("mfu"), percent)),
        ("time spent waiting for data", formatted(summary.get("data_wait"), percent)),
        ("training time, without evaluation", formatted(summary.get("training_seconds"), format_duration)),
    ]
    yield Table("Time", ("", "value"), rows, numbers=False)


def _data(run: RunRecord) -> Iterator[Block]:
    """Counts of each split, a histogram of lengths, and warnings."""
    data = run.data or run.summary.get("data") or {}
    splits = {split: data[split] for split in ("train", "val", "test") if data.get(split)}
    if not splits:
        return
    rows = [_split_row(split, counts) for split, counts in splits.items()]
    head = ("split", "rows", "tokens", "supervised", "truncated", "dropped", "median", "p99", "longest")
    yield Table("Tokenized rows; lengths in tokens", head, rows)
    figures, reasons = [], []
    for split, counts in splits.items():
        if lengths := counts.get("histogram"):
            plot = histogram(f"Histogram: rows of the {split} split by tokens", **lengths)
            caption = f"Bins of {counted(lengths['width'], 'token')}; {counts['rows']:,} rows"
            figures.append(Figure(f"Length of the {split} rows", plot, caption))
        dropped = (counts.get("dropped") or {}).items()
        reasons += [f"{split}: {count:,} rows dropped: {reason}" for reason, count in dropped if count]
    if figures:
        yield Figures(figures)
    if reasons:
        yield Text(reasons)
    if data.get("warnings"):
        yield Text(data["warnings"], warning=True)
    yield Text([f"Fingerprint of the tokenized rows: {data.get('fingerprint', MISSING)}"])


def _split_row(split: str, counts: Tree) -> tuple[str, ...]:
    lengths, dropped = counts.get("lengths") or {}, counts.get("dropped")
    numbers = (
        counts.get("truncated"),
        None if dropped is None else sum(dropped.values()),
        *(lengths.get(key) for key in ("p50", "p99", "max")),
    )
    return (
        split,
        f"{counts['rows']:,}",
        f"{counts['tokens']:,}",
        f"{counts['supervised_tokens'] / counts['tokens']:.1%}",
        *(formatted(number, "{:,}".format) for number in numbers),
    )


def _scores(run: RunRecord) -> Iterator[Block]:
    """The scores before and after training, of `make eval` and of `make eval-lm`."""
    columns = {"before": run.scores("before"), "after": run.scores("after"), **_evaluated(run)}
    columns = {name: scores for name, scores in columns.items() if scores}
    if rows := metric_rows(columns):
        yield Table("Held-out rows", ("metric", *columns), rows)
        answered = {name: scores for name, scores in columns.items() if scores.get("answered_rows")}
        if answered:
            yield Text([_over(name, scores) for name, scores in answered.items()])
    if tasks := dict.fromkeys(task for found in run.harness.values() for task in found):
        head = ("task", "metric", "rows", *run.harness)
        yield Table("lm-eval, with the standard error", head, harness_rows(run.harness, tasks))


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


def _answers(run: RunRecord) -> Iterator[Block]:
    """Sample answers before and after training, and the first ones of `make eval`."""
    if samples := run.summary.get("samples"):
        names = {"reference": "reference", "before": "before training", "after": "after training"}
        found = [_sample(sample["prompt"], sample, names) for sample in samples]
        yield Samples("Before and after training", found)
    for split, answers in run.answers.items():
        found = [_sample(answer["messages"][-1]["content"], answer, ANSWERS) for answer in answers]
        if found:
            yield Samples(f"make eval, first rows of {split}", found)


def _sample(prompt: str, record: Tree, names: Mapping[str, str]) -> Sample:
    return Sample(prompt, [(name, record[key]) for key, name in names.items() if key in record])


def _environment(run: RunRecord) -> Iterator[Block]:
    found, rows = run.environment, []
    if found:
        for index, gpu in enumerate(found["gpus"]):
            rows.append((f"GPU {index}", f"{gpu['name']}, {formatted(gpu['total_bytes'], format_bytes)}"))
        if rows:
            driver = f"{found['driver']} (CUDA {found['cuda']})" if found["driver"] else MISSING
            rows.append(("driver", driver))
        rows += [
            ("CPU", f"{found['cpu'] or MISSING}, {found['cpu_cores']} cores"),
            ("RAM", formatted(found["ram_bytes"], format_bytes)),
            ("system", found["system"]),
            ("python", found["python"]),
        ]
    for name, version in (found.get("versions") or run.summary.get("versions") or {}).items():
        rows.append((name.replace("_", "-"), str(version)))
    if rows:
        yield Table("Machine and versions", ("", "value"), rows, numbers=False)

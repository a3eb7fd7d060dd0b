"""The report of one run: how it ended, what it learned, what was measured, and last what it was made from."""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.methods import METHODS
from sft_play.reasons.choices import group_of, ranks_text
from sft_play.report.card import public_name, without_folders
from sft_play.report.choices import asked_blocks, chosen_blocks, environment_blocks, machine_line, shown
from sft_play.report.closing import training_time, weights_step
from sft_play.report.curves import curve_figures, step_figure
from sft_play.report.html import Block, Figure, Figures, Page, Sample, Samples, Section, Text
from sft_play.report.plots import histogram
from sft_play.report.record import OTHER_FORM, RECENT, RunRecord, Tree, scores_of_models
from sft_play.report.sections import memory_blocks, scaling_blocks
from sft_play.report.table import Table
from sft_play.report.tables import (
    MISSING,
    NOT_RECORDED,
    NOT_YET,
    answered,
    formatted,
    harness_table,
    mark,
    metric_table,
    metric_values,
    said_of,
    step_line,
    step_seconds,
    unfinished_note,
)
from sft_play.rows.calls import history_text
from sft_play.spelling import make
from sft_play.units import capitalized, counted, format_bytes, format_count, format_duration

# Key of an answer of `make eval` -> whose it is.
ANSWERS = {"reference": "reference", "base": "base", "generated": "answer", "merged": "merged"}
TILES = ("loss,", "peak memory", "tokens/s", "training time", "steps")  # the key numbers that say most
THUMBNAIL = re.compile("data:image/jpeg;base64,[A-Za-z0-9+/=]+")  # a small copy of a picture
Build = Callable[[RunRecord], Iterator[Block]]


def run_page(run: RunRecord) -> Page:
    """The page of a run; a section whose files are damaged says so, one without files is short."""
    parts: list[tuple[str, str, Build]] = [
        ("training", "Training", _training),
        ("answers", "Answers", _answers),
        ("scores", "Scores", _scores),
        ("memory", "Memory", memory_blocks),
        ("speed", "Speed", _speed),
        ("scaling", "Scaling", scaling_blocks),
        ("data", "Data", _data),
        ("chosen", "Plan", chosen_blocks),
        ("asked", "Settings", asked_blocks),
        ("environment", "Environment", environment_blocks),
    ]
    return replace(run_heading(run), sections=[_section(run, *part) for part in parts])


def run_heading(run: RunRecord) -> Page:
    """The page of a run without its sections."""
    numbers = [number for number in key_numbers(run) if number.name.startswith(TILES)]
    tiles = [(number.name, number.text) for number in numbers if number.text != MISSING]
    if not any(name.startswith("loss,") for name, _ in tiles):  # they come at the end of a run
        latest = (("training loss", run.latest("train/loss")), ("held-out loss", run.latest("eval/loss")))
        tiles[1:1] = [(name, f"{value:.4f}") for name, value in latest if value is not None]
    return Page(
        run.name, _subtitle(run), [], tiles, status_line(run), share=share_done(run), facts=facts(run)
    )


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """The note, when, where and with what the run was started, and what to type next; what is known of it."""
    name = shlex.quote(run.name)
    ended = "trained" if run.summary.get("trained") and not run.activity else status_word(run)
    target = {"trained": "infer", "done": "infer", "interrupted": "resume"}.get(ended)
    machine = MISSING
    with contextlib.suppress(*OTHER_FORM):
        machine = machine_line(run)
    found: list[tuple[str, object]] = [
        ("note", run.value("output.note") or None),
        ("started", run.environment.get("started")),
        ("resumed", run.environment.get("resumed")),
        ("machine", machine),
        ("commit", run.environment.get("commit")),
        ("command", _command(run)),
        ("weights of", weights_step(run.summary)),
        ("next", make(target, RUN=name) if target else None),
    ]
    return [(name, without_folders(str(text))) for name, text in found if text not in (None, MISSING)]


def _command(run: RunRecord) -> str:
    """What started the run; the page, which may be sent on, only says where the folders of its paths are."""
    typed = str(run.environment.get("command") or MISSING)
    shown = without_folders(typed, ".../")
    return shown if shown == typed else f"{shown} (its folders are in environment.json)"


def _section(run: RunRecord, name: str, title: str, build: Build) -> Section:
    try:
        blocks: list[Block] = list(build(run))
    except OTHER_FORM as error:  # the other sections can still be made
        reason = f"This part of the run's files is damaged ({type(error).__name__}: {error})."
        blocks = [Text([reason], warning=True)]
    half = name in ("asked", "environment")
    return Section(name, title, blocks or [Text([NOT_YET if run.activity else NOT_RECORDED])], half)


def status_line(run: RunRecord) -> str:
    """How far the run came, in a sentence."""
    planned = run.chosen.get("total_steps")
    of_all = f" of {planned:,}" if isinstance(planned, int) else ""
    steps = f"{run.last_step:,}{of_all} steps recorded"
    damaged = f" Damaged and omitted: {', '.join(run.damaged)}." if run.damaged else ""
    status = run.summary.get("status")
    if run.activity == "starting":
        earlier = " Shown below: an earlier run of this name." if run.plan else ""
        return f"Starting: data, plan and probe come before the first step.{earlier}{damaged}"
    if run.activity == "running":
        return f"Running: {progress_line(run)}.{damaged}"
    if run.activity == "ending":
        return f"Finishing: the steps are done, what follows them is not.{damaged}"
    if status == "failed" and run.summary.get("trained"):
        return f"Trained, but a later stage failed: {_reason(run)}{damaged}"
    if status == "interrupted" and run.summary.get("trained"):
        return f"Trained, but interrupted before its command was done.{damaged}"
    if status == "done":
        return f"Done.{damaged}"
    if status == "failed":
        return f"Failed: {_reason(run)} {steps}; see log.txt.{damaged}"
    if status == "interrupted":
        return f"Interrupted with a checkpoint saved, {steps}; {make('resume')} continues it.{damaged}"
    return f"Not finished: no process on this machine is running it (see log.txt); {steps}.{damaged}"


def progress_line(run: RunRecord) -> str:
    """The step of a run that is running, of how many, and the time left, without evaluations."""
    of_all = f" of {run.total_steps:,}" if run.total_steps else ""
    said, left = f"step {run.last_step:,}{of_all}", run.seconds_left
    if left is None:
        return said
    return f"{said}, about {format_duration(left) if left >= 60 else f'{left:.0f} s'} left"


def share_done(run: RunRecord) -> float | None:
    """The share of its steps that a run that is running has done; None if it is unknown, or not running."""
    known = run.activity == "running" and run.total_steps
    return min(1.0, run.last_step / known) if known else None


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
    return f"{capitalized(method)} of {model} on {data}"


def status_word(run: RunRecord) -> str:
    """How the run ended, or what it is doing."""
    return run.activity or str(run.summary.get("status", "unfinished"))


@dataclass(frozen=True)
class KeyNumber:
    """One of the numbers that say most about a run."""

    name: str
    text: str
    value: float | None = None  # None if it is no number, or unknown


def key_numbers(run: RunRecord) -> list[KeyNumber]:
    """The key numbers of a run."""
    summary, plan = run.summary, run.chosen
    predicted, measured, origin, _ = step_seconds(summary)
    batch = [plan.get(key) for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size")]
    if (ranks := group_of(plan)) > 1 and batch[-1]:
        batch[-1] = ranks_text(batch[-1], ranks)
    found = [
        KeyNumber("status", status_word(run)),
        _number("steps", run.last_step, "{:,}".format),
        _number("effective batch", plan.get("effective_batch_size"), "{:,}".format),
        KeyNumber(
            "micro-batch x accumulation x processes",
            MISSING if None in batch else " x ".join(map(str, batch)),
        ),
        _number("training loss", summary.get("train_loss"), "{:.4f}".format),
    ]
    for when in ("before", "after"):
        scores = metric_values({when: run.scores(when)})
        found += [_number(f"{label}, {when}", value, form) for label, form, (value,) in scores]
    return [
        *found,
        _number(f"peak memory, {run.memory_origin}", run.predicted_peak_bytes, format_bytes),
        _number("peak memory, measured", summary.get("measured_peak_bytes"), format_bytes),
        _number("tokens/s", tokens_per_second(run), "{:,.0f}".format),
        _number(f"step, {said_of(origin)}", predicted, format_duration),
        _number("step, measured", measured, format_duration),
        _training_time(summary),
        _number("supervised tokens", summary.get("supervised_tokens"), format_count),
        KeyNumber("weights of", weights_step(summary) or MISSING),
    ]


def _training_time(summary: Tree) -> KeyNumber:
    """Without a value to compare by if it is that of a part of the run."""
    text, seconds = training_time(summary), summary.get("training_seconds")
    whole = text != MISSING and not summary.get("resumed_step")
    return KeyNumber("training time", text, seconds if whole else None)


def tokens_per_second(run: RunRecord) -> float | None:
    """Over the run, or lately while it is running; None if it is unknown."""
    whole = None if run.activity == "running" else run.summary.get("tokens_per_second")
    return whole or run.latest("speed/tokens_per_second", RECENT)


def _number(name: str, value: Any, form: Callable[[Any], str]) -> KeyNumber:
    text = formatted(value, form)
    return KeyNumber(name, text, None if text == MISSING else value)


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
    measured = summary.get("measured_step_seconds") or run.latest("speed/step_seconds", RECENT)
    rows = [
        ("optimizer step", step_line(predicted, measured, origin, run.chosen.get("refuted_seconds"))),
        ("tokens per second, padding not counted", formatted(tokens_per_second(run), "{:,.0f}".format)),
        ("padding", formatted(summary.get("padding_share"), "{:.1%} of all tokens".format)),
        ("model FLOPs utilization", formatted(summary.get("mfu"), percent)),
        ("time spent waiting for data", formatted(summary.get("data_wait"), percent)),
        ("training time, without evaluation", training_time(summary)),
    ]
    known = [row for row in rows if row[1] != MISSING]
    yield Table(("", "value"), known, "Time", left=(0, 1))


def _data(run: RunRecord) -> Iterator[Block]:
    """Counts of each split, a histogram of lengths, and warnings."""
    data = run.data or run.summary.get("data") or {}
    splits = {split: data[split] for split in ("train", "val", "test") if data.get(split)}
    if not splits:
        return
    if lengths := (splits.get("train") or {}).get("histogram"):
        plot = histogram("Histogram: rows of the train split by tokens", **lengths)
        longer = f", the longest {lengths['longer']:,} as the last bar" if lengths["longer"] else ""
        caption = f"Bins of {counted(lengths['width'], 'token')}; {counted(splits['train']['rows'], 'row')}"
        yield Figures([Figure("Length of the training rows", plot, caption + longer)])
    measured = ("rows", "tokens", "supervised", "truncated", "dropped", "median", "p99", "longest")
    rows = list(zip(measured, *map(_counts, splits.values()), strict=True))
    yield Table(("", *splits), rows, "Tokenized rows; lengths in tokens")
    reasons = [
        f"{split}: {count:,} rows dropped: {reason}"
        for split, counts in splits.items()
        for reason, count in (counts.get("dropped") or {}).items()
        if count
    ]
    if reasons:
        yield Text(reasons)
    if data.get("warnings"):
        yield Text([str(line) for line in data["warnings"]], warning=True)
    yield Text([f"Fingerprint of the tokenized rows: {data.get('fingerprint', MISSING)}"])


def _counts(counts: Tree) -> tuple[str, ...]:
    lengths, dropped = counts.get("lengths") or {}, counts.get("dropped")
    numbers = (
        counts.get("truncated"),
        None if dropped is None else sum(dropped.values()),
        *(lengths.get(key) for key in ("p50", "p99", "max")),
    )
    return (
        f"{counts['rows']:,}",
        f"{counts['tokens']:,}",
        f"{counts['supervised_tokens'] / counts['tokens']:.1%}",
        *(formatted(number, "{:,}".format) for number in numbers),
    )


def _scores(run: RunRecord) -> Iterator[Block]:
    """The scores before and after training, of `make eval` and of `make eval-lm`."""
    columns = {"before": run.scores("before"), "after": run.scores("after"), **_evaluated(run)}
    columns = {name: scores for name, scores in columns.items() if scores}
    if (table := metric_table(columns, caption="Held-out rows")).rows:
        yield table
        over = [_over(name, scores) for name, scores in columns.items() if scores.get("answered_rows")]
        if over:
            yield Text(over)
    if tasks := dict.fromkeys(task for found in run.harness.values() for task in found):
        yield harness_table(run.harness, tasks)


def _evaluated(run: RunRecord) -> dict[str, Tree]:
    """Name of a column -> scores of `make eval`, for each split and model."""
    found = {}
    for split, result in run.evaluations.items():
        models = scores_of_models(result)
        for name, scores in models.items():
            found[f"{make('eval')}, {split}: {name}"] = {**scores, "split": split}
        if not models:
            found[f"{make('eval')}, {split}"] = result
    return found


def _over(name: str, scores: Tree) -> str:
    """Which rows the scores of a column are from."""
    text = f"{name}: {answered(scores)}"
    return f"{text}; {unfinished_note(scores)}" if scores.get("unfinished_answers") else text


def _answers(run: RunRecord) -> Iterator[Block]:
    """Sample answers before and after training, and the first ones of `make eval`."""
    if samples := run.summary.get("samples"):
        names = {"reference": "reference", "before": "before training", "after": "after training"}
        found = [_sample(sample["prompt"], sample, names) for sample in samples]
        yield Samples("Before and after training", found)
    for split, answers in run.answers.items():
        found = [_sample(history_text(answer["messages"]), answer, ANSWERS) for answer in answers]
        if found:
            yield Samples(f"{make('eval')}, first rows of {split}", found)


def _sample(prompt: str, record: Tree, names: Mapping[str, str]) -> Sample:
    texts = [(name + mark(key, record), record[key]) for key, name in names.items() if key in record]
    return Sample(prompt, texts, THUMBNAIL.findall(str(record.get("images"))))

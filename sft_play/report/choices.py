"""Three sections of a report: what was asked, what was chosen and why, and on which machine."""

from collections.abc import Iterator
from pathlib import Path

from sft_play.config.resolved import Setting
from sft_play.config.train import TrainConfig
from sft_play.parts import Activations, flat
from sft_play.report.card import public_name
from sft_play.report.html import Block, Text
from sft_play.report.plan import candidates, candidates_table, engine_label, notes_on_candidates, way_of
from sft_play.report.record import RunRecord
from sft_play.report.table import Table
from sft_play.report.tables import MISSING, NOT_RECORDED, formatted
from sft_play.units import counted, format_bytes, tallied

PATHS = {
    "model.name", "data.train_path", "data.val_path", "data.test_path", "data.chat_template", "output.dir",
    "train.resume",
}  # fmt: skip
# Setting -> the entry of the plan that was made from it.
CHOICES = {
    "train.effective_batch_size": "effective_batch_size",
    "train.batch_size": "micro_batch_size",
    "train.grad_accum": "gradient_accumulation_steps",
    "model.max_seq_len": "max_seq_len",
    "train.padding_free": "padding_free",
    "train.gradient_checkpointing": "gradient_checkpointing",
    **{f"train.{name}": name for name in flat(Activations()) if name in TrainConfig.model_fields},
    "train.mixed_precision": "mixed_precision",
    "model.dtype": "dtype",
    "model.attention": "attention",
    "train.learning_rate": "learning_rate",
    "train.kernels": "kernels",
    "train.compile": "compile",
    "parallel.engine": "engine",
}


def shown(run: RunRecord, name: str) -> str:
    """The value of a setting as it may be shown: paths lose their folders; n/a if it is unknown."""
    if name not in run.settings:
        return MISSING
    value = run.value(name)
    return public_name(value) if name in PATHS and isinstance(value, str) else _text(value)


def _text(value: object) -> str:
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


def asked_blocks(run: RunRecord) -> Iterator[Block]:
    """The settings that a person gave, and all others folded."""
    given: list[tuple[str, str, str]] = []
    others: list[tuple[str, str, str]] = []
    for name, setting in run.settings.items():
        row = (name, shown(run, name), _origin(setting))
        (others if setting.origin == "default" else given).append(row)
    head = ("setting", "value", "origin")
    if given:
        yield Table(head, given, "Settings given", left=range(3))
    if others:
        caption = f"{len(others)} settings left at their default"
        yield Table(head, others, caption, left=range(3), folded=True)


def chosen_blocks(run: RunRecord) -> Iterator[Block]:
    """The plan beside the settings that it was made from, its reasons, and the other plans."""
    if not run.plan:
        return
    plan = run.plan["plan"]
    rows = []
    for name, key in CHOICES.items():
        asked = run.settings.get(name)
        entry = plan.get(key)  # plans of earlier versions have fewer
        value = engine_label(plan) if key == "engine" else _text(entry)
        value = way_of(plan) if key == "activations" else value
        by_planner = asked is None or asked.value in ("auto", None) or _text(asked.value) != _text(entry)
        timed = key in ("kernels", "compile") and entry not in ("own", False)
        by = (timed and plan.get("kernels_origin")) or "planner"
        origin = by if asked is None or by_planner else _origin(asked)
        rows.append((name, shown(run, name), value, origin))
    rows.append(("processes", MISSING, str(plan["world_size"]), "launch"))
    yield Table(("setting", "asked", "chosen", "origin"), rows, "The plan", left=range(4))
    yield Text([str(reason) for reason in run.plan["why"]] or [NOT_RECORDED])
    if run.plan["alternatives"]:
        others = candidates(run.plan)
        yield candidates_table(others, plan)
        if notes := notes_on_candidates(others, plan):
            yield Text(notes)
    if said := run.summary.get("out_of_memory"):
        yield Text([str(line) for line in said], warning=True)


def machine_line(run: RunRecord) -> str:
    """The GPUs of a run's machine, or its CPU, in a few words."""
    found = run.environment
    names = [gpu["name"] for gpu in found.get("gpus") or []]
    if names:
        return tallied(names)
    return f"{found['cpu'] or 'CPU'}, {counted(found['cpu_cores'], 'core')}" if found else MISSING


def environment_blocks(run: RunRecord) -> Iterator[Block]:
    """The machine, and the versions of what ran on it."""
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
        yield Table(("", "value"), rows, "Machine and versions", left=(0, 1))

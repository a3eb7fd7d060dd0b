"""Who takes part in `make bench-gpu`, and the medians of what they did."""

import statistics
from typing import Any

from rich.table import Table

from sft_play.choices.kernels import COMPILED, FLOAT8, LIGER, Capability, within
from sft_play.model.attention.choice import is_installed
from sft_play.model.attention.table import ATTENTIONS
from sft_play.units import format_bytes

SIDES = ("sft-play", "trl")
# Settings that are off until this benchmark has seen them win, by section, each a side of its own.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "liger": {"train": {"kernels": "liger"}},
    "compiled": {"train": {"compile": True}},
    "float8": {"train": {"compile": True, "float8": True}},
    "flash_attention_3": {"model": {"attention": "flash_attention_3"}},
    "flash_attention_2": {"model": {"attention": "flash_attention_2"}},
    "adamw_8bit": {"train": {"optimizer": "adamw_8bit"}},
}


def left_out(device_type: str, capability: Capability | None) -> dict[str, str]:
    """The choices that cannot be timed on a device, and why, or what to type for that."""
    if device_type != "cuda":
        return dict.fromkeys(("liger", "float8", "flash_attention_3", "flash_attention_2"), "needs a GPU")
    installed = {each.extra: each.is_installed() for each in (LIGER, FLOAT8)}
    found = {name: f"run `make install EXTRAS={name}`" for name, here in installed.items() if not here}
    if not FLOAT8.runs_on(device_type, capability):
        found["float8"] = "has no kernels for this GPU"
    for name, row in ((name, row) for name, row in ATTENTIONS.items() if row.is_package):
        if capability and not within(capability, row.gpus):
            found[name] = f"{row.joined.label} is not made for this GPU"
        elif not is_installed(row):
            found[name] = f"needs a package that has {' or '.join(row.modules)}"
    if not COMPILED.runs_on(device_type, capability):
        found |= dict.fromkeys(("liger", "compiled"), "Triton compiles for no GPU as old as this one")
    return found


def sides(device_type: str, mode: str, capability: Capability | None = None) -> tuple[str, ...]:
    """All that train in this mode of tuning on a device."""
    other_modes = {"qlora": {"compiled", "float8"}, "lora": {"float8"}}.get(mode, set())
    never = {*left_out(device_type, capability), *other_modes}
    return (*SIDES, *(name for name in CHOICES if name not in never))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The medians of each course's rounds, and the ratio of both sides."""
    found = []
    measured = {(row["course"], row["side"]) for row in rows}
    for name in dict.fromkeys(row["course"] for row in rows):
        entry: dict[str, Any] = {"course": name}
        for side in (*SIDES, *(name for name in CHOICES if (entry["course"], name) in measured)):
            of_side = [row for row in rows if (row["course"], row["side"]) == (name, side)]
            done = [row for row in of_side if not row["problem"]]
            entry[side] = {"rounds": len(done)}
            for key in ("tokens_per_second", "mfu", "peak_bytes"):
                values = [row[key] for row in done if row[key] is not None]
                entry[side][key] = statistics.median(values) if values else None
        ours, theirs = (entry[side]["tokens_per_second"] for side in SIDES)
        entry["times_as_fast"] = ours / theirs if ours and theirs else None
        for side in (name for name in CHOICES if name in entry):  # the same with a choice
            speed = entry[side]["tokens_per_second"]
            entry[side]["times_as_fast"] = speed / ours if ours and speed else None
        found.append(entry)
    return found


def _or_na(text: str, value: float | None) -> str:
    """The value formatted by the template `text`; "n/a" if there is none."""
    return "n/a" if value is None else text.format(value)


def result_table(found: list[dict[str, Any]], where: str) -> Table:
    """The medians for the console."""
    table = Table(title=f"Tokens per second (without padding), MFU and peak memory on {where}")
    for name in ("run", "sft-play", "MFU", "peak", "trl", "MFU", "peak", "times as fast"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for entry in found:
        cells = []
        for side in SIDES:
            values = entry[side]
            peak = values["peak_bytes"]
            cells += [
                _or_na("{:,.0f}", values["tokens_per_second"]),
                _or_na("{:.0%}", values["mfu"]),
                "n/a" if peak is None else format_bytes(peak),
            ]
        table.add_row(entry["course"], *cells, _or_na("{:.2f}", entry["times_as_fast"]))
    return table

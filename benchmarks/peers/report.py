"""Logs the runs one by one, and reports their medians as JSON and as a table."""

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers.contestants import REFERENCE

MEDIANS = ("tokens_per_second", "padding_share", "start_up_seconds", "peak_mib")


def fingerprint(value: Any) -> str:
    """A short digest of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Lines:
    """A file with one run per line; lines from other hardware, versions or work are ignored."""

    def __init__(self, path: Path, circumstances: dict[tuple[str, str], Any]):
        """`circumstances`: what the runs of each data set and contestant depend on, such as versions."""
        self.path = path
        self.marks = {pair: fingerprint(found) for pair, found in circumstances.items()}

    def read(self) -> list[dict[str, Any]]:
        """The runs so far, without truncated lines."""
        found = []
        for text in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if line.pop("mark", "") == self.marks.get((line["data"], line["contestant"])):
                found.append(line)
        return found

    def add(self, line: dict[str, Any]) -> None:
        """Appends a run, on a new line even after a truncated one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        mark = self.marks[line["data"], line["contestant"]]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_off else "") + json.dumps(line | {"mark": mark}) + "\n")


def hardware() -> dict[str, Any]:
    """The CPU's name and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system()}


def summary(lines: Iterable[dict[str, Any]], data: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """For each contestant the medians of its rounds and its speed relative to ours, or why it failed."""
    lines = [line for line in lines if line["data"] == data]
    found = []
    for name in names:
        own = [line for line in lines if line["contestant"] == name]
        done = [line for line in own if not line["problem"]]
        entry: dict[str, Any] = {"contestant": name, "rounds": len(done)}
        entry |= {key: statistics.median(line[key] for line in done) if done else None for key in MEDIANS}
        entry["loss"] = next((line["loss"] for line in done if line.get("loss") is not None), None)
        entry["notes"] = [line["note"] for line in done if line.get("note")]
        entry["problem"] = own[-1]["problem"] if own and not done else None
        found.append(entry)
    reference = next(
        (entry["tokens_per_second"] for entry in found if entry["contestant"] == REFERENCE), None
    )
    for entry in found:
        speed = entry["tokens_per_second"]
        entry["ratio"] = round(speed / reference, 3) if speed and reference else None
    return found


def _cell(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def table(entries: list[dict[str, Any]], data: str) -> Table:
    """The medians for the console."""
    problems = [f"{entry['contestant']}: {entry['problem']}" for entry in entries if entry["problem"]]
    found = Table(title=f"Tokens per second without padding: {data}", caption="\n".join(problems) or None)
    columns = (
        "contestant",
        "rounds",
        "tokens/s",
        "ratio",
        "padding",
        "start-up s",
        "peak MiB",
        "held-out loss",
    )
    for name in columns:
        found.add_column(name, justify="left" if name == "contestant" else "right")
    for entry in entries:
        found.add_row(
            entry["contestant"],
            str(entry["rounds"]),
            _cell(entry["tokens_per_second"], ",.0f"),
            _cell(entry["ratio"], ".2f"),
            _cell(entry["padding_share"], ".0%"),
            _cell(entry["start_up_seconds"], ".1f"),
            _cell(entry["peak_mib"], ",.0f"),
            _cell(entry["loss"], ".3f"),
        )
    return found


def write_result(path: Path, record: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Writes a readable file: the record indented, then one run per line."""
    text = json.dumps(record, indent=1).removesuffix("\n}")
    rows = ",\n".join("  " + json.dumps(run) for run in runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n "runs": [\n{rows}\n ]\n}}\n', encoding="utf-8")

"""The small run that is disturbed here, and the processes that it has started."""

from pathlib import Path

import psutil

from benchmarks.markdown import ROOT


def small_run(folder: Path, name: str) -> list[str]:
    """Config and overrides of a run of the smallest model, in this folder."""
    return [
        "--config",
        str(ROOT / "configs" / "demo.yaml"),
        "model.name=builtin:tiny",
        "eval.generate=false",
        f"output.dir={folder}",
        f"output.name={name}",
    ]


def descendants(pid: int | None = None) -> set[int]:
    """All child processes of a process (default: this one), at any depth."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}

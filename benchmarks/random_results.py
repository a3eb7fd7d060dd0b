"""Results of random runs: a row for each, and a summary of their errors."""

import statistics
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.random_cases import RandomRun
from sft_play.timeline import PHASES

TARGET = 0.001
TENSORS = "tensors"  # without what oneDNN takes


def row_of(run: RandomRun, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the result: errors of the peak and of each phase, of the highest among all processes."""
    row: dict[str, Any] = asdict(run)
    failed = next((each for each in found if "measured" not in each), None)
    if failed is not None:
        return row | {name: failed[name] for name in ("refused", "crashed") if name in failed}
    predicted, measured = found[0]["predicted"], [each["measured"] for each in found]
    phases = [name for name in measured[0] if name != TENSORS]
    highest = {name: max(each[name] for each in measured) for name in phases}
    peak = max(highest.values())
    return row | {
        "plan": found[0]["plan"],
        "predicted": {name: predicted[name] for name in phases},
        "measured": highest,
        "error": max(predicted[name] for name in phases) / peak - 1,
        "scratch": round(peak / max(each[TENSORS] for each in measured) - 1, 6),
        "probed": found[0].get("probed", False),
        "errors": {name: round(predicted[name] / highest[name] - 1, 6) for name in phases},
    }


def found_of(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured, as a row has it: of the process that takes most; results of old have no plans."""
    if "measured" not in row:
        return {name: row[name] for name in ("refused", "crashed") if name in row}
    peak = max(row["measured"].values())
    measured = row["measured"] | {TENSORS: round(peak / (1 + row["scratch"]))}
    found = {"predicted": row["predicted"], "measured": measured, "plan": row.get("plan")}
    return found | {"probed": row.get("probed", False)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the peaks, in all, by type and by engine, and of each phase."""
    trained = [row for row in rows if "error" in row]
    groups = {"all": trained, "after a probe": [row for row in trained if row["probed"]]}
    for name in ("precision", "engine"):
        for kind in dict.fromkeys(row[name] for row in trained):
            groups[f"{name} {kind}"] = [row for row in trained if row[name] == kind]
    found = {name: figures([row["error"] for row in group]) for name, group in groups.items() if group}
    for name in PHASES[1:] if trained else ():
        found[f"phase {name}"] = figures([row["errors"][name] for row in trained])
    return {
        "runs": len(rows),
        "refused": sum("refused" in row for row in rows),
        "crashed": sum("crashed" in row for row in rows),
        "errors": found,
        "scratch": max((row["scratch"] for row in trained), default=0.0),
    }


def figures(errors: list[float]) -> dict[str, Any]:
    """Of relative errors; positive where the prediction is too high."""
    return {
        "runs": len(errors),
        "median": statistics.median(map(abs, errors)),
        "within_target": sum(abs(error) <= TARGET for error in errors),
        "worst_high": max(0.0, *errors),
        "worst_low": min(0.0, *errors),
    }


def describe(row: dict[str, Any]) -> str:
    """One line."""
    tree, train = row["tree"], row["tree"]["train"]
    layout = "packed" if train["packing"] else "padded" if train["padding_free"] is False else "joined"
    words = [row["architecture"], tree["tuning"]["mode"], row["precision"], row["engine"], layout]
    words += [train["optimizer"], "recomputed" if train["gradient_checkpointing"] else "kept"]
    words += [name for name in tree["tuning"].get("lora", {}) if name != "r"] + ["tied"] * row["tied"]
    words += ["tokens divided"] * ("parallel" in tree)
    words += ["neftune"] * ("neftune_noise_alpha" in train) + ["new tokens"] * bool(
        tree["model"]["new_tokens"]
    )
    if "error" not in row:
        said = row.get("refused", row.get("crashed", "no result"))
        return f"{row['number']:>3} {'refused' if 'refused' in row else 'crashed'}  {' '.join(words)}: {said}"
    phases = " ".join(f"{name} {error:+.3%}" for name, error in row["errors"].items())
    return f"{row['number']:>3} {row['error']:+.4%}  {' '.join(words)}  ({phases})"


def table(found: dict[str, Any]) -> Table:
    """The summary for people."""
    grid = Table("peaks of", "runs", "median", f"within {TARGET:.1%}", "worst high", "worst low")
    for kind, each in found["errors"].items():
        worst = (f"{each['worst_high']:+.3%}", f"{each['worst_low']:+.3%}")
        grid.add_row(kind, str(each["runs"]), f"{each['median']:.4%}", str(each["within_target"]), *worst)
    return grid

"""Tables of the documentation: how far predicted memory is off."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import GIB, MIB, RESULTS, in_unit, results, signed, spread, summarized, table
from sft_play.engines.registry import label_of
from sft_play.sizing.estimate.budget import CONTEXTS

# Steps of models that processes divide, and the results that hold them.
DIVIDED = {
    "weights": "sharding",
    "weights, another seed": "sharding_heldout",
    "weights, which stay gathered to the backward pass in two of three steps": "gathered",
    "weights; layers recomputed, all but the last few or with MLPs in three tiles": "sharding_mixed",
    "weights; layers recomputed from inputs in RAM": "sharding_in_ram",
    "weights and tokens": "sequence",
}
# Random runs beside those of `random_on_a_cpu`.
OTHER_RUNS = {
    "of another seed": "random_heldout",
    "of a third seed, two processes": "random_two",
    "after a probe, two processes": "random_probed",
    "with divided tokens, two processes": "random_sequence",
}


def published(kind: str) -> list[float]:
    """The errors of one kind in all published series."""
    return [row["errors"][kind] for row in _published_rows() if kind in row["errors"]]


def _published_rows() -> list[dict[str, Any]]:
    tree = results("evidence")
    return [row for name in tree if name.startswith("rows_") for row in tree[name]]


def evidence() -> str:
    """Errors of predictions for each published series, beside the publisher's own predictor."""
    tree = results("evidence")
    kinds = ("publisher_allocated", "reserved", "process", "publisher_process", "tokens_per_second")
    rows = []
    for source in tree["sources"]:
        found, name = source["summary"], source["source"]
        tensors = found["allocated"] or found["after_step"]
        gpu = re.sub(r" \(.*|,.*|NVIDIA |GeForce |-SXM.*", "", source["gpu"])
        errors = (tensors, *(found[kind] for kind in kinds))
        rows.append([f"{gpu}, `{name}`", str(len(tree[f"rows_{name}"])), *map(summarized, errors)])
    head = ("measured by others", "rows", "allocated", "the publisher's own predictor", "reserved", "process")
    return table((*head, "the publisher's", "tokens/s"), rows)


def gpu_proofs(folder: Path = RESULTS / "gpu") -> str:
    """What `make gpu-proof` has found on each machine that sent its file."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        tests, memory, sharded, speed = (
            tree["parts"][name] for name in ("tests", "memory", "sharded", "speed")
        )
        passed = f"{tests['passed']}, {len(tests['failed'])} failed" if tests else "-"
        errors = [memory.get("errors", {}).get(kind) for kind in ("allocated", "reserved")]
        errors.append(sharded.get("errors", {}).get("allocated"))
        ratios = [one["times_as_fast"] for one in speed.get("summary", ()) if one["times_as_fast"]]
        faster = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
        rows.append([path.stem, tree["versions"]["torch"], passed, *map(summarized, errors), faster])
    if not rows:
        return "No file yet."
    return table(("machine", "torch", "tests", "allocated", "reserved", "divided", "times plain TRL"), rows)


def steps_on_a_gpu() -> str:
    """Our own steps on a GPU: bytes of tensors, and errors of what is reserved and of the whole process."""
    context = CONTEXTS[9, 0]
    rows = [
        [
            row["key"],
            f"{max(row['predicted']['phases'].values()):,}",
            f"{row['measured']['peak']:,}",
            signed(row["error"], 4),
            signed(row["error_reserved"], 2),
            signed(
                (row["predicted"]["reserved"] + context)
                / (row["measured"]["reserved"] + row["measured"]["outside_allocator"])
                - 1,
                2,
            ),
        ]
        for row in results("gpu/NVIDIA-H200-x1")["steps"]
    ]
    head = ("step", "bytes predicted", "measured", "error", "of reserved bytes", "of the process")
    return table(head, rows)


def run_on_a_gpu() -> str:
    """Our own run on a GPU: bytes and seconds, predicted when it was planned and measured."""
    run = results("gpu/NVIDIA-H200-x1")["run"]
    rows = [
        [what, *(f"{run[f'{side}_{name}']:,.{digits}f}" for side in ("predicted", "measured"))]
        for what, name, digits in (
            ("allocated peak, bytes", "peak_bytes", 0),
            ("reserved, bytes", "reserved_bytes", 0),
            ("of the process, bytes", "process_bytes", 0),
            ("a step, seconds", "step_seconds", 3),
        )
    ]
    return table(("LoRA of Llama-3.1-8B, rows of GSM8K", "predicted", "measured"), rows)


def outside_on_a_gpu() -> str:
    """What those steps took outside of the allocator, beside what plans take on such a GPU."""
    steps = results("gpu/NVIDIA-H200-x1")["steps"]
    found = [step["measured"]["outside_allocator"] for step in steps]
    low, high, planned = (round(size / MIB) for size in (min(found), max(found), CONTEXTS[9, 0]))
    return (
        f"Outside of PyTorch's allocator, the steps took {low} to {high} MiB; plans for such a GPU count "
        f"{planned} until a probe has measured it."
    )


def speeds_on_a_gpu() -> str:
    """Tokens per second of our own steps on a GPU, and of plain TRL's."""
    sides = {
        "sft-play": "packed, no switch set",
        "liger": "packed, `train.kernels=liger`",
        "trl_tuned": "plain TRL, its Liger switch, rows padded",
    }
    rows = [
        [
            f"{turn['course'].removesuffix(', packed')}, {sides[turn['side']]}",
            f"{turn['tokens_per_second']:,.0f}",
            f"{turn['mfu']:.0%}",
            in_unit(turn["peak_bytes"], GIB),
        ]
        for turn in results("gpu/NVIDIA-H200-x1")["turns"]
        if "refuted" not in turn
    ]
    return table(("step", "tokens/s without padding", "MFU", "allocated peak"), rows)


def seconds_on_a_gpu() -> str:
    """Seconds of our own steps on a GPU, what its data sheet predicts for them, and errors of their peaks."""
    tree = results("gpu/NVIDIA-H200-x1")
    names = {"sft-play": "packed", "liger": "packed, Liger's kernels"}
    rows = []
    for turn in tree["turns"]:
        if (sheet := turn.get("data_sheet_step_seconds")) and "refuted" not in turn:
            steps = zip(turn["step_tokens"][1:], turn["step_seconds"][1:], sheet, strict=True)
            what = f"{turn['course'].removesuffix(', packed')}, {names[turn['side']]}"
            seconds = map(" / ".join, zip(*(_seconds(*step) for step in steps), strict=True))
            rows.append([what, *seconds, signed(turn["predicted_peak_bytes"] / turn["peak_bytes"] - 1, 4)])
    run = tree["run"]
    measured, found = run["measured_step_seconds"], run["data_sheet_step_seconds"]
    mean = run["tokens_per_second"] * measured
    peak = signed(run["predicted_peak_bytes"] / run["measured_peak_bytes"] - 1, 4)
    rows.append(["LoRA 8B, the whole run, mean", *_seconds(mean, measured, found), peak])
    head = ("steps", "tokens", "seconds measured", "predicted by the data sheet", "error", "of the peak")
    return table(head, rows)


def _seconds(tokens: float, measured: float, found: float) -> tuple[str, ...]:
    return f"{tokens:,.0f}", f"{measured:.3f}", f"{found:.3f}", signed(found / measured - 1, 1)


def compiled_on_a_cpu() -> str:
    """By how much the prediction, without compiled layers, is above what runs with them took."""
    cases: dict[tuple[str, ...], dict[bool, str]] = {}
    for row in results("compiled_cpu")["cases"]:
        train = row["tree"]["train"]
        layout = "packed" if train["packing"] else "padded" if "padding_free" in train else "joined"
        processes = "1" if row["engine"] == "none" else f"2, {label_of(row['engine'])}"
        case = (processes, row["tree"]["tuning"]["mode"], row["precision"], row["architecture"], layout)
        cases.setdefault(case, {})[train["gradient_checkpointing"]] = signed(row["error"], 1)
    head = ("processes", "mode", "types", "model", "rows", "kept", "recomputed")
    return table(
        head, ([*case, *(found.get(way, "-") for way in (False, True))] for case, found in cases.items())
    )


def compilations() -> str:
    """Graphs and seconds of steps whose rows have other lengths each time."""
    rows = []
    for entry in results("compiled_cpu")["compilations"]:
        first, *others = entry["steps"]
        seconds = max(step["seconds"] for step in others)
        rows.append(
            [
                entry["mode"],
                *(str(step["graphs"]) for step in (first, others[-1])),
                str(first["seconds"]),
                str(seconds),
            ]
        )
    return table(
        (
            "mode",
            "graphs after the first step",
            "after the last",
            "seconds of the first",
            "longest of the others",
        ),
        rows,
    )


def reserved() -> str:
    """Errors of reserved and process bytes, by whether the weights are in NF4."""
    rows, runs = [], [row for row in _published_rows() if "reserved" in row["errors"]]
    for name, quantized in (("NF4", True), ("16 bit", False)):
        shown = [row["errors"] for row in runs if (" qlora " in row["name"]) == quantized]
        errors = ([one[kind] for one in shown if kind in one] for kind in ("reserved", "process"))
        rows.append([name, str(len(shown)), *map(spread, errors)])
    return table(("weights", "rows", "reserved", "process"), rows)


def evidence_seconds() -> str:
    """Tokens per second of the published rows that say them, and errors of the clock, by kind of step."""
    kinds: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for row in _published_rows():
        if "tokens_per_second" in row:
            before, shape, after = re.split(r" (\d+x\d+)", row["name"])
            kind = before + after.replace("Liger's", "fused")
            kinds.setdefault(kind, []).append((shape, row["tokens_per_second"]))
    rows = []
    for kind, each in kinds.items():
        shapes = [shape for shape, _ in each]
        measured, errors = (sorted(speed[key] for _, speed in each) for key in ("measured", "error"))
        speeds, wrong = [f"{speed:,.0f}" for speed in measured], [signed(error, 1) for error in errors]
        rows.append([kind, *map(_span, (shapes, speeds, wrong))])
    return table(("step", "rows x tokens", "measured tokens/s", "error of the prediction"), rows)


def _span(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def evidence_overlap() -> str:
    """Seconds that dividing a model added to published steps, and to those of the clock in two ways."""
    rows = []
    for row in results("overlap")["compared"]:
        name, step = row["model"].rpartition("/")[2], f"{row['mode']} {row['rows']}x{row['row_tokens']}"
        ways = ("published", "added_in_full", "overlapped")
        more = (f"{row['more_seconds'][way]:+.2f}" for way in ways)
        where = f"{row['gpus']} x {row['gpu']}"
        span = "{:+.2f} to {:+.2f}".format(*row["range"])
        rows.append([f"{name} {step}", row["from"], where, f"{row['alone']:.2f}", *more, span])
    head = ("step", "from", "GPUs", "alone, s", "published", "added in full", "overlapped", "range of a plan")
    return table(head, rows)


def evidence_sharded() -> str:
    """Published steps that several GPUs divided, beside plans of such runs."""
    steps: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for found in results("sizing_published")["figures"]:
        if found["gpus"] > 1:
            values = (in_unit(found[name], found["unit"]) for name in ("published", "predicted"))
            step, kind = found["what"].replace(", activations recomputed", "").rsplit(": ", 1)
            cells = (kind, *values, signed(found["error"], 1))
            steps.setdefault((f"[{step}]({found['source']})", found["note"]), []).append(cells)
    rows: list[list[str]] = []
    said = ""
    for (step, note), each in steps.items():
        differs = "the same" if note == said else note
        rows.append([step, *map("<br>".join, zip(*each, strict=True)), differs])
        said = note
    return table(("step", "", "published", "planned here", "difference", "how theirs differs"), rows)


def memory_on_a_cpu() -> str:
    """Errors of predicted peaks against measured ones, by precision."""
    tree = results("sizing_cpu")
    precisions = {shape["name"]: shape["mixed_precision"] for shape in tree["shapes"]}
    errors: dict[str, list[float]] = {precision: [] for precision in precisions.values()}
    for one in tree["configurations"]:
        errors[precisions[one["shape"]]].append(abs(one["error"]))
    rows = []
    for precision, found in errors.items():
        name = "fp32" if precision == "no" else precision
        rows.append([name, str(len(found)), f"{statistics.median(found):.4%}", f"{max(found):.4%}"])
    return table(("precision", "steps", "median error", "worst"), rows)


def random_on_a_cpu() -> str:
    """Errors of predicted peaks of random runs with uneven rows: in all, by engine and phase."""
    errors = {
        name.replace("engine none", "one process"): found
        for name, found in results("random")["errors"].items()
        if not name.startswith("precision")
    }
    return _of_runs(errors, "peak of")


def other_random_runs() -> str:
    """The same of other random runs, all phases together."""
    return _of_runs({name: results(file)["errors"]["all"] for name, file in OTHER_RUNS.items()}, "runs")


def _of_runs(errors: dict[str, dict[str, Any]], what: str) -> str:
    rows = []
    for name, found in errors.items():
        worst = (signed(found["worst_high"], 3), signed(found["worst_low"], 3))
        share = f"{found['within_target']} of {found['runs']}"
        rows.append([name, f"{found['median']:.3%}", share, *worst])
    return table((what, "median error", "within 0.1%", "highest", "lowest"), rows)


def divided_on_a_cpu() -> str:
    """Errors of predicted peaks of steps under FSDP2 against measured ones, by what was divided and how."""
    rows = []
    for name, file in DIVIDED.items():
        found = results(file)["by_precision"].values()
        worst = max((one["worst"] for one in found), key=abs)
        steps, within = (str(sum(one[key] for one in found)) for key in ("cases", "within_target"))
        rows.append([name, steps, signed(worst, 4), within, f"{max(one['scratch'] for one in found):.1%}"])
    return table(("divided", "steps", "worst error", "within 0.1%", "oneDNN adds at most"), rows)

"""How much longer published steps took once weights were divided, beside what the clock says of it.

    python -m benchmarks.evidence.overlap   # needs no GPU; writes benchmarks/results/overlap.json

Each row is a step with the same micro-batch alone and on several GPUs, so what was computed is the same but
for the update. The clock adds communication in full. Beside that stands what it would say if a gather and a
reduction went on beside each pass, and only the first gather and the last reduction, or what exceeds a pass,
took time. Links and GPUs are those of data sheets; `range` is that of a plan, for what links may be.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from benchmarks.measurement_log import RESULTS, versions, write_result
from sft_play.config.schema import DataConfig, ModelConfig, OutputConfig, RunConfig, TrainConfig, TuningConfig
from sft_play.engines.base import Message
from sft_play.engines.registry import engine_of
from sft_play.machine.gpus import what_if
from sft_play.machine.links import links_of, rate_of
from sft_play.model.architecture.published import published_models
from sft_play.plan import Plan
from sft_play.planning.allowed import allowed_plans
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.planning.search.less_sent import LONGER
from sft_play.planning.speed.clock import StepSeconds, batches_of, mean_micro_batch, messages_of, step_seconds
from sft_play.planning.speed.devices import Collectives, derived_profile
from sft_play.sizing.estimate.estimator import work_of_plans
from sft_play.sizing.facts.architecture import Architecture
from sft_play.ui.console import console
from sft_play.work import Work

ROWS, FILE = Path(__file__).with_suffix(".json"), RESULTS / "overlap.json"


def run_of(row: dict[str, Any]) -> RunConfig:
    """The run of a row, all of whose rows are full."""
    return RunConfig(
        model=ModelConfig(name=row["model"], max_seq_len=row["row_tokens"], dtype="bfloat16"),
        data=DataConfig(train_path="none"),
        tuning=TuningConfig(mode=row["mode"]),
        train=TrainConfig(batch_size=row["rows"], grad_accum=1, gradient_checkpointing=True),
        output=OutputConfig(dir="none"),
    )


def parts_of(row: dict[str, Any], gpus: int) -> tuple[StepSeconds, tuple[Message, ...], Collectives | None]:
    """Seconds of a step as the clock adds them up, without communication; and what is exchanged."""
    run, machine = run_of(row), what_if(row["gpu"], gpus)
    config = architecture_of(row["model"])
    facts = DataFacts.unseen(run, config)
    drafts, _ = allowed_plans(Request(run, Architecture.of(config), facts, machine, gpus))
    engine = engine_of("none" if gpus == 1 else "fsdp2")
    plan: Plan = next(
        draft for draft in drafts if (draft.sharing.engine, draft.sharing.offload) == (engine.name, "none")
    )
    batch = mean_micro_batch(facts, plan)
    work: Work = work_of_plans(config, batches_of(config, facts))(run, plan, batch.tokens)
    profile = derived_profile(machine, gpus)
    assert profile
    parts = step_seconds(work, profile, batch, update_share=engine.update_share(plan.sharing.shards))
    sheet = row.get("link_gb_s") or machine.gpus[0].link_gb_s  # the catalogue does not know all
    collectives = Collectives.over_link(1e9 * sheet, gpus) if sheet and gpus > 1 else None
    return parts, messages_of(work, run, plan), collectives


def architecture_of(name: str) -> PretrainedConfig:
    """The architecture of a model of the catalogue."""
    return AutoConfig.for_model(**published_models()[name.lower()].config)


def exposed(parts: StepSeconds, messages: tuple[Message, ...], collectives: Collectives) -> float:
    """Seconds of communication that no pass could hide."""
    gathers = [one for one in messages if one.kind == "all_gather"]
    reduces = [one for one in messages if one.kind != "all_gather"]
    gather, reduce = collectives.seconds(gathers) / 2, collectives.seconds(reduces)  # twice; once
    ends = [replace(max(kind, key=_size), times=1) for kind in (gathers, reduces) if kind]
    hidden = max(0.0, gather - parts.forward) + max(0.0, gather + reduce - parts.backward)
    return max(hidden, collectives.seconds(ends))


def ranged(row: dict[str, Any], parts: StepSeconds, messages: tuple[Message, ...]) -> tuple[float, float]:
    """The least and the most that a step may take by a plan, which does not know this machine's link."""
    [link] = links_of(what_if(row["gpu"], row["gpus"]), row["gpus"])
    least, most = (
        Collectives.over_link(rate_of(link, best), row["gpus"]).seconds(messages) for best in (True, False)
    )
    beside = min(least, parts.forward + parts.backward)
    return sum(parts) + least - beside, (sum(parts) + most) * LONGER["cuda"]


def _size(message: Message) -> float:
    return message.tensor_bytes


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the seconds that dividing added, published and predicted in both ways."""
    alone, _, _ = parts_of(row, 1)
    parts, messages, collectives = parts_of(row, row["gpus"])
    assert collectives
    more = sum(parts) - sum(alone)
    found = {
        "published": row["sharded"] - row["alone"],
        "added_in_full": more + collectives.seconds(messages),
        "overlapped": more + exposed(parts, messages, collectives),
    }
    more_seconds = {name: round(value, 4) for name, value in found.items()}
    span = [round(end - sum(alone), 4) for end in ranged(row, parts, messages)]
    return {**row, "predicted_alone": round(sum(alone), 3), "more_seconds": more_seconds, "range": span}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far each way is from the published step, as a share of the step alone."""
    errors = {
        way: [(row["more_seconds"][way] - row["more_seconds"]["published"]) / row["alone"] for row in rows]
        for way in ("added_in_full", "overlapped")
    }
    nearer = sum(abs(full) < abs(beside) for full, beside in zip(*errors.values(), strict=True))
    medians = {way: statistics.median(map(abs, found)) for way, found in errors.items()}
    within = sum(row["range"][0] <= row["more_seconds"]["published"] <= row["range"][1] for row in rows)
    return {
        "rows": len(rows),
        "nearer_added_in_full": nearer,
        "median_error": medians,
        "within_the_range_of_a_plan": within,
    }


def main() -> int:
    """Compares all rows and writes the result."""
    tree = json.loads(ROWS.read_text(encoding="utf-8"))
    rows = []
    for row in tree["rows"]:
        rows.append(compared(row))
        said = ", ".join(f"{name} {value:+.3f}" for name, value in rows[-1]["more_seconds"].items())
        console().print(f"{row['model']} {row['mode']} x {row['gpus']} {row['gpu']}: {said}", highlight=False)
    about = {"what": (__doc__ or "").splitlines()[0], "versions": versions(), "sources": tree["source"]}
    write_result(FILE, about | summary(rows), {"compared": rows})
    console().print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

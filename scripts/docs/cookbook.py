"""`make cookbook`: plans every model on every machine and writes docs/reference/cookbook.md."""

import argparse
from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import table
from scripts.docs.tables import COOKBOOK, FEWEST, LONGEST
from sft_play.cache import project_dir
from sft_play.config.methods import METHODS
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of, label_of
from sft_play.machine.gpus import what_if
from sft_play.model.load import planning_config
from sft_play.plan import Plan
from sft_play.planning.answers.other_machines import MODES, plans_by_mode
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.sizing.facts.architecture import Architecture
from sft_play.ui.console import console, quiet_libraries
from sft_play.units import GIB

# Names in configs/hardware.yaml, and how many
MACHINES = (
    ("RTX 3070 Ti", 1),
    ("RTX 5070", 1),
    ("T4", 1),
    ("RTX 4090", 1),
    ("L40S", 1),
    ("H100 80GB", 1),
    ("H200", 1),
    ("RTX 4090", 2),
    ("H100 80GB", 2),
    ("H100 80GB", 4),
    ("H100 80GB", 8),
)
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "google/gemma-3-12b-it",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)
# For the fewest GPUs
LARGE = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "openai/gpt-oss-120b",
    "meta-llama/Llama-3.1-405B",
)
GPUS = ("RTX 4090", "L40S", "A100 80GB", "H100 80GB", "H200")
TOKENS = 100_000_000  # whose GPU-hours are in the table of the fewest GPUs
FEWEST_HEAD = f"""{FEWEST}

The fewest of 1, 2, 4 ... 512 GPUs, in machines of eight, with the engine that the plan chooses, the
predicted tokens per second of all of them, and the GPU-hours of {TOKENS // 10**6} million tokens (n/a if the
data sheets don't say how fast the GPUs or their machines are linked). The effective batch is 16, or one row
for each GPU if more are needed. A dash means that not even 512 are enough, because each GPU holds whole what
it gathers: a layer, or the embedding and head; or that the method is refused: nearly all weights of gpt-oss
are fused experts, which QLoRA would leave in 16 bit.
"""
HEAD = """# Cookbook: what fits, and how fast

All numbers are predicted, none measured: `make cookbook` writes this page from plans, and a test makes some
of them again. Speeds come from the GPU's data sheet and from matrix rates that others report for it. Rows
have 2,048 tokens and stay whole (`parallel.sequence_parallel_size=1`), the effective batch is 16, and
[settings](config.md) are the defaults. Your rows are likely to be shorter. To see a plan with its reasons, or
for your own data:

```
make plan MODEL=qwen3-8b GPU="RTX 4090" ARGS="tuning.mode=qlora"
make plan CONFIG=configs/run_qlora.yaml ARGS="data.train_path=my.jsonl"
```

Each cell has the sequences in a micro-batch, the peak of tensors in GiB, and the tokens per second of all
GPUs together.

- A star: activations are recomputed (gradient checkpointing).
- ZeRO-2: the plan chose it over DDP.
- n/a: the data sheet has no speed for this type.
- A dash: no plan fits that holds the model on each GPU. For FSDP2, see [the fewest GPUs](#the-fewest-gpus).
"""


def model_rows(
    model: str, machines: Iterable[tuple[str, int]] = MACHINES, modes: tuple[str, ...] = MODES
) -> dict[tuple[str, int], list[str]]:
    """The cells of a model's row for each machine: the name, and one cell for each tuning mode."""
    config, architecture, facts = _to_plan(model)
    rows = {}
    for name, gpus in machines:
        request = Request(config, architecture, facts, what_if(name), 1)
        plans = plans_by_mode(request, modes, gpus, accept=_holds_model)
        rows[name, gpus] = [model.partition("/")[2], *(_cell(plans[mode]) for mode in modes)]
    return rows


def _to_plan(model: str) -> tuple[RunConfig, Architecture, DataFacts]:
    """The default run of a model whose rows stay whole, its architecture, and rows of the default length."""
    config = default_run(model).changed({"parallel.sequence_parallel_size": 1})
    architecture = Architecture.of(planning_config(config.model)[0])
    return config, architecture, DataFacts.unseen(config, architecture)


def default_run(model: str, **settings: Any) -> RunConfig:
    """The default run of a model, with more settings of its section."""
    tree = {"model": {"name": model, **settings}, "data": {"train_path": "data/train.jsonl"}}
    return RunConfig.model_validate(tree)


def fewest_rows(model: str, gpus: Iterable[str] = GPUS, modes: tuple[str, ...] = MODES) -> list[list[str]]:
    """A row for each tuning mode: the model, the mode, and the fewest of each GPU with engine and speed."""
    run = _to_plan(model)
    by_gpu = [plans_by_mode(Request(*run, what_if(gpu), 1), modes) for gpu in gpus]
    name = model.partition("/")[2]
    return [[name, method(mode), *(_fewest_cell(plans[mode]) for plans in by_gpu)] for mode in modes]


def _fewest_cell(plan: dict[str, Any]) -> str:
    if "problem" in plan:
        return "-"
    speed = plan["tokens_per_second"]
    engine = f" {label_of(plan['engine'])}" if plan["gpus"] > 1 else ""
    known = "n/a" if speed is None else f"{speed:,.0f}, {plan['gpus'] * TOKENS / speed / 3600:,.1f} h"
    return f"{plan['gpus']}{engine}, {known}"


def method(mode: str) -> str:
    """A tuning mode, in a word or two."""
    return METHODS[mode].removesuffix(" fine-tuning")


def fewest_section(rows: Iterable[list[str]]) -> str:
    """The section about the fewest GPUs as Markdown, from `fewest_rows` of each model."""
    return f"{FEWEST_HEAD}\n{table(['model', '', *GPUS], rows)}\n"


def _holds_model(draft: Plan) -> bool:
    return not engine_of(draft.sharing.engine).shards_weights


def _cell(plan: dict[str, Any]) -> str:
    if "problem" in plan:
        return "-"
    star = "*" if plan["gradient_checkpointing"] else ""
    speed = plan["tokens_per_second"]
    peak = "n/a" if plan["peak_bytes"] is None else f"{plan['peak_bytes'] / GIB:.1f}"
    engine = f"{label_of(plan['engine'])}, " if plan["engine"] not in ("none", "ddp") else ""
    return f"{engine}{plan['micro_batch_size']}{star}, {peak}, {'n/a' if speed is None else f'{speed:,.0f}'}"


def page(rows: Iterable[dict[tuple[str, int], list[str]]]) -> str:
    """The page as Markdown, from the rows of each model."""
    found, parts = list(rows), [HEAD]
    for name, gpus in MACHINES:
        memory = what_if(name, 1).gpus[0].total_bytes / GIB
        parts.append(
            f"## {f'{gpus} x ' if gpus > 1 else ''}{name} ({memory:.0f} GiB{' each' if gpus > 1 else ''})\n"
        )
        parts += [table(["model", *map(method, MODES)], (row[name, gpus] for row in found)), ""]
    return "\n".join(parts)


def main() -> None:
    """Plans everything, or the fewest GPUs alone, which takes some minutes, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fewest", action="store_true", help="plan the table of the fewest GPUs alone")
    asked = parser.parse_args()
    rows, fewest = [], []
    with quiet_libraries(project_dir() / "cookbook.log"):
        for model in () if asked.fewest else MODELS:
            console().print(f"planning {model}")
            rows.append(model_rows(model))
        for model in LARGE:
            console().print(f"planning {model} on as few GPUs as are enough")
            fewest += fewest_rows(model)
    known = COOKBOOK.read_text(encoding="utf-8")
    before = known.partition(FEWEST)[0] if asked.fewest else f"{page(rows)}\n"
    after = "\n".join(["", *known.partition(LONGEST)[1:]]) if LONGEST in known else ""  # of `longest_rows`
    COOKBOOK.write_text(before + fewest_section(fewest) + after, encoding="utf-8")
    console().print(f"wrote {COOKBOOK}", soft_wrap=True)


if __name__ == "__main__":
    main()

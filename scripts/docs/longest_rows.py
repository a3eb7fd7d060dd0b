"""`make cookbook WHAT=longest`: the longest rows that fit, beside those that others have published."""

import math
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from benchmarks.markdown import table
from scripts.docs.cookbook import default_run, method
from scripts.docs.tables import COOKBOOK, LONGEST
from sft_play.cache import project_dir, recall, remember
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import label_of
from sft_play.machine.gpus import what_if
from sft_play.model.load import planning_config, position_limit
from sft_play.planning.answers.context import longest_rows
from sft_play.planning.answers.other_machines import MODES
from sft_play.planning.request import Request
from sft_play.planning.rows.facts import DataFacts
from sft_play.reasons.choices import group_of
from sft_play.sizing.facts.architecture import Architecture
from sft_play.ui.console import console, quiet_libraries

POSITIONS = 16_000_000  # that models are scaled to, so that memory is the limit
MODELS = ("meta-llama/Llama-3.1-8B",)
MACHINES = (("RTX 4090", 1), ("H100 80GB", 1))


class Published(NamedTuple):
    """A figure of others."""

    who: str
    source: str  # URL
    tokens: str
    model: str
    gpu: str
    gpus: int
    mode: str
    by: str  # what made it possible


LLAMA, H100, A100 = "meta-llama/Llama-3.1-8B", "H100 80GB", "A100 80GB"
ALST, UNSLOTH = "https://arxiv.org/abs/2506.13996", "https://unsloth.ai/blog/llama3-3"
TORCHTITAN, ULYSSES = "https://arxiv.org/abs/2410.06511", "https://huggingface.co/blog/ulysses-sp"
PUBLISHED = (
    Published("ALST", ALST, "500K", LLAMA, H100, 1, "full", "activations, optimizer in RAM, tiles"),
    Published("ALST", ALST, "3.7M", LLAMA, H100, 8, "full", "the same, and sequence parallelism"),
    Published("Unsloth", UNSLOTH, "342K", LLAMA, A100, 1, "qlora", "activations in RAM"),
    Published("torchtitan", TORCHTITAN, "262K", LLAMA, H100, 8, "full", "context parallelism"),
    Published("HF Ulysses", ULYSSES, "96K", "Qwen/Qwen3-4B", H100, 4, "full", "sequence parallelism, ZeRO-3"),
)
HEAD = f"""{LONGEST}

Predicted by `make cookbook WHAT=longest`, which takes minutes, for one row in a micro-batch, loss on every
token, activations recomputed, an effective batch of 16 and the default [settings](config.md). Rows are
multiples of 1,024 tokens; models get as many positions as needed (`model.rope_scaling`), so memory is the
limit. Each cell has the tokens of the longest row, the engine on several GPUs, and the tokens per second of
all GPUs at that length (n/a if the data sheets don't say); then, if longer, the longest row with weights in
RAM (`OFFLOAD=ram`), and with groups of GPUs that share each row (sequence parallelism). For your own model
and GPU:

```
make plan MODEL=qwen3-8b GPU="RTX 4090" CONTEXT=max
```
"""
BESIDE = """
What others have published, next to what fits here on the same model and GPUs. Their batches, kernels and
libraries differ too.

"""


def long_cells(model: str, gpu: str, gpus: int, modes: Iterable[str] = MODES) -> dict[str, str]:
    """A cell for each tuning mode; what was found is kept, so that an interrupted table goes on."""
    architecture, config = _scaled(model)
    cells = {}
    for mode in modes:
        about = model, gpu, gpus, mode
        rows = recall("longest rows", *about)
        if rows is None:
            facts = DataFacts.unseen(config, architecture)  # of the length that is tried
            request = Request(config, architecture, facts, what_if(gpu, gpus), gpus)
            rows = list(chain.from_iterable(longest_rows([request], (mode,))))
            remember(rows, "longest rows", *about)
        cells[mode] = _cell(rows)
    return cells


def _scaled(model: str) -> tuple[Architecture, RunConfig]:
    """The architecture with POSITIONS or more, and its default run."""
    positions = position_limit(planning_config(default_run(model).model)[0])
    assert positions
    factor = math.ceil(POSITIONS / positions)
    config = default_run(model, rope_scaling={"rope_type": "yarn", "factor": factor})
    return Architecture.of(planning_config(config.model)[0]), config


def _cell(rows: list[dict[str, Any]]) -> str:
    divided = [row for row in rows if group_of(row) > 1]
    plain, *in_ram = (row for row in rows if row not in divided)
    longer = [f"{row['longest']:,}" for row in in_ram if row["longest"] > (plain["longest"] or 0)]
    if divided:
        farthest = max(divided, key=itemgetter("longest"))
        longer.append(f"groups of {group_of(farthest)}: {_reached(farthest)}")
    return "; ".join([_reached(plain) if plain["longest"] else "-", *longer])


def _reached(row: dict[str, Any]) -> str:
    speed, several = row["tokens_per_second"], row["processes"] > 1
    engine = f" {label_of(row['engine'], row['replicas'])}" if several else ""
    in_ram = " with weights in RAM" if group_of(row) > 1 and row["offload"] == "ram" else ""
    return f"{row['longest']:,}{engine}{in_ram}, {'n/a' if speed is None else f'{speed:,.0f}'}"


def _machine(gpu: str, gpus: int) -> str:
    return f"{gpus} x {gpu}" if gpus > 1 else gpu


def long_section() -> str:
    """The section as Markdown."""
    ours, beside = [], []
    for model in MODELS:
        for gpu, gpus in MACHINES:
            console().print(f"looking for the longest rows of {model} on {_machine(gpu, gpus)}")
            cells = long_cells(model, gpu, gpus)
            ours.append([model.partition("/")[2], _machine(gpu, gpus), *cells.values()])
    for one in PUBLISHED:
        console().print(f"looking for the longest rows beside those of {one.who}")
        here = long_cells(one.model, one.gpu, one.gpus, (one.mode,))[one.mode]
        place = f"{one.model.partition('/')[2]}, {_machine(one.gpu, one.gpus)}"
        beside.append([f"[{one.who}]({one.source})", place, method(one.mode), one.tokens, one.by, here])
    heads = ("", "model and GPUs", "method", "published", "by", "here")
    return f"{HEAD}\n{table(['model', '', *map(method, MODES)], ours)}\n{BESIDE}{table(heads, beside)}\n"


def main() -> None:
    """Writes the section at the end of the page."""
    with quiet_libraries(project_dir() / "cookbook.log"):
        section = long_section()
    page = COOKBOOK.read_text(encoding="utf-8").partition(LONGEST)[0].rstrip("\n")
    COOKBOOK.write_text(f"{page}\n\n{section}", encoding="utf-8")
    console().print(f"wrote {COOKBOOK}", soft_wrap=True)


if __name__ == "__main__":
    main()

"""The form in which measured rows are written down: who measured what, and how the step was run.

A file is a JSON object with

- `source`: `repo`, `commit`, `licence`, `gpu`, `software`, `described` (how the step was run, in words), and
  `settings`: fields of `Run` or `Head` that are the same in all rows;
- `models`: for each name in the rows the `config` (as in a config.json) and the number of `parameters`;
- `rows`: for each measured step its own settings, `model`, what was `measured_mib` and, if the publisher
  predicts memory too, `publisher_mib`. Both have some of the keys `allocated`, `reserved` and `process`
  (peaks of the run); `after_load`, `forward`, `backward`, `optimizer` (peaks by phase) and `after_step` are
  shown where they were measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

ROWS = Path(__file__).parent / "rows"


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a step was run, as far as its memory depends on it."""

    mode: str  # "full", "lora" or "qlora"
    rows: int
    row_tokens: int
    compute_capability: tuple[int, int]
    dtype: str  # of the weights
    target_modules: tuple[str, ...] = ()
    r: int = 16
    use_dora: bool = False
    only_b: bool = False  # LoRA-FA: A is frozen
    attention: str = "sdpa"  # "eager", "sdpa", "repeated" (key and value heads), "masked" (and repeated)
    checkpointing: bool = False
    reentrant: bool = False  # the older kind of checkpointing
    input_gradients: bool = True  # model.enable_input_require_grads() with checkpointing
    warmup: bool = False  # transformers loads onto the GPU, after it has reserved the size of the weights
    clears_cache: bool = False  # of the allocator, after `upcast`: PEFT since 0.20
    upcast: bool = False  # PEFT's prepare_model_for_kbit_training: all that is not 4-bit in fp32
    double_quantization: bool = True
    optimizer: str = "adamw"  # PyTorch's, with foreach; or "adamw8bit"
    clip: bool = False  # gradients
    use_cache: bool = False  # keys and values of the forward pass live as long as its outputs
    outputs_kept_until: str = "step"  # the optimizer has stepped; or "next forward"
    gradients_kept: bool = False  # until the next step begins
    expandable: bool = False  # expandable segments of the allocator


@dataclass(frozen=True, kw_only=True)
class Head:
    """A loss alone, of [tokens, vocabulary] logits, whose inputs have gradients of an earlier round."""

    head: str  # "cross_entropy", or "linear_cross_entropy" of [tokens, hidden] states
    tokens: int
    vocabulary: int
    dtype: str
    compute_capability: tuple[int, int]
    hidden: int = 0


@dataclass(frozen=True)
class Row:
    """A measured step; all sizes in MiB."""

    name: str
    config: PretrainedConfig | None  # None for a loss alone
    run: Run | Head
    measured: dict[str, float]
    publisher: dict[str, float] = field(default_factory=dict)  # what the publisher's own predictor says


@dataclass(frozen=True)
class Source:
    """A file of measured rows."""

    name: str
    about: dict[str, Any]  # its `source`
    rows: tuple[Row, ...]


def read_sources(paths: list[Path]) -> Iterator[Source]:
    """Reads files of the form above.

    Raises:
        KeyError: a row names a model that `models` lacks, or has nothing measured.
        TypeError: a setting is unknown or missing.
    """
    for path in paths:
        tree = json.loads(path.read_text(encoding="utf-8"))
        models = {name: _config(model["config"]) for name, model in tree.get("models", {}).items()}
        about, common = tree["source"], tree["source"].get("settings", {})
        rows = tuple(_row(common | entry, models) for entry in tree["rows"])
        yield Source(path.stem, about, rows)


def _config(tree: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**tree)


def _row(entry: dict[str, Any], models: dict[str, PretrainedConfig]) -> Row:
    entry = dict(entry)
    measured, publisher = entry.pop("measured_mib"), entry.pop("publisher_mib", {})
    if "head" in entry:
        head = Head(**_tuples(entry))
        return Row(f"{head.head} {head.tokens} x {head.vocabulary}", None, head, measured, publisher)
    model, name = entry.pop("model"), entry.pop("name", None)
    entry.pop("trained", None)
    run = Run(**_tuples(entry))
    name = name or " ".join(
        [model.split("/")[-1], run.mode, run.attention, f"{run.rows}x{run.row_tokens}"]
        + ["recomputed"] * run.checkpointing
    )
    return Row(name, models[model], run, measured, publisher)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    """The settings with tuples for lists, so that equal runs can be found."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}

"""The form in which measured rows are written down: who measured what, and how the step was run.

A file is a JSON object with

- `source`: `repo`, `commit`, `licence`, `gpu`, `software`, `described` (how the step was run, in words), and
  `settings`: fields of `Run` or `Head` that are the same in all rows;
- `models`: for each name in the rows the `config` (as in a config.json) and the number of `parameters`;
- `rows`: for each measured step its own settings, `model`, what was `measured_mib` and, if the publisher
  predicts memory too, `publisher_mib`. Both have some of the keys `allocated`, `reserved` and `process`
  (peaks of the run); `after_load`, `forward`, `backward`, `optimizer` (peaks by phase) and `after_step` are
  shown where they were measured. `tokens_per_second` needs the setting `gpu`.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError
from transformers import AutoConfig, PretrainedConfig

from sft_play.errors import ConfigError
from sft_play.machine.gpus import what_if

ROWS = Path(__file__).parent / "rows"
PEAKS, MOMENTS = ("allocated", "reserved", "process"), ("forward", "backward", "optimizer")
MEASURED = (*PEAKS, "after_load", *MOMENTS, "after_step")  # what a row may say
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a step was run, as far as its memory depends on it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    mode: Literal["full", "lora", "qlora"]
    rows: PositiveInt
    row_tokens: PositiveInt
    compute_capability: tuple[int, int]
    dtype: DType  # of the weights
    target_modules: tuple[str, ...] = ()
    r: PositiveInt = 16
    dropout: float = 0.0  # of what goes into the adapters
    use_dora: bool = False
    only_b: bool = False  # LoRA-FA: A is frozen
    # "repeated": key and value heads; "masked": and repeated
    attention: Literal["sdpa", "eager", "repeated", "masked"] = "sdpa"
    autocast: Literal["no", "bf16", "fp16"] = "no"  # by accelerate, which also returns the outputs in fp32
    checkpointing: bool = False
    reentrant: bool = False  # the older kind of checkpointing
    input_gradients: bool = True  # model.enable_input_require_grads() with checkpointing
    warmup: bool = False  # transformers loads onto the GPU, after it has reserved the size of the weights
    clears_cache: bool = False  # of the allocator, after `upcast`: PEFT since 0.20
    upcast: bool = False  # PEFT's prepare_model_for_kbit_training: all that is not 4-bit in fp32
    upcast_norms: bool = False  # of 4-bit models, to fp32, as TRL did until 0.13 after PEFT's preparation
    double_quantization: bool = True
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"  # "adamw" is PyTorch's, with foreach
    # "shifted": the logits in fp32 are copied without the last token, as in transformers 4.48; "fused": by a
    # kernel; "linear": Liger's, which never has all logits
    loss: Literal["stock", "shifted", "fused", "linear"] = "stock"
    fp32_head: bool = False  # its logits are fp32 at once, as before transformers 4.46
    fused_layers: bool = False  # norms and rotations by fms-acceleration's kernels
    clip: bool = False  # gradients
    use_cache: bool = False  # keys and values of the forward pass live as long as its outputs
    # "loss": freed before the backward pass, as Trainer does; "step": the optimizer has stepped
    outputs_kept_until: Literal["loss", "step", "next forward"] = "step"
    gradients_kept: bool = False  # until the next step begins
    expandable: bool = False  # expandable segments of the allocator
    processes: PositiveInt = 1  # with more than one, FSDP1 divides the model among them
    accumulation: PositiveInt = 1  # micro-batches of an optimizer step; counts for tokens per second only
    gpu: str = ""  # its name in configs/hardware.yaml, where tokens per second are predicted


@dataclass(frozen=True, kw_only=True)
class Head:
    """A loss alone, of [tokens, vocabulary] logits, whose inputs have gradients of an earlier round."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    head: Literal["cross_entropy", "linear_cross_entropy"]  # the latter of [tokens, hidden] states
    tokens: PositiveInt
    vocabulary: PositiveInt
    dtype: DType
    compute_capability: tuple[int, int]
    hidden: int = 0


Settings = TypeVar("Settings", Run, Head)


@dataclass(frozen=True)
class Row:
    """A measured step; all sizes in MiB."""

    name: str
    config: PretrainedConfig | None  # None for a loss alone
    run: Run | Head
    measured: dict[str, float]
    publisher: dict[str, float] = field(default_factory=dict)  # what the publisher's own predictor says
    tokens_per_second: float | None = None  # measured


@dataclass(frozen=True)
class Source:
    """A file of measured rows."""

    name: str
    about: dict[str, Any]  # its `source`
    rows: tuple[Row, ...]


def read_sources(paths: list[Path]) -> Iterator[Source]:
    """Reads files of the form above.

    Raises:
        ConfigError: a file is not of this form; names the file, the row and what is wrong with it.
    """
    for path in paths:
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
        try:
            yield Source(path.stem, tree["source"], tuple(_rows(tree)))
        except KeyError as error:
            raise ConfigError(f"{path} lacks {error}; docs/reference/evidence.md has an example") from None
        except (AttributeError, TypeError):
            raise ConfigError(
                f"{path} is not of the form that docs/reference/evidence.md has an example of"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{path}, {error}") from None


def _rows(tree: dict[str, Any]) -> Iterator[Row]:
    """The rows of a file."""
    models = {name: _config(name, model["config"]) for name, model in tree.get("models", {}).items()}
    common = tree["source"].get("settings", {})
    for number, entry in enumerate(tree["rows"], start=1):
        try:
            yield _row(common | entry, models)
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from None


def _config(name: str, tree: dict[str, Any]) -> PretrainedConfig:
    """The architecture of a model, from its config.json.

    Raises:
        ConfigError: transformers does not know it.
    """
    try:
        return AutoConfig.for_model(**tree)
    except (TypeError, ValueError) as error:
        reason = str(error).partition(".")[0]
        raise ConfigError(f"model {name}: its config is not one that transformers takes ({reason})") from None


def _row(entry: dict[str, Any], models: dict[str, PretrainedConfig]) -> Row:
    """A row with what is the same in all rows.

    Raises:
        ConfigError: a setting, a model or what was measured is missing, unknown or not traced.
    """
    entry = dict(entry)
    measured = _sizes("measured_mib", entry.pop("measured_mib", None))
    publisher = _sizes("publisher_mib", entry.pop("publisher_mib", {}))
    if "head" in entry:
        head = _checked(Head, entry)
        return Row(f"{head.head} {head.tokens} x {head.vocabulary}", None, head, measured, publisher)
    model, name = entry.pop("model", None), entry.pop("name", None)
    if model not in models:
        raise ConfigError(f"model {model!r} is not among the file's models ({', '.join(models) or 'none'})")
    entry.pop("trained", None)
    speed = entry.pop("tokens_per_second", None)
    run = _checked(Run, entry)
    if run.processes > 1 and (run.upcast or run.upcast_norms):
        raise ConfigError("rows of several processes are traced without upcast and upcast_norms")
    if run.processes > 1 and (run.fused_layers or run.loss in ("fused", "linear")):
        raise ConfigError("rows of several processes are traced without fused kernels")
    if speed is not None:
        _check_speed(speed, run)
    name = name or " ".join(
        [model.split("/")[-1], run.mode, run.attention, f"{run.rows}x{run.row_tokens}"]
        + ["recomputed"] * run.checkpointing
    )
    return Row(name, models[model], run, measured, publisher, speed)


def _check_speed(speed: Any, run: Run) -> None:
    """Whether a row says how fast a known GPU was.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(speed, int | float) or speed <= 0:
        raise ConfigError(f"tokens_per_second must be a number above 0 (found {speed!r:.80})")
    if not run.gpu:
        raise ConfigError("tokens_per_second needs the setting gpu: a name in configs/hardware.yaml")
    what_if(run.gpu)


def _sizes(name: str, found: Any) -> dict[str, float]:
    """What a row says was measured or predicted, in MiB.

    Raises:
        ConfigError: it is no size, or of something that we do not predict.
    """
    sizes = found if isinstance(found, dict) else {str(found): None}
    wrong = [key for key, size in sizes.items() if key not in MEASURED or not isinstance(size, int | float)]
    if wrong:
        raise ConfigError(f"{name} takes MiB of {', '.join(MEASURED)} (found {wrong[0]:.80})")
    return sizes


def _checked(form: type[Settings], entry: dict[str, Any]) -> Settings:
    """The settings of a row; lists become tuples, so that equal runs can be found.

    Raises:
        ConfigError: one is unknown, missing or has a value that is not allowed.
    """
    try:
        return TypeAdapter(form).validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name, known = str(first["loc"][0]), [each.name for each in fields(form)]
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"{name} is no setting; {hint}")
    if first["type"] in ("missing", "missing_argument") and len(first["loc"]) == 1:
        raise ConfigError(f"the setting {name} is missing")
    reason = first["msg"][0].lower() + first["msg"][1:]
    raise ConfigError(f"{name}: {reason} (found {json.dumps(first['input'], default=str):.80})")

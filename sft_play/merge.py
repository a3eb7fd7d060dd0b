"""LoRA into the base weights, and the proof that the merged model is the adapter model."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sft_play.config.schema import RunConfig
from sft_play.data.prepare import prepare
from sft_play.errors import CheckpointError, ConfigError, NonFiniteError, StorageError
from sft_play.generation import load_chat_tokenizer, stop_token_ids
from sft_play.model import load_base, load_for_inference, load_model_config, load_tokenizer, position_limit
from sft_play.report.progress import spinner
from sft_play.report.tables import logits_table
from sft_play.runlog import RunDir, console, quiet_libraries, read_json
from sft_play.units import format_bytes
from sft_play.weights import finished_weights, release_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("auto", "bfloat16", "float16", "float32")
MAX_SHARD_SIZE = "4GB"
RECORD = "merge.json"  # in the merged folder: what it was made of, and the sign that it may be replaced

TEST_ROWS = 8  # rows whose logits are compared: 8 x 128 positions over a vocabulary of 262,144 are 1 GiB
TEST_TOKENS = 128


@dataclass(frozen=True)
class Tolerance:
    """How far a merged model may be from the adapter model."""

    mean: float
    """Mean absolute difference of the logits, as a share of their standard deviation."""
    top1: float
    """Share of positions at which both name the same next token."""


# What rounding the merged weights leaves, with a factor of about ten for depth. Measured on 8 layers (mean, top-1): float32
# 2e-7, 100 %; float16 3e-4, 99.8 %; bfloat16 2e-3, 99.5 %; an adapter that was left out moved the mean by 2e-2 to 5e-1.
TOLERANCES = {"float32": Tolerance(1e-4, 0.999), "float16": Tolerance(3e-3, 0.98), "bfloat16": Tolerance(2e-2, 0.95)}


def merged_folder(run: RunDir) -> Path:
    """Where the merged model goes if nobody says otherwise."""
    return run.path / "merged"


def _adapter_of(config: RunConfig, run: RunDir) -> Path:
    if config.tuning.mode == "full":
        raise ConfigError(
            f"there is nothing to merge: tuning.mode=full has no adapter, the run's weights are whole in {run.model}. "
            "`make infer` and `make eval` use them as they are"
        )
    return finished_weights(config, run)


def _digest(adapter: Path) -> str:
    return hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


def _published_dtype(config: RunConfig) -> str:
    """The dtype that the base was published in ("bfloat16"); float32 if its config does not say."""
    dtype = str(load_model_config(config.model).dtype or torch.float32).removeprefix("torch.")
    return dtype if dtype in DTYPES else "bfloat16"


def _merged_model(config: RunConfig, adapter: Path, dtype: str) -> "PreTrainedModel":
    """The un-quantised base with the adapter added into its weights, in main memory.

    A base published in 32 bit is merged in 32 bit and rounded once afterwards.
    """
    from peft import PeftModel

    published = _published_dtype(config)
    base = load_base(
        config.model,
        dtype="float32" if published == "float32" else dtype,
        attn_implementation="eager",  # nothing is computed with it
        device=torch.device("cpu"),
        quantize=False,
    )
    if getattr(base.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.name: the weights of '{config.model.name}' are themselves quantised, and an adapter cannot be merged into "
            "those. Set model.name to the 16-bit model that they were made from"
        )
    try:
        model = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise NonFiniteError(
            f"{adapter} cannot be merged: {str(error).splitlines()[0]}. Train again from a good checkpoint"
        ) from error
    model.to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(f"merged weight {name} is too large for {dtype}; merge with DTYPE=bfloat16 or DTYPE=float32")
    return model


def _require_replaceable(output: Path) -> None:
    if output.exists() and not (output.is_dir() and ((output / RECORD).is_file() or not any(output.iterdir()))):
        raise ConfigError(
            f"{output} exists and was not written by `make merge` (it has no {RECORD}), so it is not overwritten. "
            "Choose another folder with OUT=<folder>, or remove it"
        )


@contextlib.contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `output` when all of it is there.

    Raises:
        StorageError: it cannot be written.
    """
    building, earlier = (output.with_name(f".{output.name}.{word}") for word in ("merging", "earlier"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (building, earlier):
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir()
        yield building
        if output.exists():
            output.rename(earlier)
        building.rename(output)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}. Free space, or choose OUT=<folder>") from error
    finally:
        for leftover in (building, earlier):
            shutil.rmtree(leftover, ignore_errors=True)


def _require_space(model: "PreTrainedModel", output: Path) -> int:
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise StorageError(
            f"the merged model needs {format_bytes(needed)} and {folder} has {format_bytes(free)} free. "
            "Free space, choose OUT=<folder>, or a 16-bit DTYPE"
        )
    return needed


def merge(
    config: RunConfig, run: RunDir, output: Path | None = None, dtype: str = "auto", *, max_shard_size: str = MAX_SHARD_SIZE
) -> dict[str, Any]:
    """Adds the run's adapter to the un-quantised base and saves a model of its own, tokenizer and stop tokens included.

    Args:
        config: of the run; after QLoRA the 16-bit base is loaded all the same, never the 4-bit one.
        run: whose adapter is merged.
        output: folder; default `<run>/merged`. Only an earlier merge is replaced, and only when the new one is whole.
        dtype: of the saved weights; auto is what the base was published in.
        max_shard_size: of one safetensors file.

    Raises:
        ConfigError: there is nothing to merge, or `output` is something else.
        CheckpointError: the run has no whole adapter.
        StorageError: the disk is too full.
        NonFiniteError: a merged weight is not finite.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"DTYPE={dtype}: allowed are {', '.join(DTYPES)}")
    adapter = _adapter_of(config, run)
    output = output or merged_folder(run)
    _require_replaceable(output)
    dtype = _published_dtype(config) if dtype == "auto" else dtype
    with quiet_libraries(run.log), spinner(f"merging {adapter} into {config.model.name}"):
        model = _merged_model(config, adapter, dtype)
        size = _require_space(model, output)
        tokenizer = load_chat_tokenizer(config)
        model.generation_config.eos_token_id = stop_token_ids(model, tokenizer)
        record = {"base": config.model.name, "adapter": str(adapter), "adapter_sha256": _digest(adapter), "dtype": dtype}
        with _replacing(output) as folder:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(folder)
            run.write_json(folder / RECORD, record)
    files = len(list(output.glob("*.safetensors")))
    size_text = f"{dtype}, {format_bytes(size)} in {files} file{'' if files == 1 else 's'}"
    console().print(f"merged {adapter} into {config.model.name}: {output} ({size_text})", markup=False, soft_wrap=True)
    console().print("`make merge-test` compares it with the adapter model", style="dim")
    return {**record, "output": str(output), "bytes": size, "files": files}


@dataclass(frozen=True)
class LogitDifference:
    """Two models on the same tokens."""

    max_abs: float
    mean_abs: float
    relative_mean: float
    """mean_abs as a share of the reference's standard deviation."""
    top1: float
    positions: int


def row_logits(model: Any, rows: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """The logits of each row, [tokens, vocabulary], one row at a time and without padding."""
    for row in rows:
        with torch.inference_mode():
            yield model(input_ids=torch.tensor([row], device=model.device)).logits[0].float().cpu()


def compare_logits(reference: Sequence[torch.Tensor], others: Iterator[torch.Tensor]) -> LogitDifference:
    """How far `others` are from `reference`, over all positions of all rows."""
    largest = absolute = total = squares = 0.0
    agree = positions = count = 0
    for one, other in zip(reference, others, strict=True):
        difference = (one - other).abs()
        largest = max(largest, float(difference.max()))
        absolute += float(difference.sum(dtype=torch.float64))
        total += float(one.sum(dtype=torch.float64))
        squares += float(one.square().sum(dtype=torch.float64))
        agree += int((one.argmax(-1) == other.argmax(-1)).sum())
        positions += one.shape[0]
        count += one.numel()
    deviation = max(squares / count - (total / count) ** 2, 1e-12) ** 0.5
    return LogitDifference(largest, absolute / count, absolute / count / deviation, agree / positions, positions)


def _require_merged(output: Path, adapter: Path) -> str:
    """The dtype of a merged model that was made of this adapter."""
    record = read_json(output / RECORD)
    if not record:
        raise CheckpointError(f"{output} holds no merged model ({RECORD} is missing); run `make merge` first")
    if record["adapter_sha256"] != _digest(adapter):
        raise CheckpointError(f"{output} was merged from an earlier adapter than {adapter}; run `make merge` again")
    return record["dtype"]


def _test_rows(config: RunConfig) -> list[list[int]]:
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, model_limit=position_limit(load_model_config(config.model)))
    rows = data.val if data.val is not None else data.train
    assert rows is not None
    return [ids[:TEST_TOKENS] for ids in rows.select(range(min(TEST_ROWS, len(rows))))["input_ids"]]


def _measure(config: RunConfig, adapter: Path, output: Path, dtype: str, rows: list[list[int]]) -> dict[str, LogitDifference]:
    """Merged, base and (after QLoRA) 4-bit adapter model, each against the adapter on the un-quantised base."""
    model: Any = load_for_inference(config, adapter, dtype=dtype, quantize=False)
    reference = list(row_logits(model, rows))
    with model.disable_adapter():
        measured = {"base": compare_logits(reference, row_logits(model, rows))}
    del model
    release_memory()
    model = load_for_inference(config, output, dtype=dtype)
    measured["merged"] = compare_logits(reference, row_logits(model, rows))
    del model
    release_memory()
    if config.tuning.mode == "qlora":
        model = load_for_inference(config, adapter, dtype=dtype, quantize=True)
        measured["adapter_on_4bit"] = compare_logits(reference, row_logits(model, rows))
        del model
        release_memory()
    return measured


def failures(measured: dict[str, LogitDifference], tolerance: Tolerance) -> list[str]:
    """In which respects the merged model is not the adapter model; [] when it is."""
    merged, base = measured["merged"], measured["base"]
    found = []
    if not merged.relative_mean <= tolerance.mean:  # NaN fails too
        found.append(
            f"mean difference {merged.relative_mean:.1e} of the logits' deviation, at most {tolerance.mean:.0e} allowed"
        )
    if not merged.top1 >= tolerance.top1:
        found.append(f"same next token at {merged.top1:.1%} of positions, at least {tolerance.top1:.1%} needed")
    if merged.mean_abs > base.mean_abs / 2:
        found.append(
            f"mean difference {merged.mean_abs:.1e} is over half of what the adapter changes ({base.mean_abs:.1e}): rounding "
            "drowns it, or it is not in there; merge with DTYPE=float32"
        )
    return found


def merge_test(config: RunConfig, run: RunDir, output: Path | None = None) -> dict[str, Any]:
    """Loads the merged model and compares its logits with the adapter model's on rows of the validation split.

    The reference is the adapter on the un-quantised base, which is what was merged, in the dtype of the merged weights. After
    QLoRA the adapter was trained on the 4-bit base; how far that one is away is told as information and fails nothing.

    Raises:
        CheckpointError: nothing was merged, or the merged model differs by more than the tolerance.
    """
    adapter = _adapter_of(config, run)
    output = output or merged_folder(run)
    dtype = _require_merged(output, adapter)
    with quiet_libraries(run.log):
        rows = _test_rows(config)
        with spinner("comparing logits"):
            measured = _measure(config, adapter, output, dtype, rows)
    tolerance = TOLERANCES[dtype]
    failed = failures(measured, tolerance)
    result = {
        "passed": not failed,
        "dtype": dtype,
        "rows": len(rows),
        "tolerance": asdict(tolerance),
        **{name: asdict(difference) for name, difference in measured.items()},
    }
    console().print(logits_table(result))
    if failed:
        raise CheckpointError(f"{output} is not the adapter model: {'; '.join(failed)}")
    return result

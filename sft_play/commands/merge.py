"""Merges LoRA adapters into the base weights, and tests that the merged model matches the adapter model."""

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from sft_play.commands.output import replacing_output, require_overwritable, require_space
from sft_play.config.inputs import asked_name
from sft_play.config.schema import RunConfig
from sft_play.engines.stored import looking_as_used
from sft_play.errors import CheckpointError, ConfigError, StorageError
from sft_play.files import flush_to_disk
from sft_play.machine.host import own_ram_bytes
from sft_play.model.adapters.attach import load_adapter, require_fitting
from sft_play.model.build import can_be_cast_later, load_base, load_for_inference
from sft_play.model.generation import load_chat_tokenizer, say_stops
from sft_play.model.load import empty_base, load_data, published_dtype, saved_dtype
from sft_play.model.weights.files import copy_processors, stored_types
from sft_play.model.weights.finished import finished_weights, release_memory, require_undamaged
from sft_play.model.weights.merged import merge_when_saved
from sft_play.report.card import write_card
from sft_play.report.layout import ending
from sft_play.report.tables import LogitDifference, Tolerance, logits_table
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import make, var
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import spinner
from sft_play.units import SHORT_NAMES, counted, format_bytes
from sft_play.vision.prompts import NO_PICTURES, Pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SHARD_BYTES = 4 * 10**9  # of a file
MERGE_INFO = "merge.json"  # in the merged folder: what was merged; a folder with it may be overwritten

TEST_ROWS = 8  # rows whose logits are compared: 8 x 128 positions over a vocabulary of 262,144 are 1 GiB
TEST_TOKENS = 128


# About ten times the error of rounding the merged weights, to allow for deeper models. Measured on 8 layers
# (mean, top-1): float32 2e-7, 100%; float16 3e-4, 99.8%; bfloat16 2e-3, 99.5%. With the adapter missing,
# the mean is 2e-2 to 5e-1.
TOLERANCES = {
    "float32": Tolerance(1e-4, 0.999),
    "float16": Tolerance(3e-3, 0.98),
    "bfloat16": Tolerance(2e-2, 0.95),
}


def _adapter_of(config: RunConfig, run: RunDir) -> Path:
    if config.tuning.mode == "full":
        use = [make(target, RUN=shlex.quote(run.typed)) for target in ("infer", "eval")]
        raise ConfigError(
            "there is nothing to merge: tuning.mode=full has no adapter, and the full weights are in "
            f"{run.model}. Use them directly with `{use[0]}` and `{use[1]}`"
        )
    return finished_weights(config, run)


def digest(adapter: Path) -> str:
    """SHA-256 of the weights of an adapter."""
    with (adapter / "adapter_model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _merged_model(config: RunConfig, adapter: Path, dtype: str) -> tuple["PreTrainedModel", int]:
    """The unquantized base with the adapter on the CPU, as `merge_when_saved` gives it, with bytes.

    A base that was published in float32 is merged in float32 and rounded once afterwards.
    """
    published = published_dtype(config.model)
    used = "float32" if published == "float32" else dtype
    # if not all weights have the type that config.json says, loading rounds to it
    as_said = used != published and set(stored_types(config.model)) == {SHORT_NAMES[published].upper()}
    require_fitting(empty_base(config.model), adapter)
    base = load_base(
        config.model,
        dtype=used,
        attn_implementation="eager",  # not used for a forward pass
        device=torch.device("cpu"),
        quantize=False,
        as_stored=as_said and can_be_cast_later(config, used),
    )
    if getattr(base.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.name: the weights of '{config.model.name}' are quantized, and an adapter cannot be "
            "merged into them. Set model.name to the 16-bit model they were quantized from"
        )
    with looking_as_used(base):
        adapted = load_adapter(base, adapter)
    return merge_when_saved(adapted, getattr(torch, dtype), adapter)


def _require_written(file: Path) -> None:
    """Waits until the file is on the disk, and checks that it is whole: its end may be lost silently."""
    flush_to_disk(file)
    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt"):
                return
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise StorageError(
            f"{file.name} was not written completely ({error}); is the disk full? Set {var(OUT='<folder>')}"
        ) from error


def merge(
    config: RunConfig,
    run: RunDir,
    output: Path | None = None,
    dtype: str = "auto",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, object]:
    """Merges the adapter of a run into the unquantized base; saves a standalone model with its tokenizer.

    Even after QLoRA, the base is loaded in 16 bit and never in 4 bit. An earlier merge in `output` (default:
    `<run>/merged`) is overwritten once the new one is complete. The dtype auto is output.dtype.

    Raises:
        ConfigError: there is nothing to merge, or `output` has other content.
        CheckpointError: the run has no complete adapter.
        StorageError: there is not enough disk space.
        NonFiniteError: a merged weight is not finite.
    """
    adapter = _adapter_of(config, run)
    output = output or run.merged
    require_overwritable(output, MERGE_INFO, "merge")
    dtype = saved_dtype(config) if dtype == "auto" else dtype
    with quiet_libraries(run.log), spinner("loading, merging and saving"):
        model, copies = _merged_model(config, adapter, dtype)
        sizes = [parameter.nbytes for parameter in model.parameters()]
        size = sum(sizes)
        ram = own_ram_bytes() + copies + max(*sizes, min(size, max_shard_bytes))
        console().print(f"  needs about {format_bytes(ram)} of RAM")
        require_space(output, size, "the merged model")
        tokenizer = load_chat_tokenizer(config)
        say_stops(model, tokenizer)
        info = {
            "base": asked_name(config.model.name),
            "adapter": str(adapter),
            "adapter_sha256": digest(adapter),
            "dtype": dtype,
        }
        with replacing_output(output) as folder:
            model.save_pretrained(folder, max_shard_size=max_shard_bytes)
            tokenizer.save_pretrained(folder)
            copy_processors(config.model, model.config, folder)
            run.write_json(folder / MERGE_INFO, info)
            for file in folder.iterdir():
                _require_written(file)
            write_card(config, run, folder, merged=True)
    files = len(list(output.glob("*.safetensors")))
    size_text = f"{dtype}, {format_bytes(size)} in {counted(files, 'file')}"
    console().print(f"merged: {size_text}", style="bold")
    console().print(ending({"base": info["base"], "adapter": adapter, "merged": output}, []))
    return {**info, "output": str(output), "bytes": size, "ram_bytes": ram, "files": files}


def row_logits(model: Any, rows: Sequence[Sequence[int]], pictures: Pictures = NO_PICTURES) -> torch.Tensor:
    """The logits of rows without padding, float32 [positions, vocabulary], on the CPU.

    They are those of all positions; of a row with pictures, of the last TEST_TOKENS.
    """
    found = []
    for index, row in enumerate(rows):
        ids = torch.tensor([row], device=model.device)
        seen = pictures.of([index]).inputs(ids)
        kept = {"logits_to_keep": TEST_TOKENS} if seen else {}
        with torch.inference_mode():
            found.append(model(input_ids=ids, **seen, **kept).logits[0].float().cpu())
    return torch.cat(found)


def compare_logits(reference: torch.Tensor, other: torch.Tensor) -> LogitDifference:
    """Compares logits over all positions, [positions, vocabulary]."""
    difference = (reference - other).abs()
    mean = float(difference.mean(dtype=torch.float64))
    return LogitDifference(
        max_abs=float(difference.max()),
        mean_abs=mean,
        relative_mean=mean / max(float(reference.std(correction=0)), 1e-6),
        top1=float((reference.argmax(-1) == other.argmax(-1)).double().mean()),
        positions=len(reference),
    )


def require_merged(run: RunDir, adapter: Path, output: Path | None = None) -> str:
    """The dtype of the merged model; CheckpointError if it is damaged or not of this adapter."""
    elsewhere = {}
    if output:
        elsewhere["OUT"] = shlex.quote(str(output))
    command, output = make("merge", RUN=shlex.quote(run.typed), **elsewhere), output or run.merged
    info = read_json(output / MERGE_INFO)
    if not info:
        raise CheckpointError(f"{output} has no merged model yet; run `{command}` first")
    if info.get("adapter_sha256") != digest(adapter):
        origin, own = info.get("adapter", str(adapter)), str(adapter)
        source = f"another version of {own}" if origin == own else f"{origin}, not from {own}"
        raise CheckpointError(f"{output} was merged from {source}; run `{command}` again")
    require_undamaged(output, f"run `{command}` again")
    return info["dtype"]


def merged_folder(config: RunConfig, run: RunDir, weights: Path) -> Path:
    """The folder of the merged model, for WHAT=merged.

    Raises:
        ConfigError: there is none after full fine-tuning.
        CheckpointError: it was not merged from these weights, or it is damaged.
    """
    if config.tuning.mode == "full":
        raise ConfigError(
            f"{var(WHAT='merged')}: after full fine-tuning there is nothing to merge; leave "
            f"{var(WHAT=None)} out"
        )
    require_merged(run, weights)
    return run.merged


def _measure(
    config: RunConfig, adapter: Path, output: Path, dtype: str, rows: list[list[int]], pictures: Pictures
) -> dict[str, LogitDifference]:
    """Compares merged, base and (QLoRA) 4-bit adapter model with the adapter on the unquantized base."""
    model: Any = load_for_inference(config, adapter, dtype=dtype, quantize=False)
    reference = row_logits(model, rows, pictures)
    with model.disable_adapter():
        measured = {"base": compare_logits(reference, row_logits(model, rows, pictures))}
    others: dict[str, tuple[Path, bool | None]] = {"merged": (output, None)}
    if config.tuning.mode == "qlora":
        others["adapter_on_4bit"] = adapter, True
    for name, (weights, quantize) in others.items():
        del model  # never two in memory
        release_memory()
        model = load_for_inference(config, weights, dtype=dtype, quantize=quantize)
        measured[name] = compare_logits(reference, row_logits(model, rows, pictures))
    return measured


def failures(measured: dict[str, LogitDifference], tolerance: Tolerance) -> list[str]:
    """Why the merged model does not match the adapter model; [] if it does."""
    merged, base = measured["merged"], measured["base"]
    found = []
    if not merged.relative_mean <= tolerance.mean:  # NaN fails too
        found.append(
            f"the mean difference is {merged.relative_mean:.1e} of the standard deviation of the logits "
            f"(allowed: {tolerance.mean:.0e})"
        )
    if not merged.top1 >= tolerance.top1:
        found.append(
            f"the top-1 token agrees at {merged.top1:.1%} of positions (required: {tolerance.top1:.1%})"
        )
    if merged.mean_abs > base.mean_abs / 2:
        found.append(
            f"the mean difference {merged.mean_abs:.1e} is more than half of what the adapter changes "
            f"({base.mean_abs:.1e}): it is missing or lost to rounding; merge with {var(DTYPE='float32')}"
        )
    return found


def merge_test(config: RunConfig, run: RunDir, output: Path | None = None) -> dict[str, object]:
    """Compares the logits of the merged model with those of the adapter model on validation rows.

    The reference is the adapter on the unquantized base, which is what was merged, in the dtype of the merged
    weights. A QLoRA adapter was trained on the 4-bit base; the difference from that is reported, but never
    fails.

    Raises:
        CheckpointError: there is no merged model, or it differs by more than the tolerance.
    """
    adapter = _adapter_of(config, run)
    dtype = require_merged(run, adapter, output)
    output = output or run.merged
    with quiet_libraries(run.log):
        data = load_data(config, started=True).rows
        held_out = data.val if data.val is not None else data.train
        first = held_out.select(range(min(TEST_ROWS, len(held_out))))
        pictures = Pictures.in_rows(data.recipe, first, data.cache_path)
        rows = pictures.cut(first["input_ids"], TEST_TOKENS)
        with spinner("comparing logits"):
            measured = _measure(config, adapter, output, dtype, rows, pictures)
    tolerance = TOLERANCES[dtype]
    failed = failures(measured, tolerance)
    console().print(logits_table(measured, tolerance, dtype, len(rows), passed=not failed))
    if failed:
        raise CheckpointError(f"{output} does not match the adapter model: {'; '.join(failed)}")
    return {
        "passed": not failed,
        "dtype": dtype,
        "rows": len(rows),
        "tolerance": asdict(tolerance),
        **{name: asdict(difference) for name, difference in measured.items()},
    }

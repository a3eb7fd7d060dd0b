"""Tells what a library cannot do, with some architecture or setting, from a bug of our own."""

import contextlib
import os
import re
import traceback
from importlib.metadata import requires
from operator import attrgetter
from pathlib import Path

from packaging.requirements import Requirement

from sft_play.cache import project_dir
from sft_play.choices.optimizers import DEFAULT
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import distributed_engines
from sft_play.errors import ConfigError, first_line
from sft_play.fingerprints import installed_versions
from sft_play.machine.allocator import has_expandable_segments
from sft_play.secrets import redact
from sft_play.spelling import make

OURS = str(Path(__file__).parent)
OF_A_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(transformers|peft|trl|accelerate|bitsandbytes|deepspeed)/(.*)|"
    r"/(transformers_modules)/(.*)"
)
# Of PyTorch's calls that map memory: pytorch #192330, unsloth #1446
OF_THE_DRIVER = re.compile("CUDA driver error: (?!out of memory)")
TORCH_LOGS_READER = "/torch/_logging/_internal.py"
OF_OTHERS = re.compile(r"/(?:site|dist)-packages/|/transformers_modules/|/lib/python3|^<")
MODEL_TYPE = re.compile(r"^models/(\w+)/")
# Settings that may avoid what failed in these libraries.
CHANGES = {
    "model.attention": ("eager", {"transformers", "transformers_modules"}),
    "train.padding_free": ("false", {"transformers", "transformers_modules", "trl"}),
    "train.gradient_checkpointing": ("false", {"transformers", "transformers_modules", "peft"}),
    "tuning.lora.use_dora": ("false", {"peft", "bitsandbytes"}),
    "tuning.mode": ("lora", {"bitsandbytes"}),
    "train.optimizer": (DEFAULT, {"bitsandbytes", "deepspeed"}),
    "parallel.engine": (distributed_engines()[0].name, {"deepspeed", "accelerate"}),
}


def library_failure(error: BaseException, config: RunConfig | None) -> ConfigError | None:
    """The error that names the library, model and settings; None if no library raised it.

    A library did if one of its functions is on the stack below the last one of ours, and the error was raised
    there or in what it calls of other libraries. The traceback is kept in a file.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in _needed():
        return ConfigError(f"the package {error.name} is not installed; run `{make('install')}`")
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith(TORCH_LOGS_READER):
        value = os.environ.get("TORCH_LOGS")
        return ConfigError(f"TORCH_LOGS={value}: PyTorch does not know this setting; unset TORCH_LOGS")
    if OF_THE_DRIVER.match(str(error)) and has_expandable_segments():
        return ConfigError(
            f"{first_line(error)}\nThe drivers of some virtual GPUs and of Jetson boards cannot "
            "make memory segments grow. If every run ends so, set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the environment: plans count with that"
        )
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(OURS)]
    below = frames[ours[-1] + 1 :] if ours else []
    found = [(frame, match) for frame in below if (match := OF_A_LIBRARY.search(frame.filename))]
    if not found or not OF_OTHERS.search(frames[-1].filename):
        return None
    frame, match = found[-1]
    library, file = match[1] or match[3], match[2] or match[4]
    known = installed_versions([library]) if library else {}
    name = f"{library} {known[library]}" if known else "the model's own code"
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    advice = _settings(config, library, MODEL_TYPE.match(file)) if config else []
    if frame.name == "<module>":
        advice = [f"It could not be imported; run `{make('install')}`"]
    lines = [
        f"{name} failed in {file}, line {frame.lineno}, {frame.name}",
        f"{type(error).__name__}: {reason}",
        *advice,
        f"If this should work, please report it with the traceback in {_kept(error)}",
    ]
    return ConfigError("\n".join(lines))


def _needed() -> set[str]:
    """The packages without which SFT-Play does not work."""
    wanted = map(Requirement, requires("sft-play") or ())
    return {each.name.replace("-", "_") for each in wanted if not each.marker}


def _settings(config: RunConfig, library: str, kind: re.Match[str] | None) -> list[str]:
    """The model and the settings that matter to the library, and what to change."""
    model = f"model.name={config.model.name}" + (f" (model type {kind[1]})" if kind else "")
    in_use, changes = [model], []
    for key, (value, libraries) in CHANGES.items():
        if library in libraries:
            used = str(attrgetter(key)(config)).lower()
            in_use.append(f"{key}={used}")
            if used != value:
                changes.append(f"{key}={value}")
    advice = f"One of these may avoid it: {', '.join(changes)}" if changes else "Another model may work"
    return [f"in use: {', '.join(in_use)}", f"The library may not support this combination. {advice}"]


def _kept(error: BaseException) -> Path:
    path = project_dir() / "traceback.txt"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(redact("".join(traceback.format_exception(error))), encoding="utf-8")
    return path

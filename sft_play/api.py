"""For scripts and notebooks: plan, train and load, as the commands do it.

    import sft_play.api as sft

    sft.plan("qwen3-8b", gpu="RTX 4090")
    run = sft.train("my.yaml", settings={"train.epochs": 1})
    run = sft.train(model="Qwen/Qwen3-0.6B", data=rows, mode="lora", max_steps=100)
    sft.load("my").summary["train_loss"]

Importing this module imports neither torch nor transformers.
"""

import html
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from sft_play.commands import handlers  # noqa: F401 - it declares the commands
from sft_play.commands.command_line import arguments, importing
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.given import by_name, write_given
from sft_play.launch.environment import set_environment
from sft_play.runlog import RunDir, read_json, read_metrics
from sft_play.ui.screen import Screen
from sft_play.upstream.patching import undone

Settings = Mapping[str, Any]  # by dotted name: {"train.learning_rate": 1e-4}
IN_A_NOTEBOOK = '<pre style="font-family: monospace; line-height: 1.2; white-space: pre">{code}</pre>'
WIDTH = 110  # characters of a plan in a notebook


@dataclass(frozen=True)
class Planned:
    """A plan for one machine, or those for each of the common GPUs; a notebook shows it as a table."""

    tree: dict[str, Any]  # what `sft-play plan --json` prints; bytes are integers
    shown: RenderableType = field(repr=False)

    @property
    def plan(self) -> dict[str, Any]:
        """micro_batch_size, gradient_accumulation_steps, tokens_per_second and so on; {} of several GPUs."""
        return self.tree.get("plan", {})

    @property
    def memory(self) -> dict[str, Any]:
        """budget_bytes, peak_bytes and what they are made of; {} of several GPUs."""
        return self.tree.get("memory", {})

    @property
    def command(self) -> str:
        """What trains by this plan; "" of several GPUs."""
        return self.tree.get("command", "")

    def __str__(self) -> str:
        return self._recorded().export_text()

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=IN_A_NOTEBOOK)

    def _recorded(self) -> Screen:
        screen = Screen(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
        screen.print(self.shown)
        return screen


@dataclass(frozen=True)
class Run:
    """A run directory; a notebook shows its report. What is not there is empty."""

    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: status, train_loss, eval before and after, tokens_per_second and so on."""
        return read_json(RunDir(self.path).summary)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl: one object a logging step, e.g. for `pandas.DataFrame(run.metrics)`."""
        return read_metrics(RunDir(self.path))

    @property
    def weights(self) -> Path:
        """The folder of the adapter or the model, for `from_pretrained`; CheckpointError if there is none."""
        from sft_play.model.weights import finished_weights

        run = RunDir(self.path)
        return finished_weights(load_config(run.config).config, run)

    def _repr_html_(self) -> str:
        from sft_play.report.html import render
        from sft_play.report.run_page import run_page
        from sft_play.report.sound import read_sound

        page = html.escape(render(run_page(read_sound(self.path))))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 600px; border: 0"></iframe>'


def plan(
    model: str | None = None,
    *,
    config: str | Path | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    data: object = None,
    settings: Settings | None = None,
    **keywords: Any,
) -> Planned:
    """Chooses a plan and predicts its memory and speed, as `sft-play plan` does; trains nothing.

    Args:
        model: a name such as "qwen3-8b" or "Qwen/Qwen3-8B", or a folder with a config.json.
        config: a YAML file; needed without a model, and optional with one.
        gpu: a GPU that need not be here, e.g. "RTX 4090". Without it, a model is planned on each common GPU,
            and a config for this machine.
        gpus: how many; by default those that are here, or the fewest of `gpu` that fit.
        data: training rows, as `train` takes them; then the model is a name of the Hub or a folder.
        settings: settings to override, by dotted name.
        **keywords: the same, as in `train`.

    Raises:
        ConfigError: neither a config nor a model is given, or a value is wrong.
        DataError: the data of the config cannot be used.
        DoesNotFitError: nothing fits; the message says which changes would.
    """
    with undone():
        set_environment()
        changed = {**by_name(keywords), **_checked(settings)}
        if data is not None:
            changed = {"model.name": model, **changed} if model else changed
            config, changed, model = _with_rows(config, changed, data), {}, None
        args = arguments("plan", _overrides(changed), model=model, config=config, gpu=gpu, gpus=gpus)
        with importing():
            from sft_play.commands.plan import plan_command
        return Planned(*plan_command(args))


def train(
    config: str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: object = None,
    settings: Settings | None = None,
    processes: int = 1,
    engine: str | None = None,
    resume: bool = False,
    **keywords: Any,
) -> Run:
    """Plans and trains a run to its end, as `sft-play train` does, with its progress on standard output.

    Args:
        config: a YAML file, e.g. "configs/demo.yaml", which comes with the package; not needed with `data`.
        model: model.name, a name of the Hub or a folder.
        data: training rows: a list of dicts, a datasets.Dataset, or a path. Rows are written to the folder of
            the run, `<output_dir>/<output_name>/.given`, with a config of these arguments.
        settings: settings to override, by dotted name.
        **keywords: the same by the last part of its name, `max_steps=100`, or with its section where several
            end so, `eval_limit=20`.
        processes: of this machine; 0 for one on each visible GPU.
        engine: how several processes share the work; by default parallel.engine.
        resume: goes on from the latest checkpoint.

    Raises:
        SftPlayError: the subclass says what kind of error, as the exit codes of `sft-play` do.
    """
    changed = {**({"model.name": str(model)} if model else {}), **by_name(keywords), **_checked(settings)}
    if data is not None:
        config, changed = _with_rows(config, changed, data), {}
    if config is None:
        raise ConfigError("nothing to train; give a config, or a model and data=<rows or a path>")
    flags = dict(config=config, processes=processes, engine=engine, resume=resume)
    args = arguments("train", _overrides(changed), **flags)
    with undone():
        set_environment()
        args.run()
    output = load_config(args.config, args.overrides).config.output
    return Run(Path(output.dir) / output.name)


def load(run: str | Path, *, runs: str | Path = "runs") -> Run:
    """A run that was trained, or is being trained, by its name in the folder `runs` or by its path.

    Raises:
        CheckpointError: there is no such run.
    """
    from sft_play.report.record import find_run, read_run

    path = find_run(str(run), Path(runs))
    read_run(path)
    return Run(path)


def _with_rows(config: str | Path | None, changed: Settings, data: object) -> Path:
    """The config of a run with `data` in place of the training rows, and `changed` settings."""
    overrides = _overrides(changed)  # which refuses what no file can have
    if config is None and "model.name" not in changed:
        raise ConfigError("model: without a config, expected a model's name or folder")
    name, folder = changed.get("output.name", "run"), changed.get("output.dir", "runs")
    if config is not None:
        output = load_config(config, overrides).config.output
        name, folder = output.name, output.dir
    return write_given(changed, data, Path(folder) / str(name), config)


def _checked(settings: Settings | None) -> Settings:
    """The settings; ConfigError if they are no mapping."""
    if not isinstance(settings or {}, Mapping):
        raise ConfigError(
            f"settings: expected a dict by dotted name, such as {{'train.epochs': 2}} "
            f"(found a {type(settings).__name__})"
        )
    return settings or {}


def _overrides(settings: Settings) -> list[str]:
    """Settings as they are typed: `{"train.epochs": 2}` is "train.epochs=2".

    Raises:
        ConfigError: a value is not one that a YAML file could have.
    """
    return [f"{name}={_typed(name, value)}" for name, value in settings.items()]


def _typed(name: object, value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, default=os.fspath)
    except (TypeError, ValueError):
        raise ConfigError(
            f"settings: {name} is of type {type(value).__name__}; expected a number, a string, a path, "
            "a bool, None, or a list or dict of these"
        ) from None

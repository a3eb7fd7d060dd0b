"""For scripts and notebooks: plan, train and load, as the commands do it.

    import sft_play.api as sft

    sft.plan("qwen3-8b", gpu="RTX 4090")
    run = sft.train("my.yaml", settings={"train.epochs": 1})
    run = sft.train(model="Qwen/Qwen3-0.6B", data=rows, mode="lora", max_steps=100)
    run.before.metrics["exact_match"], run.after.metrics["exact_match"]
    sft.evaluate(sft.load("my"), metrics=["exact_match", my_function]).models

Importing this module imports neither torch nor transformers.
"""

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.commands import handlers  # noqa: F401 - it declares the commands
from sft_play.commands.command_line import arguments, importing
from sft_play.config.load import load_config
from sft_play.errors import ConfigError, kind_of
from sft_play.given import by_name, kept_if_begun, with_names, write_given
from sft_play.hooks import Hooks, Listener
from sft_play.launch.environment import set_environment
from sft_play.results import Evaluation, Planned, Run, Scores, answers_of
from sft_play.rows.calls import history_text
from sft_play.runlog import RunDir, read_json
from sft_play.spelling import in_python
from sft_play.upstream.patching import undone

Settings = Mapping[str, Any]  # by dotted name: {"train.learning_rate": 1e-4}
_BUSY = threading.RLock()  # while a call changes libraries, which all threads share


@contextmanager
def _alone() -> Iterator[None]:
    """ConfigError if another thread is within a block of this; the same one may be, as in a callback."""
    if not _BUSY.acquire(blocking=False):
        raise ConfigError(
            "another thread of this process plans, trains or evaluates; wait for it, or use another process"
        )
    try:
        yield
    finally:
        _BUSY.release()


@_alone()
def plan(
    model: str | None = None,
    *,
    config: str | Path | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    data: object = None,
    settings: Settings | None = None,
    callbacks: Sequence[Any] = (),
    progress: Listener | None = None,
    **keywords: object,
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
        callbacks: taken so that `train` and `plan` have the same arguments; they change no plan.
        progress: likewise.
        **keywords: settings, as in `train`.

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
        with in_python(), kept_if_begun(config):
            planned = plan_command(args)
        if not planned.tree["complete"]:
            raise KeyboardInterrupt
        return planned


@_alone()
def train(
    config: str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: object = None,
    settings: Settings | None = None,
    processes: int = 1,
    engine: str | None = None,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    progress: Listener | None = None,
    **keywords: object,
) -> Run:
    """Plans and trains a run to its end, as `sft-play train` does, with its progress on standard output.

    Args:
        config: a YAML file, e.g. "configs/demo.yaml", which comes with the package; not needed with `data`.
        model: model.name, a name of the Hub or a folder.
        data: training rows: a list of dicts, a datasets.Dataset, or a path. Rows are written to the folder of
            the run, `<output_dir>/<output_name>/.given`, with a config of these arguments.
        settings: settings to override, by dotted name.
        processes: of this machine; 0 for one on each visible GPU.
        engine: how several processes share the work; by default parallel.engine.
        resume: continues from the latest checkpoint.
        callbacks: objects of transformers.TrainerCallback, for a run of one process. They see the steps of
            the run, not those of the probe before it. A script finds what they print in log.txt.
        progress: a function that is called with each record of metrics.jsonl as it is written, such as
            {"step": 10, "train/loss": 1.2, ...}; for a run of one process. `print` shows them.
        **keywords: settings by the last part of their names, `max_steps=100`, or with the section where
            several end so, `eval_limit=20`. In `metrics=["exact_match", my_function]`, a function gets an
            answer, its reference and the row, and returns a number or a bool.

    Raises:
        SftPlayError: the subclass says what kind of error, as the exit codes of `sft-play` do.
    """
    changed = {**({"model.name": str(model)} if model else {}), **by_name(keywords), **_checked(settings)}
    if data is not None:
        # functions that the folder of a run names are not run, so they are given beside the file in it
        metrics = {name: value for name, value in changed.items() if name == "eval.metrics"}
        config, changed = _with_rows(config, changed, data), metrics
    if config is None:
        raise ConfigError("nothing to train; give a config, or a model and data=<rows or a path>")
    flags = dict(config=config, processes=processes, engine=engine, resume=resume)
    args = arguments("train", _overrides(changed), **flags)
    with undone(), kept_if_begun(config):
        set_environment()
        hooks = Hooks(_checked_callbacks(callbacks), _checked_listener(progress))
        replace(args, flags={**args.flags, "hooks": hooks}).run()
    output = load_config(args.config, args.overrides).config.output
    return Run(Path(output.dir) / output.name)


@_alone()
def evaluate(
    run: Run | str | Path, *, split: str = "val", limit: int | None = None, **keywords: object
) -> Evaluation:
    """Compares base, trained and merged model of a run on held-out rows, as `sft-play eval` does.

    Args:
        run: a run, its name in the folder `runs`, or its path.
        split: "val" or "test".
        limit: the number of answers; by default eval.limit.
        **keywords: settings as in `train`, such as `metrics=["contains", my_function]`.

    Raises:
        CheckpointError: there is no such run, or it has no complete weights.
        ConfigError: the split has no rows, or a value is wrong.
    """
    found = RunDir((run if isinstance(run, Run) else load(run)).path)
    flags = dict(config=found.config, split=split, limit=limit)
    args = arguments("eval", _overrides(by_name(keywords)), **flags)
    with undone(), in_python():
        set_environment()
        args.run()
    written = found.evaluation(split)
    tree, lines = read_json(written), written.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    names = {name: name if name in ("base", "merged") else "generated" for name in tree["models"]}
    answers = [answers_of(history_text(each["messages"]), each, names) for each in map(json.loads, lines)]
    return Evaluation({name: Scores.of(each) for name, each in tree["models"].items()}, answers, tree)


def load(run: str | Path, *, runs: str | Path = "runs") -> Run:
    """A run that was trained, or is being trained, by its name in the folder `runs` or by its path.

    Raises:
        CheckpointError: there is no such run.
    """
    from sft_play.report.record import find_run, read_run

    path = find_run(str(run), Path(runs))
    read_run(path)
    return Run(path)


def _checked_callbacks(callbacks: Sequence[Any]) -> tuple[Any, ...]:
    """The callbacks; ConfigError for one that is none."""
    if not callbacks:
        return ()
    from transformers import TrainerCallback

    for callback in callbacks:
        if not isinstance(callback, TrainerCallback):
            raise ConfigError(
                "callbacks: expected objects of transformers.TrainerCallback, found a "
                f"{type(callback).__name__}; a function of the numbers of a run is progress=<function>"
            )
    return tuple(callbacks)


def _checked_listener(progress: Listener | None) -> Listener | None:
    """The function; ConfigError for what cannot be called."""
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress: expected a function of a record, found {kind_of(progress)}")
    return progress


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
    return {name: with_names(value) for name, value in (settings or {}).items()}


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

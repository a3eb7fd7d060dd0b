"""What a config can name without a download: "builtin:demo" and "builtin:tiny", made once and kept in the cache folder.

builtin:demo  data: letters to a shop and what they order; model: a small Llama that has read its diary (builtin/world.py)
builtin:tiny  model: random weights, and a tokenizer learned from the run's own training rows; for trying the tool on any data
              without a network, not for results

A cache folder is named after the code that makes it and what it is made from, so changed code makes a new one.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.builtin import world
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data import store
from sft_play.data.reading import fingerprint, open_source, read_rows
from sft_play.errors import ConfigError
from sft_play.report.progress import progress_bar, spinner
from sft_play.runlog import cache_dir, console, quiet_libraries
from sft_play.units import format_count, format_duration

PREFIX = "builtin:"
MODELS, DATA = ("builtin:demo", "builtin:tiny"), ("builtin:demo",)
SPLITS = ("train", "val", "test")

SEED = 0  # of the world and the weights; train.seed changes neither, so that runs with different seeds share one base model
ROWS = {"train": 2000, "val": 100, "test": 200}
TINY_CHARACTERS = 8_000_000  # of text for the tokenizer: more changes little and takes long

SOURCES = Path(__file__).parent / "builtin"


def materialise(resolved: ResolvedConfig) -> ResolvedConfig:
    """The config with folders and files in place of "builtin:..." names; what is missing is made now, the rest is found.

    Raises:
        ConfigError: a builtin is named that does not exist.
        DataError: the rows that builtin:tiny learns its tokenizer from cannot be read.
        StorageError: the cache cannot be written.
    """
    config = resolved.config
    named = {name: value for name, value in _values(config).items() if value and value.startswith(PREFIX)}
    for name, value in named.items():
        allowed = MODELS if name == "model.name" else DATA
        if value not in allowed:
            raise ConfigError(
                f"{name}: there is no {value}; built in {'are' if len(allowed) > 1 else 'is'} {' and '.join(allowed)}"
            )
    made = {f"data.{split}_path": str(demo_rows(split)) for split in SPLITS if f"data.{split}_path" in named}
    if config.model.name == "builtin:demo":
        made["model.name"] = str(demo_model())
    elif config.model.name == "builtin:tiny":
        made["model.name"] = str(tiny_model(made.get("data.train_path", config.data.train_path)))
    return _replaced(resolved, named, made)


def _values(config: RunConfig) -> dict[str, str | None]:
    data = {f"data.{split}_path": getattr(config.data, f"{split}_path") for split in SPLITS}
    return {**data, "model.name": config.model.name}


def _replaced(resolved: ResolvedConfig, named: dict[str, str], made: dict[str, str]) -> ResolvedConfig:
    config, origins = resolved.config, dict(resolved.origins)
    for name, path in made.items():
        section, key = name.split(".")
        changed = getattr(config, section).model_copy(update={key: path})
        config = config.model_copy(update={section: changed})
        origins[name] = f"{origins.get(name, 'default')}, {named[name]}"
    return replace(resolved, config=config, origins=origins)


def _folder(name: str, **ingredients: Any) -> Path:
    """The cache folder of a built-in, named after the code and all else that decides what is in it."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted([*SOURCES.glob("*.py"), Path(__file__)])))
    return cache_dir() / "builtin" / f"{name}-{store.content_key({'code': code.hexdigest(), **ingredients})}"


def _made_once(folder: Path, make: Callable[[Path], dict[str, Any]]) -> Path:
    """Lets `make` fill the folder unless it is there; what it returns is kept in the folder as facts."""
    with store.building(folder, tell=True) as temporary:
        if temporary is not None:
            with quiet_libraries(folder.with_suffix(".log")):
                store.finish(temporary, make(temporary))
    return folder


def demo_rows(split: str) -> Path:
    """The JSONL file of the demo's train, val or test rows."""

    def make(folder: Path) -> dict[str, Any]:
        for name, rows in world.order_rows(SEED, ROWS).items():
            lines = (json.dumps(row) for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return {"rows": ROWS}

    return _made_once(_folder("demo-data"), make) / f"{split}.jsonl"


def demo_model() -> Path:
    """The folder of the demo's base model, trained on the spot the first time."""

    def make(folder: Path) -> dict[str, Any]:
        console().print("Making the demo's base model (once): a small Llama reads the diary of a shop")
        from sft_play.builtin import models

        pages = world.diary_pages(SEED, models.DEMO_STEPS * models.DEMO_PAGES_PER_STEP)
        rows = world.order_rows(SEED, {"train": ROWS["train"]})["train"]
        letters = [message["content"] for row in rows for message in row["messages"]]
        with progress_bar("  reading", len(pages)) as done:
            facts = models.make_demo_model(folder, pages, letters, seed=SEED, done=done)
        console().print(
            f"  {len(pages):,} pages read in {format_duration(facts['seconds'])}, loss {facts['loss']:.2f}, "
            f"{format_count(facts['parameters'])} parameters"
        )
        return facts

    return _made_once(_folder("demo-model"), make)


def tiny_model(train_path: str) -> Path:
    """The folder of a small random model with a tokenizer learned from the rows in `train_path`."""
    source = open_source(train_path, "train")

    def make(folder: Path) -> dict[str, Any]:
        console().print(f"Making builtin:tiny (once): random weights, and a tokenizer learned from {train_path}", markup=False)
        from sft_play.builtin import models

        texts = _within(TINY_CHARACTERS, (text for row in read_rows(source) for text in _texts(row.data)))
        with spinner("  learning the tokenizer"):
            facts = models.make_tiny_model(folder, texts, seed=SEED)
        console().print(f"  {format_count(facts['parameters'])} parameters; it is for trying things out, not for results")
        return facts

    return _made_once(_folder("tiny", rows=fingerprint(source)[0]), make)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _within(characters: int, texts: Iterator[str]) -> Iterator[str]:
    """The first texts, up to so many characters."""
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)

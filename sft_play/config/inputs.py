"""The data paths of a config, one by one, under the names that messages use."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sft_play.config.data import DataConfig, Streaming
from sft_play.units import counted

BUILTIN = "builtin:"  # at the start of the names of data and models that are made here, or downloaded
# Folders that builtin/demo.py makes in the cache, before a hash -> the names that people ask for them by.
BUILTINS = {
    "demo-data": "builtin:demo",
    "demo-model": "builtin:demo",
    "tiny": "builtin:tiny",
    "replies-data": "builtin:replies",
    "shapes-data": "builtin:shapes",
    "shapes-model": "builtin:shapes",
    "smollm2-135m": "builtin:smollm2-135m",
}
BUILTIN_FOLDER = re.compile(rf"/builtin/({'|'.join(BUILTINS)})-[0-9a-f]{{24}}(?:/|$)")
GIVEN = ".given"  # in the folder of a run: rows and settings from Python; it stays when a run is moved aside
GIVEN_ROWS = re.compile(rf"/{re.escape(GIVEN)}/rows-(\d+)-[0-9a-f]{{16}}\.jsonl$")


@dataclass(frozen=True)
class DataInput:
    """One data path of a run."""

    key: str  # its setting, such as "data.train_path" or "data.sources[1]"
    split: str  # train, val or test
    path: str
    format: str
    weight: float = 1.0  # how often its rows are seen per epoch
    asked_split: str | None = None  # of a folder or a Hub dataset
    columns: Mapping[str, str] = field(default_factory=dict)  # key of a format -> its name in the data
    streaming: Streaming = "auto"  # of a Hub dataset
    alone: str = ""  # of rows that the training data comes with: the path of the training rows without them


def data_inputs(data: DataConfig) -> list[DataInput]:
    """The training data, without sources of weight 0, then validation and test data of their own."""
    found = [
        DataInput(
            f"data.sources[{number}]",
            "train",
            source.path,
            source.format or data.format,
            source.weight,
            source.split,
            data.columns if source.columns is None else source.columns,
            data.streaming,
        )
        for number, source in enumerate(data.sources)
        if source.weight
    ]
    paths = {"train": data.train_path, "val": data.val_path, "test": data.test_path}
    found += [
        DataInput(
            f"data.{split}_path", split, path, data.format, columns=data.columns, streaming=data.streaming
        )
        for split, path in paths.items()
        if path is not None
    ]
    return found


def training_paths(data: DataConfig) -> list[str]:
    """The paths of the training data."""
    return [given.path for given in data_inputs(data) if given.split == "train"]


def asked_name(path: str) -> str:
    """The name of a model or data for people: "builtin:tiny" for its folder in the cache."""
    if given := GIVEN_ROWS.search(path):
        return f"{counted(int(given[1]), 'row')} from Python"
    found = BUILTIN_FOLDER.search(path)
    return BUILTINS[found[1]] if found else path

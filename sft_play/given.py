"""What people hold in Python, as files that every process of a run reads: rows, and settings by keyword."""

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from sft_play.commands.judges import hand_over
from sft_play.config.aliases import ALIASES
from sft_play.config.inputs import GIVEN
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, kind_of
from sft_play.files import replacing_file, storing, write_atomic
from sft_play.resources import located
from sft_play.rows.formats import FORMATS, detect_format
from sft_play.rows.json_files import Row
from sft_play.spelling import settings_page


def _names(section: type[BaseModel] = RunConfig, above: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def by_name(keywords: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted name, of keywords: `max_steps`, or with its section if several end so, `eval_limit`.

    Raises:
        ConfigError: no setting has such a name, or several have.
    """
    known: dict[str, list[str]] = {}
    for name in _names():
        *_, section, last = name.split(".")
        for keyword in (last, f"{section}_{last}"):
            known.setdefault(keyword, []).append(name)
    return {_only(keyword, known): with_names(value) for keyword, value in keywords.items()}


def with_names(value: object) -> object:
    """The value, with module:function in place of functions in a list, as `eval.metrics` has them."""
    if not isinstance(value, list | tuple):
        return value
    return [_name_of(each) if callable(each) else each for each in value]


def _name_of(function: object) -> str:
    """The name by which a function is found again; ConfigError if it is not one of a module or script."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__name__", type(function).__name__)
    if getattr(sys.modules.get(module), name, None) is not function:
        raise ConfigError(
            f"metrics: {name} of {module} is not found by that name, and a run keeps the names of its "
            "metrics; give a function that a `def` in a module, a script or a notebook defines"
        )
    hand_over(f"{module}:{name}")
    return f"{module}:{name}"


def _only(keyword: str, known: Mapping[str, Sequence[str]]) -> str:
    names = known.get(keyword, ())
    if len(names) == 1:
        return names[0]
    if names:
        written = " or ".join("_".join(name.split(".")[-2:]) for name in names)
        raise ConfigError(f"{keyword} is a setting of {len(names)} sections; write {written}")
    close = [_keyword(ALIASES[keyword], known)] if keyword in ALIASES else []
    close += difflib.get_close_matches(keyword, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else f"; {settings_page()} lists all settings"
    raise ConfigError(f"{keyword} is not a setting{meant}")


def _keyword(setting: str, known: Mapping[str, Sequence[str]]) -> str:
    """The shortest keyword of a setting, with the value that may follow it: "a.b=c" is "b='c'"."""
    name, equals, value = setting.partition("=")
    *_, section, last = name.split(".")
    keyword = last if len(known[last]) == 1 else f"{section}_{last}"
    return f"{keyword}={value!r}" if equals else keyword


def write_given(
    settings: Mapping[str, Any], data: object, folder: Path, config: str | Path | None = None
) -> Path:
    """Writes `data` and the settings to files of a run's folder; returns the config.

    Args:
        settings: by dotted name.
        data: rows, as a list of dicts or a datasets.Dataset, or the path of a file.
        folder: of the run; its name becomes that of the run.
        config: whose settings these change.

    Raises:
        ConfigError: the rows cannot be written, or are not all of one format.
        StorageError: the folder cannot be written.
    """
    settings = {"output.dir": str(folder.parent), "output.name": folder.name, **settings}
    with storing(folder, "Set output_dir=<folder>"):
        (folder / GIVEN).mkdir(parents=True, exist_ok=True)
        settings["data.train_path"] = str(_rows_file(data, settings, folder / GIVEN))
        tree: dict[str, Any] = {"include": str(located(Path(config)).resolve())} if config else {}
        for name, value in settings.items():
            *sections, last = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = os.fspath(value) if isinstance(value, os.PathLike) else value
        written = folder / GIVEN / "run.yaml"
        write_atomic(written, yaml.safe_dump(tree, sort_keys=False))
    return written


@contextlib.contextmanager
def kept_if_begun(config: str | Path | None) -> Iterator[None]:
    """If the block fails, removes what `write_given` wrote, unless the folder of the run has more by then."""
    given = Path(config or "").parent
    try:
        yield
    except BaseException:
        if given.name == GIVEN and list(given.parent.iterdir()) == [given]:
            shutil.rmtree(given.parent)
        raise


def _rows_file(data: Any, settings: Mapping[str, Any], folder: Path) -> str | Path:
    """A file of rows, named by number and hash, since other rows under one name would be of another run."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    _require_rows(data)
    is_detected = not settings.get("data.columns") and settings.get("data.format", "auto") == "auto"
    digest = hashlib.sha256()
    for line in _lines(data, one_format=is_detected):
        digest.update(line)
    file = folder / f"rows-{len(data)}-{digest.hexdigest()[:16]}.jsonl"  # as GIVEN_ROWS
    if not file.exists():
        with replacing_file(file) as temporary, temporary.open("wb") as written:
            written.writelines(_lines(data, one_format=False))  # they have been looked at
    return file.resolve()


def _lines(rows: Iterable[Any], *, one_format: bool) -> Iterator[bytes]:
    """Rows as JSON lines; ConfigError for one that is none, or lacks a key of the format of the first one."""
    name, keys = "", set[str]()
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"data: row {number} is {kind_of(row)}; expected a dict")
        if one_format and number == 1:
            name = detect_format(Row(dict(row), "data", 1))
            keys = set(FORMATS[name].keys)
        if not row.keys() >= keys:
            raise ConfigError(
                f"data: row {number} has the keys {', '.join(map(str, row))}, and row 1 those of the format "
                f"{name}: {', '.join(FORMATS[name].keys)}; all rows must have the same format"
            )
        try:
            yield json.dumps(row, ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data: row {number} cannot be written as JSON: {error}") from None


def _require_rows(data: object) -> None:
    """Refuses what is no list and no dataset, or is empty."""
    is_dataset = type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "features")
    if isinstance(data, Mapping):
        raise ConfigError(
            f"data: expected rows, found a {type(data).__name__} of {', '.join(map(str, list(data)[:5]))}; "
            "give one of them, such as data=dataset['train']"
        )
    if not isinstance(data, Sequence) and not (is_dataset and hasattr(data, "__len__")):
        raise ConfigError(
            f"data: expected a list of dicts, a datasets.Dataset or a path, found a {type(data).__name__}; "
            "turn an iterator into a list: list(...)"
        )
    if not len(data):
        raise ConfigError("data: expected rows, found none")

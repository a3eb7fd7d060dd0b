"""What a folder of data holds: files of rows or of text, the split that each is of, and what is left out.

The rules are those of the Hub, so that a cloned dataset is read as the dataset is (`datasets.data_files`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.errors import DataError
from sft_play.rows.strict_json import parse
from sft_play.units import counted, listed

# Suffix -> the kind of the file
ROW_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    ".parquet": "Parquet",
    ".arrow": "Arrow",
}
SUFFIXES = tuple(ROW_KINDS)
TEXT_SUFFIXES = (".txt", ".md")  # raw text, a document each
# Split -> what files, folders and splits on the Hub that hold its rows are called
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
WORD_ENDS = "-._ 0-9"  # what may stand before and after such a word in a longer name
SPLIT_WORDS = {
    split: re.compile(rf"(?:.*[{WORD_ENDS}])?(?:{'|'.join(names)})(?:[{WORD_ENDS}].*)?", re.IGNORECASE)
    for split, names in SPLIT_NAMES.items()
}
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")  # of any split, as the Hub writes them
PAPERS = {
    "readme.md", "readme.txt", "license", "license.md", "license.txt", "config.json", "dataset_info.json",
    "dataset_infos.json", "dataset_dict.json", "state.json",
}  # fmt: skip
NO_SPLIT = ""  # the key of files where no name says of which split they are
ROWS, TEXT = "rows", "text"
SHOWN = 4  # names of files in a message

# What is said of files that are not read, or not as their names suggest
ABOUT = "left out (about the data, not part of it)"
OTHER = "left out (neither rows nor text)"
BESIDE = "left out (text next to rows)"
UNNAMED = "left out (no split in their names, unlike other files)"
EMPTY = "left out (empty)"
DOCUMENTS = "documents like the others, which are not named for a split either"


@dataclass(frozen=True)
class Folder:
    """The files of a folder by split, under the names that the Hub gives splits; or all under NO_SPLIT."""

    splits: Mapping[str, tuple[Path, ...]]
    remarks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what is said -> names of files


def read_folder(folder: Path, key: str) -> Folder:
    """What a folder of data holds; `key` is the setting that names it.

    Raises:
        DataError: it has no data, or cannot be read; files are of different kinds, or of two splits at once.
    """
    saved = _saved(folder)
    if saved:
        return Folder(saved)
    said: dict[str, list[Path]] = {}  # of each file, what is said if it is not read as its name suggests
    for path in files_below(folder, key):
        said.setdefault(_role(folder, path, key), []).append(path)
    rows, texts = said.pop(ROWS, []), said.pop(TEXT, [])
    files = rows or texts
    if not files:
        found = f"; found {listed(_relative(folder, sum(said.values(), [])), SHOWN)}" if said else ""
        expected = ", ".join(SUFFIXES + TEXT_SUFFIXES)
        raise DataError(f"{key}: folder {folder} has no data files{found}; expected {expected}")
    if rows:
        said[BESIDE] = texts
    splits = _by_split(folder, files, key)
    unnamed = splits.pop(NO_SPLIT, [])
    if not splits:
        splits[NO_SPLIT] = files
    elif unnamed and not rows:  # "dev/setup.md" is no validation data
        said[DOCUMENTS] = sum(splits.values(), [])
        splits = {NO_SPLIT: files}
    else:
        said[UNNAMED] = unnamed
    for of_split in splits.values():
        _require_one_kind(folder, of_split, key)
    remarks = {what: tuple(_relative(folder, paths)) for what, paths in said.items() if paths}
    return Folder({split: tuple(paths) for split, paths in splits.items()}, remarks)


def files_below(folder: Path, key: str) -> list[Path]:
    """All files in a folder and below, sorted, without hidden ones, which begin with "." (folders also "__").

    Raises:
        DataError: a folder cannot be read, or is a link to one that it is in.
    """

    def failed(error: OSError) -> None:
        raise DataError(f"{key}: folder {error.filename} cannot be read: {error.strerror}") from None

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=failed, followlinks=True):
        here = Path(place)
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for link in filter(Path.is_symlink, (here / name for name in folders)):
            if link.resolve() in (above.resolve() for above in (here, *here.parents)):
                raise DataError(f"{key}: {link} is a link to a folder that it is in; remove the link")
        found += [here / name for name in names if not name.startswith(".")]
    return sorted(found)


def is_there(path: Path, key: str) -> bool:
    """Whether a path in a folder is a file; a link to nothing is an error: its rows would be missing."""
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"{key}: {path} is a link to {path.readlink()}, which does not exist; remove the link"
        )
    return path.is_file()


def _role(folder: Path, path: Path, key: str) -> str:
    """ROWS, TEXT, or what is said of a file that is neither."""
    suffix = path.suffix.lower()
    if path.name.lower() in PAPERS and (path.parent == folder or suffix == ".json"):
        return ABOUT
    if suffix not in SUFFIXES + TEXT_SUFFIXES or not is_there(path, key):
        return OTHER
    if suffix in SUFFIXES:
        return ROWS
    return TEXT if path.stat().st_size else EMPTY


def _relative(folder: Path, paths: Sequence[Path]) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in paths]


def _by_split(folder: Path, files: Sequence[Path], key: str) -> dict[str, list[Path]]:
    """Files by the split that their names say; NO_SPLIT for none.

    Shards of the Hub come first, then names of folders, then names of files: what says something of any file
    decides for all.
    """
    names = {path: path.relative_to(folder) for path in files}
    shards = {path: SHARD.fullmatch(name.as_posix()) for path, name in names.items()}
    if any(shards.values()):
        found = {path: match[1] if match else NO_SPLIT for path, match in shards.items()}
    else:
        by_folder = {path: _split_of(path, name.parts[:-1], key) for path, name in names.items()}
        by_file = {path: _split_of(path, name.parts[-1:], key) for path, name in names.items()}
        found = by_folder if any(by_folder.values()) else by_file
    splits: dict[str, list[Path]] = {}
    for path, split in found.items():
        splits.setdefault(split, []).append(path)
    return splits


def _split_of(path: Path, words: Sequence[str], key: str) -> str:
    found = [split for split, pattern in SPLIT_WORDS.items() if any(map(pattern.fullmatch, words))]
    if len(found) > 1:
        raise DataError(
            f"{key}: {path} is named for {' and for '.join(found)}; rename it, or give files one by one: "
            "data.train_path, data.val_path, data.test_path"
        )
    return SPLIT_NAMES[found[0]][0] if found else NO_SPLIT


def _require_one_kind(folder: Path, files: Sequence[Path], key: str) -> None:
    kinds: dict[str, list[Path]] = {}
    for path in files:
        kinds.setdefault(ROW_KINDS.get(path.suffix.lower(), TEXT), []).append(path)
    if len(kinds) > 1:
        found = "; ".join(
            f"{counted(len(paths), f'{kind} file')} ({listed(_relative(folder, paths), SHOWN)})"
            for kind, paths in kinds.items()
        )
        raise DataError(
            f"{key}: folder {folder} has rows of several kinds: {found}. They may be the same rows twice: "
            "move one kind away, or list what to read in data.sources"
        )


def _saved(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The files of a Dataset or a DatasetDict that `save_to_disk` has written; none of any other folder.

    Other Arrow files there are results that `datasets` keeps.
    """
    listing, state = folder / "dataset_dict.json", folder / "state.json"
    if listing.is_file():
        return {
            split: tuple(folder / split / name for name in _listed_files(folder / split / "state.json"))
            for split in _strings(listing, _parsed(listing).get("splits"))
        }
    if state.is_file() and "_data_files" in _parsed(state):
        return {NO_SPLIT: tuple(folder / name for name in _listed_files(state))}
    return {}


def _listed_files(state: Path) -> list[str]:
    files = _parsed(state).get("_data_files")
    names = (
        [isinstance(file, dict) and file.get("filename") for file in files] if isinstance(files, list) else []
    )
    return _strings(state, names)


def _strings(file: Path, value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise DataError(f"{file} does not list what the saved dataset consists of; save it again")
    return value


def _parsed(file: Path) -> dict[str, object]:
    try:
        value = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}

"""The config that a run has in its folder; values and origins are read also if it is not valid any more."""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError
from sft_play.files import read_whole

OF_RUN = "config.resolved.yaml"  # in the folder of a run
LONGEST = 2**20  # bytes
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: (?P<rest>.+))?$", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """A value of a config, and where it came from."""

    value: Any
    origin: str  # "default", "override", or a file


def no_such_run(folder: Path) -> CheckpointError:
    """The error that there is no run in a folder, with those that are beside it."""
    there = sorted(file.parent.name for file in folder.parent.glob(f"*/{OF_RUN}"))
    return CheckpointError(f"there is no run {folder}; runs there: {', '.join(there) or 'none'}")


def stay_in_folder(tree: dict, path: Path) -> None:
    """Makes the config of a run that of the folder which it is in.

    The run may have been renamed or moved since, or set aside for a new one of its name.
    """
    began = path.with_name("plan.json").is_file()  # otherwise it is a copy, from which a run may begin
    if path.name == OF_RUN and began and isinstance(tree.get("output"), dict):
        folder = path.parent if path.parent.name.strip(".") else path.resolve().parent
        tree["output"] |= {"name": folder.name, "dir": str(folder.parent)}


def read_resolved(path: Path) -> dict[str, Setting]:
    """The settings of a file that `dump_resolved` wrote, by dotted name; other lines in it are skipped.

    A run of an earlier version may have settings that the schema does not know any more.
    """
    try:
        text = read_whole(path, LONGEST).decode(errors="replace")
    except OSError:
        return {}
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    for found in LINE.finditer(text):
        del sections[len(found["indent"]) // 2 :]
        if found["rest"] is None:
            sections.append(found["key"])
            continue
        with contextlib.suppress(ValueError, RecursionError):  # the value is not JSON
            value, end = json.JSONDecoder().raw_decode(found["rest"])
            origin = found["rest"][end:].strip().removeprefix("# ")
            settings[".".join([*sections, found["key"]])] = Setting(value, origin)
    return settings

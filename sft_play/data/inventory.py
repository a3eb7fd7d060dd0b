"""What the data paths of a run turned out to be: the files that were read for each split, and the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from sft_play.config.inputs import DataInput, asked_name
from sft_play.data.folders import ABOUT, SHOWN
from sft_play.data.sources import Source
from sft_play.units import counted, listed

UNUSED = "not used: no setting names these splits"
EXPECTED = (ABOUT, UNUSED)  # remarks that nobody needs a warning of


class InputFiles(TypedDict):
    """What a data path turned out to be."""

    split: str
    path: str
    of: str  # the name of the split in its folder or dataset, "" if it has none
    files: list[str]  # of a folder


@dataclass(frozen=True)
class Inventory:
    """The files of a run's data, as data.json has them."""

    inputs: list[InputFiles]
    remarks: dict[str, dict[str, list[str]]]  # on what was not read: path -> remark -> names


def inventory(opened: Sequence[tuple[DataInput, Source]]) -> Inventory:
    """What was read of these, and what was not."""
    inputs: list[InputFiles] = []
    remarks = {}
    for given, source in opened:
        names = [str(file.relative_to(source.folder)) for file in source.files if source.folder]
        inputs.append({"split": given.split, "path": source.path, "of": source.split, "files": names})
        read = {other.split for _, other in opened if other.path == source.path}
        unused = [name for name in source.others if name not in read]
        said = {what: list(found) for what, found in source.remarks.items()}
        if said or unused:
            remarks[str(source.folder or source.path)] = said | ({UNUSED: unused} if unused else {})
    return Inventory(inputs, remarks)


def input_lines(inputs: Sequence[InputFiles]) -> Iterator[str]:
    """A line for each input: its split, and where its rows are from."""
    for each in inputs:
        files = each["files"]
        line = f"{each['split']}: {asked_name(each['path'])}" + (
            f", split {each['of']}" if each["of"] else ""
        )
        yield line + (f": {counted(len(files), 'file')} ({listed(files, SHOWN)})" if files else "")


def remark_lines(remarks: Mapping[str, Mapping[str, Sequence[str]]], *, expected: bool) -> Iterator[str]:
    """The remarks as lines: those that one expects, or those that are worth a warning."""
    for path, said in remarks.items():
        for what, names in said.items():
            if (what in EXPECTED) == expected:
                many = f"{len(names)} files: " if len(names) > SHOWN else ""
                yield f"{path}: {what}: {many}{listed(names, SHOWN)}"

"""Runs the unit tests near to what was changed: `make test-changed`, or since a revision with AGAINST=main.

The nearest come first: tests that were changed; the test of a changed module, by its name; tests that import
one, or name a changed file that is no module; tests in the folder of its test; tests that import it through
one other module. After some seconds none begins but those of the first two kinds. What is left out is said.
"""

import argparse
import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import networkx

from scripts.check_style import Module, import_graph, read_modules

FOLDERS = ("sft_play", "benchmarks", "scripts", "tests")  # with modules
HOPS = 2  # imports between a test and a changed module; with three, nearly every test reaches the settings
SECONDS = 50
OWN = 2  # kinds of tests that always run
SHOWN = 8  # changed files that are named
NO_TESTS = 5  # pytest's exit code if all that it found is left to other targets


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tests; returns the exit code of pytest."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Run the unit tests near to what was changed.")
    parser.add_argument("--against", default="HEAD", metavar="REVISION", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
    args = parser.parse_args(argv)
    files = changed_files(args.against)
    modules = all_modules(Path(), files)
    near, distant = near_tests(files, modules)
    more = [f"{len(files) - SHOWN} more"] if len(files) > SHOWN else []
    print(f"changed since {args.against}: {', '.join([*files[:SHOWN], *more]) or 'nothing'}")
    if not near:
        print(f"no unit test is near; {distant} test files are more distant: make test")
        return 0
    import pytest

    limit = TimeLimit(began + args.seconds, {file for file, kind in near.items() if kind < OWN})
    code = pytest.main([*near], plugins=[limit])
    late = f"{len(limit.left_out)} of {len(near)} test files were not finished in {args.seconds:g} s, "
    print(f"{late if limit.left_out else ''}{distant} more distant test files were left out: make test")
    return 0 if code == NO_TESTS else int(code)


class TimeLimit:
    """A plugin of pytest: after a moment, no test begins but those of some files.

    Attributes:
        until: the moment, of the monotonic clock.
        always: the files.
        left_out: files with tests that did not begin.
    """

    def __init__(self, until: float, always: set[str]):
        self.until = until
        self.always = always
        self.left_out: set[str] = set()

    def pytest_runtest_protocol(self, item) -> bool | None:  # noqa: ANN001 - pytest is not imported yet
        """True means that the test has been taken care of."""
        if time.monotonic() < self.until or item.location[0] in self.always:
            return None
        self.left_out.add(item.location[0])
        return True


def changed_files(against: str) -> list[str]:
    """Files that differ from where this branch left the revision, deleted and untracked ones too."""
    known = git("diff", "--name-only", "--no-renames", "--merge-base", against)
    return sorted({*known, *git("ls-files", "--others", "--exclude-standard")})


def git(*words: str) -> list[str]:
    """The lines of a git command; ends with its message if it fails."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: git {' '.join(words)}: {done.stderr.strip()}; AGAINST takes a revision, as main")
    return done.stdout.splitlines()


def module_of(file: str) -> str | None:
    """sft_play/data/chat.py -> sft_play.data.chat; None if a file is no module of these folders."""
    path = Path(file)
    if path.suffix != ".py" or path.parts[0] not in FOLDERS:
        return None
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def all_modules(root: Path, changed: Iterable[str] = ()) -> list[Module]:
    """The modules of all folders under their full names, and changed ones that were deleted, without text."""
    found = [
        replace(module, name=f"{folder}.{module.name}".rstrip("."))
        for folder in FOLDERS
        for module in read_modules(root / folder)
    ]
    deleted = {module_of(file) for file in changed} - {None, *(module.name for module in found)}
    return found + [Module(name, False, "", ast.parse("")) for name in sorted(filter(None, deleted))]


def near_tests(files: Sequence[str], modules: Sequence[Module]) -> tuple[dict[str, int], int]:
    """Test files near to changed files, with the number of their kind, from the nearest on.

    Returns:
        The files, and how many others reach the changed ones through imports.
    """
    code = {name for file in files if (name := module_of(file))}
    data = [file for file in files if not module_of(file)]
    folders = folders_without_modules(data, modules)
    inside = [file for file in data if file.split("/")[0] in FOLDERS]  # templates, scripts of pages
    readers = {module.name for module in modules if not is_test(module) and names_file(module.text, inside)}
    away = distances(import_graph(list(modules), ""), code | readers)
    mirrored = {mirror for name in code | readers for mirror in mirrors_of(name)}
    rooms = tuple(room for name in code | readers for room in rooms_of(name))
    near: dict[str, int] = {}
    distant = 0
    for module in filter(is_test, modules):
        name, hops = module.name, away.get(module.name)
        rings = (
            name in code,
            name in mirrored,
            hops == 1 or names_file(module.text, data),
            name.startswith(rooms) or names_folder(module.text, folders),
            hops == HOPS,
        )
        if any(rings) and (name in code or name.startswith("tests.unit.")):
            near[f"{name.replace('.', '/')}.py"] = rings.index(True)
        else:
            distant += any(rings) or hops is not None
    return dict(sorted(near.items(), key=lambda one: one[::-1])), distant


def is_test(module: Module) -> bool:
    """Whether pytest collects a module; one that was deleted has no text."""
    return module.name.rpartition(".")[2].startswith("test_") and bool(module.text)


def mirrors_of(name: str) -> list[str]:
    """The tests that a module may have: sft_play.data.chat -> tests.unit.data.test_chat, among others.

    Those of a module in a room, as sft_play.model.weights.files, may stand in the folder of its package.
    """
    *folders, own = name.split(".")
    return [
        ".".join(["tests", "unit", *kept, f"test_{own}"]) for kept in (folders[1:], folders[1:2], folders)
    ]


def rooms_of(name: str) -> list[str]:
    """The beginnings of the names of tests beside a module's own: tests.unit.data. of sft_play.data.chat."""
    if name.endswith(".conftest"):
        return [name.removesuffix("conftest")]
    rooms = [f"{mirror.rpartition('.')[0]}." for mirror in mirrors_of(name)]
    return [room for room in rooms if room != "tests.unit."]


def folders_without_modules(files: Iterable[str], modules: Iterable[Module]) -> set[str]:
    """The names of the folders of files that hold no modules: configs of sft_play/configs/demo.yaml."""
    packages = {"/".join(module.name.split(".")[:-1]) for module in modules}
    parents = [parent for file in files for parent in Path(file).parents if parent.name]
    return {parent.name for parent in parents if parent.as_posix() not in packages}


def names_file(text: str, files: Iterable[str]) -> bool:
    """Whether a text has the name of one of these files in it."""
    return any(re.search(rf"(?<![\w.-]){re.escape(Path(file).name)}(?![\w-])", text) for file in files)


def names_folder(text: str, folders: Iterable[str]) -> bool:
    """Whether a text has one of these folders in it, in quotes or at the beginning of a path."""
    return any(re.search(rf"""(?<![\w.-]){re.escape(folder)}["'/]""", text) for folder in folders)


def distances(graph: dict[str, set[str]], changed: set[str]) -> dict[str, int]:
    """Module -> imports between it and the nearest changed module; modules that reach none are left out.

    Args:
        graph: module -> modules that it imports.
        changed: at distance 0.
    """
    importers = networkx.DiGraph(graph).reverse()
    importers.add_nodes_from(changed)
    return networkx.multi_source_dijkstra_path_length(importers, changed) if changed else {}


if __name__ == "__main__":
    sys.exit(main())

"""The measures of `make check-style` are those of a package small enough to be counted by hand."""

import ast
import subprocess
from pathlib import Path

import pytest

from scripts.check_style import main, measure, tensor_function_has_shapes

TOY = {
    "__init__.py": "",
    "one.py": """\
from typing import TYPE_CHECKING

from toy.two import thing

if TYPE_CHECKING:
    from toy.lower.three import other  # the only comment


def public(x: int, y):
    return [a for a in range(x)], [b for b in range(y)]


def pick(x: "Tensor") -> int:
    \"\"\"Takes [batch, seq].\"\"\"
    return 1 if x else 2 if x is None else 3
""",
    "two.py": """\
from . import one

thing = 1


class Kept:
    \"\"\"A class.\"\"\"

    def _hidden(self, *args: int) -> "Tensor":
        return args
""",
    "lower/__init__.py": "",
    "lower/three.py": """\
def other():
    from toy.one import pick

    return pick
""",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / "toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "toy" / name).write_text(text)
    return folder / "toy"


def values(package: Path) -> dict[str, str]:
    return {one.name: one.text for one in measure(package)}


def test_every_measure_of_a_toy_package(tmp_path):
    assert values(write(tmp_path, TOY)) == {
        "files": "3",
        "lines": "29",
        "file median, lines": "10",
        "file max, lines": "15",
        "function median, lines": "2",
        "function p90, lines": "4",
        "function max, lines": "4",
        "comments per code line": "5.6%",  # 1 of 18
        "nested conditional expressions": "1",
        "statements with > 1 comprehension": "1",
        "ternaries per 1,000 lines": "69.0",
        "tensor functions with shapes": "50.0% of 2",
    }


@pytest.mark.parametrize(
    ("docstring", "has_shape"),
    [("A [batch, seq] mask.", True), ("The scalar loss.", True), ("Of any shape.", True), ("A mask.", False)],
)
def test_a_shape_is_brackets_or_a_word_for_one(docstring, has_shape):
    inner = "def inner(y: Tensor):\n        return y"
    tree = ast.parse(f'def f(x: Tensor):\n    """{docstring}"""\n    {inner}\n')
    assert list(tensor_function_has_shapes([tree])) == [has_shape]


@pytest.fixture
def repository(tmp_path) -> Path:
    """The toy package, committed."""
    package = write(tmp_path, TOY)
    name = ["-c", "user.name=Someone", "-c", "user.email=someone@example.com"]
    for words in (["init", "--quiet"], ["add", "."], [*name, "commit", "--quiet", "--message", "Toy"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return package


def test_a_package_is_not_worse_than_itself(repository, capsys):
    assert main([str(repository), "--against", "HEAD"]) == 0
    assert "(worse)" not in capsys.readouterr().out


def test_what_got_worse_is_named_and_fails(repository, capsys):
    (repository / "two.py").write_text(TOY["two.py"] + "\n\ndef more(x: Tensor):\n    return x\n")
    assert main([str(repository), "--against", "HEAD"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tensor functions")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["33.3% of 3 (worse)", "50.0% of 2"]


def test_an_unknown_revision_is_an_error_of_one_line(repository):
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        main([str(repository), "--against", "nowhere"])


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])

"""A thing that is a row of a table is named in that row alone: everything else asks the table."""

import ast
import re
from pathlib import Path

import pytest

from sft_play.choices.engines import SEVERAL
from sft_play.choices.kernels import LAYERS
from sft_play.choices.optimizers import OPTIMIZERS

PACKAGE = Path(__file__).resolve().parents[2] / "sft_play"
MAY_NAME = {  # besides docstrings, and code that is in a module of its own name
    "an engine": (SEVERAL, {"choices/engines.py", "engines/zero3.py", "spelling.py"}),
    "an optimizer": (OPTIMIZERS, {"choices/optimizers.py"}),
    "kernels of layers": (LAYERS, {"choices/kernels.py"}),
}


def said(tree: ast.AST) -> list[str]:
    """The texts of a module that are no docstrings, parts of formatted ones too."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def files_that_say(names) -> set[str]:
    words = re.compile(rf"\b({'|'.join(names)})\b")
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(map(words.search, said(ast.parse(path.read_text()))))
    }


@pytest.mark.parametrize("kind", MAY_NAME)
def test_a_row_is_named_where_it_stands(kind):
    names, files = MAY_NAME[kind]
    assert files_that_say(names) == files


def test_texts_are_found_wherever_they_are():
    code = '"""ddp in words."""\nif engine == "ddp": print(f"{x} with ENGINE=ddp")\n'
    assert said(ast.parse(code)) == ["ddp", " with ENGINE=ddp"]

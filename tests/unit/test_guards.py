"""What linters do not see: tests that cannot fail, and constants that are assigned twice."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_floors import FOLDERS

ROOT = Path(__file__).resolve().parents[2]
CHECKS = {"pytest.raises", "pytest.warns", "pytest.fail"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]  # a module of the tests, and the name of a function in it


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the tests by their dotted names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def checks(node: ast.AST) -> bool:
    """Whether a part of a function fails by itself if something is wrong."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    of_a_library = "." in name and name.rpartition(".")[2].startswith("assert_")
    runs_checked = name == "subprocess.run" and any(
        keyword.arg == "check" and ast.unparse(keyword.value) == "True" for keyword in node.keywords
    )
    return name in CHECKS or of_a_library or runs_checked


def called_by(function: ast.AST, module: str, imported: dict[str, Key]) -> set[Key]:
    """Functions that it calls by their names, and methods, as if each were of its own module."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(imported.get(node.func.id, (module, node.func.id)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add((module, node.func.attr))
    return found


def imports_of(tree: ast.Module) -> dict[str, Key]:
    """Names that a module has from others."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def without_check(modules: dict[str, ast.Module]) -> list[str]:
    """The tests that nothing can fail but an error on the way: neither they nor what they call check."""
    fails: set[Key] = set()
    calls: dict[Key, set[Key]] = {}
    for module, tree in modules.items():
        imported = imports_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                key = module, node.name
                calls[key] = calls.get(key, set()) | called_by(node, module, imported)
                if any(map(checks, ast.walk(node))):
                    fails.add(key)
    while more := {key for key, called in calls.items() if key not in fails and called & fails}:
        fails |= more
    return [
        f"{module}: {name}"
        for module, name in calls
        if module.rpartition(".")[2].startswith("test_") and name.startswith("test_")
        if (module, name) not in fails
    ]


def test_every_test_can_fail():
    found = without_check(trees())
    assert not found, "these tests assert nothing:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("body", "can_fail"),
    [
        ('"""Nothing."""', False),
        ("work()", False),
        ("assert True", False),
        ("subprocess.run(words)", False),
        ("assert work()", True),
        ("with pytest.raises(ValueError): work()", True),
        ("subprocess.run(words, check=True)", True),
        ("torch.testing.assert_close(one, other)", True),
        ("compare(work())", True),
        ("compare_all(work())", True),
    ],
)
def test_what_a_test_can_fail_by(body, can_fail):
    helpers = "def work(): return 1\ndef compare(one): assert one\ndef compare_each(ones): compare(ones)\n"
    test = (
        "from tests.helpers import compare, compare_each as compare_all, work\n"
        f"def test_something():\n    {body}\n"
    )
    found = without_check({"tests.helpers": ast.parse(helpers), "tests.test_it": ast.parse(test)})
    assert found == ([] if can_fail else ["tests.test_it: test_something"])


def assigned_twice(tree: ast.Module) -> list[str]:
    """Constants that a module assigns more than once, one after the other."""
    counts: Counter[str] = Counter()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value):
            names = (each for target in targets if target for each in ast.walk(target))
            counts.update(
                each.id for each in names if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )
    return [name for name, count in counts.items() if count > 1 and name.isupper()]


def test_no_constant_is_assigned_twice():
    assert assigned_twice(ast.parse("A, B = 1, 2\nC: int = 3\nB = 4\nC = 5\nB |= 6\nc = 7\nc = 8")) == [
        "B",
        "C",
    ]
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path}: {name}" for path in paths for name in assigned_twice(ast.parse(path.read_text()))]
    assert not found, "\n".join(found)

"""No engine is known by its name outside `engines/` and the rows of traits: everything else asks the engine or its traits."""

import ast
from pathlib import Path

from sft_play.choices.engines import ALONE, SEVERAL

PACKAGE = Path(__file__).resolve().parents[2] / "sft_play"
AT_HOME = ("engines/", "choices/engines.py")
NAMES = set(SEVERAL)  # the name of the one for a single process is also a word for other things


def says_engine(node: ast.AST | str | None) -> bool:
    """Whether an expression is about an engine: `plan.engine`, `engine`, "engine"."""
    word = (
        node
        if isinstance(node, str)
        else getattr(node, "attr", getattr(node, "id", getattr(node, "value", "")))
    )
    return isinstance(word, str) and word.endswith("engine")


def beside_engine(node: ast.AST) -> list[ast.AST]:
    """What is compared with an engine, or given where one is expected."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return sides if any(map(says_engine, sides)) else []
    if isinstance(node, ast.Call):
        return [keyword.value for keyword in node.keywords if says_engine(keyword.arg)]
    if isinstance(node, ast.Dict):
        return [value for key, value in zip(node.keys, node.values, strict=True) if says_engine(key)]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [node.value] if any(map(says_engine, targets)) and getattr(node, "value", None) else []


def texts(node: ast.AST) -> list[ast.Constant]:
    return [
        inner for inner in ast.walk(node) if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    ]


def engine_names(tree: ast.AST) -> list[str]:
    """Where a tree knows an engine by its name, by line; sentences that mention one are not meant."""
    found = [text for text in texts(tree) if text.value in NAMES]
    for node in ast.walk(tree):
        found += [text for side in beside_engine(node) for text in texts(side) if text.value == ALONE.name]
    return [f"{line}: {name!r}" for line, name in sorted({(text.lineno, text.value) for text in found})]


def test_no_engine_is_known_by_name_elsewhere():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(AT_HOME):
            found += [f"{name}:{place}" for place in engine_names(ast.parse(path.read_text()))]
    assert not found, "\n".join(found)


def test_the_search_finds_a_name_in_every_place():
    code = """
plan.engine == "none"
engine in ("none", "other")
replace(plan, engine="none")
{"engine": "none"}
engine: str = "none"
{"ddp": 1}
names["deepspeed_z2"]
"""
    assert len(engine_names(ast.parse(code))) == 7
    harmless = 'lr_scaling == "none"\nprint(f"{engine}: none of them; use parallel.engine=ddp")\nplan.engine == other'
    assert engine_names(ast.parse(harmless)) == []

"""Phrases that nobody in the field says stay out of messages and pages; what to write instead is beside them."""

import ast
import re

import pytest

from tests.conftest import REPOSITORY

# A phrase of ours -> the field's.
INSTEAD = {
    "of what is between": "one tile of intermediates is held at a time",
    "out of reach": "ruled out: the weights alone need",
    "the allocator holds besides": "allocator overhead",
    "data that is not here": "planning without data",
    "in its own rounds": "in rounds of its own, or a number of rounds",
    "a rare corner": "in rare cases",
    "no proof on a GPU": "not yet benchmarked on a GPU",
}
PAGES = [
    page
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    if "decisions" not in page.parts and page.name != "CHANGELOG.md"
]


def messages(source: str) -> str:
    """The strings of a module that are no docstrings, on one line."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    documented = {
        id(node.body[0].value) for node in nodes if node.body and isinstance(node.body[0], ast.Expr)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
    ]
    return " ".join(strings)


def test_a_phrase_in_a_message_is_found_and_one_in_a_docstring_is_not():
    assert "out of reach" in messages(
        '"""Out."""\ndef f(n):\n    """Doc."""\n    return f"{n} is out " "of reach"\n'
    )
    assert "docstring" not in messages('"""A docstring."""\n')


@pytest.mark.parametrize("phrase", INSTEAD)
def test_messages_and_pages_use_the_words_of_the_field(phrase):
    pattern = re.compile(re.escape(phrase).replace(r"\ ", r"\s+"), re.IGNORECASE)
    modules = sorted((REPOSITORY / "sft_play").rglob("*.py"))
    found = [path for path in modules if pattern.search(messages(path.read_text()))]
    found += [page for page in PAGES if pattern.search(page.read_text())]
    assert not found, f"{phrase!r}: write {INSTEAD[phrase]!r}"

"""Phrases that nobody in the field says stay out of messages and pages; what to write instead is beside them."""

import ast
import re

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
    "anew": "again",
    "besides": "except, or in addition to",
    "cannot be true": "implausible",
    "go on from": "continue from",
    "goes on from": "continues from",
    "going on from": "continuing from",
    "in the median": "the median is",
    "in your hands": "in memory",
    "may not write": "has no write permission",
    "never measured": "not measured",
    "nothing tells": "unknown",
    "says more": "see, and the name of the file",
    "so many": "a number of, or N",
    "that are not here": "not in this machine, or left out",
    "that there may be": "possible",
    "the slowest that": "the slowest possible",
    "trained whole": "trained in full",
    "what becomes of": "what happens to",
    "what stands": "what is",
    "which is no": "which is not a",
    "with your rights": "with your permissions",
}
WORDS = {phrase.lower(): better for phrase, better in INSTEAD.items()}
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


def test_messages_and_pages_use_the_words_of_the_field():
    phrase = re.compile(
        r"\b(" + "|".join(re.escape(one).replace(r"\ ", r"\s+") for one in INSTEAD) + r")\b", re.IGNORECASE
    )
    texts = {path: messages(path.read_text()) for path in (REPOSITORY / "sft_play").rglob("*.py")}
    texts |= {page: page.read_text() for page in PAGES}
    found = {
        f"{path.relative_to(REPOSITORY)}: {said!r}": WORDS[" ".join(said.lower().split())]
        for path, text in texts.items()
        for said in phrase.findall(text)
    }
    assert not found, "\n".join(f"{place}; write {better!r}" for place, better in sorted(found.items()))

"""A thing lives in one place: which files of the package name it. docs/guides/adding.md has the recipes."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from sft_play.choices.engines import TRAITS
from sft_play.choices.kernels import LAYERS
from sft_play.choices.metrics import METRICS
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.model.architecture.families import FAMILIES
from sft_play.rows.formats import FORMATS
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "sft_play"
ORDINARY = {
    "none",
    "text",
    "messages",
    "library",
    "contains",
    "tool_calls",
}  # words of many other things, too
TABLES = {
    "choices/engines.py": TRAITS,
    "choices/kernels.py": LAYERS,
    "choices/metrics.py": METRICS,
    "choices/optimizers.py": OPTIMIZERS,
    "model/architecture/families.py": FAMILIES,
    "rows/formats.py": FORMATS,
}
# Who else names an engine: the targets of make, and a refusal that says which engines to use instead.
OTHERS = {name: {"spelling.py", "engines/zero3.py"} for name in ("deepspeed_z2", "fsdp2")}
OTHERS["ddp"] = {"spelling.py"}
# Of a knob that has no table: the files that know it.
KNOBS = {
    "kept_layers": {"parts.py", "model/layers/recomputation.py"},
    "mlp_tiles": {
        "parts.py",
        "config/train.py",
        "planning/candidates/tiles.py",
    },
    "sequence_ranks": {
        "parts.py",
        "config/parallel.py",
        "planning/request.py",
        "planning/planner.py",
        "planning/candidates/drafts.py",
        "planning/candidates/sequence.py",
        "planning/rows/facts.py",
        "planning/speed/clock.py",
        "planning/answers/context.py",
        "planning/answers/other_machines.py",
        "reasons/choices.py",
        "sizing/step.py",
        "sizing/trace/trace.py",
        "train/probe.py",
        "train/rows.py",
        "train/run.py",
        "train/session.py",
        "train/verify.py",
    },
}

# Who may ask whether rows have images, or a model sees; to all others, values that hold without any are given.
MAY_ASK_OF_IMAGES = {
    "vision/",
    "rows/images.py",  # reads them in data
    "data/hub_rows.py",  # reads them in data of the Hub, which `datasets` would decode
    "data/splitting.py",  # cuts rows, and none within an image
    "builtin/shapes.py",  # draws them
    "model/architecture/shape.py",  # tells which models there are, those that see among them
    "model/build.py",
    "model/load.py",
    "model/weights/",  # keeps what sees as it is, and what tells how it sees
    "sizing/step.py",  # describes a step
    "sizing/estimate/micro_batches.py",  # picks those that decide: with images, what waits beside them may
    "train/session.py",  # makes the collator
}
OF_IMAGES = re.compile(
    r"(?<![a-z])(images?(?!_folder)|pictures?|vision|pixels?|recipe|gallery|thumbnails?|seeing|tower|look)(?![a-z])"
    r"|RowFits|eval_fits|\bspec\.fits|\.(held_)?units\b",
    re.IGNORECASE,
)


@cache
def words_of_the_package() -> dict[str, set[str]]:
    """File -> the names and the words of texts in it, but for docstrings."""
    return {path.relative_to(PACKAGE).as_posix(): _words(path.read_text()) for path in PACKAGE.rglob("*.py")}


def _words(source: str) -> set[str]:
    found: set[str] = set()
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                found.add(name)
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                found.update(re.findall(r"[\w-]+", text))
    return found


def files_that_name(word: str) -> set[str]:
    return {file for file, words in words_of_the_package().items() if word in words}


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table, rows in TABLES.items() for name in rows if name not in ORDINARY],
)
def test_a_choice_is_named_by_its_row_alone(table, name):
    assert files_that_name(name) == {table} | OTHERS.get(name, set())


@pytest.mark.parametrize(("knob", "files"), KNOBS.items())
def test_a_knob_is_named_where_it_is_known(knob, files):
    assert files_that_name(knob) == files


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """What is tested anywhere in a file."""
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                yield test
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                yield node
            case ast.comprehension(ifs=tests):
                yield from tests
            case ast.Match(subject=subject):
                yield subject


def test_no_file_asks_of_images_but_those_that_deal_with_them():
    found = [
        f"{file}:{test.lineno}: {text}"
        for path in PACKAGE.rglob("*.py")
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith(tuple(MAY_ASK_OF_IMAGES))
        for test in conditions(ast.parse(path.read_text()))
        if OF_IMAGES.search(text := ast.unparse(test))
    ]
    assert found == []

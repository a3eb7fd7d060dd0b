#!/usr/bin/env python3
"""Measures how readable a package is: `make check-style`, or `make check-style AGAINST=main`.

Prints one line per measure. With `--against REVISION` it also measures the package at that git revision,
formatted by today's rules so that line width does not decide, and exits with 1 if a measure got worse. All
figures come from syntax trees and tokens: nothing is imported. What ruff, mypy and tests hold everywhere, as
docstrings, types and no circles, is not measured.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RULES = Path(__file__).parents[1] / "pyproject.toml"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
SHAPE = re.compile(r"\[[\w.][^\]\n]*\]|\b(scalar|any shape|same shape)\b")  # as in "[batch, seq]"


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        name: what is measured.
        text: the value as it is printed.
        cost: the value if lower is better, its negative if higher is better, None if neither is.
    """

    name: str
    text: str
    cost: float | None = None


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: dotted, without the package: "planning.request", and "planning" for planning/__init__.py.
        is_package: whether it is an __init__.py.
        text: the source.
        tree: its syntax tree.
    """

    name: str
    is_package: bool
    text: str
    tree: ast.Module


def read_modules(package: Path) -> list[Module]:
    """All modules of a package folder, in the order of their paths."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(package).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, is_package, text, ast.parse(text)))
    return modules


def measure(package: Path) -> list[Measure]:
    """All measures of a package folder, in the order of the table."""
    modules = read_modules(package)
    trees = [module.tree for module in modules]
    return [
        *measure_sizes(modules),
        *measure_functions(trees),
        measure_comments(modules),
        *measure_density(modules),
        share("tensor functions with shapes", list(tensor_function_has_shapes(trees))),
    ]


def share(name: str, hits: Sequence[bool]) -> Measure:
    """The percentage of hits, of which more are better; n/a without any cases."""
    if not hits:
        return Measure(name, "n/a")
    percent = round(100 * sum(hits) / len(hits), 1)
    return Measure(name, f"{percent}% of {len(hits)}", -percent)


def measure_sizes(modules: list[Module]) -> list[Measure]:
    """Files and their lines; empty files (mostly __init__.py) do not count."""
    lengths = [len(module.text.splitlines()) for module in modules if module.text.strip()]
    return [
        Measure("files", str(len(lengths))),
        Measure("lines", str(sum(lengths))),
        Measure("file median, lines", f"{statistics.median(lengths):.0f}"),
        Measure("file max, lines", str(max(lengths)), max(lengths)),
    ]


def measure_functions(trees: list[ast.Module]) -> list[Measure]:
    """Lengths of all functions, nested ones and methods too; decorators are not counted."""
    lengths = [node.end_lineno - node.lineno + 1 for node in functions_of(trees)]
    p90 = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    return [
        Measure("function median, lines", f"{statistics.median(lengths):.0f}"),
        Measure("function p90, lines", f"{p90:.0f}", round(p90)),
        Measure("function max, lines", str(max(lengths)), max(lengths)),
    ]


def functions_of(trees: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of the trees."""
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def measure_comments(modules: list[Module]) -> Measure:
    """Comments per line of code; a docstring counts as code, a blank line does not."""
    comments, code = 0, 0
    for module in modules:
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            comments += token.type == tokenize.COMMENT
            if token.type not in NOT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        code += len(lines)
    return Measure("comments per code line", f"{100 * comments / code:.1f}%")


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All arguments but self and cls."""
    listed = function.args
    rest = [argument for argument in (listed.vararg, listed.kwarg) if argument]
    everything = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, *rest]
    return [argument for argument in everything if argument.arg not in ("self", "cls")]


def tensor_function_has_shapes(trees: Iterable[ast.Module]) -> Iterator[bool]:
    """For each function with Tensor in its signature, whether its docstring holds a shape.

    Functions inside of others are left out.
    """
    functions = functions_of(trees)
    inner = {node for outer in functions for node in ast.walk(outer) if node is not outer}
    for function in functions:
        if function in inner:
            continue
        annotations = [argument.annotation for argument in arguments_of(function)]
        written = [ast.unparse(node) for node in (*annotations, function.returns) if node]
        if "Tensor" in " ".join(written):
            yield bool(SHAPE.search(ast.get_docstring(function) or ""))


def measure_density(modules: list[Module]) -> list[Measure]:
    """How much is packed into single statements: conditional expressions and comprehensions."""
    nodes = [node for module in modules for node in ast.walk(module.tree)]
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]
    nested = {inner for outer in conditionals for inner in ast.walk(outer) if is_inner(inner, outer)}
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    crowded = sum(count_comprehensions(statement) > 1 for statement in statements)
    lines = sum(len(module.text.splitlines()) for module in modules)
    per_thousand = round(1000 * len(conditionals) / lines, 1)
    return [
        Measure("nested conditional expressions", str(len(nested)), len(nested)),
        Measure("statements with > 1 comprehension", str(crowded), crowded),
        Measure("ternaries per 1,000 lines", str(per_thousand), per_thousand),
    ]


def is_inner(node: ast.AST, outer: ast.AST) -> bool:
    """Whether a node below `outer` is a conditional expression of its own."""
    return node is not outer and isinstance(node, ast.IfExp)


def count_comprehensions(statement: ast.stmt) -> int:
    """Comprehensions in a statement itself, not in the statements of its body."""
    count, pending = 0, list(ast.iter_child_nodes(statement))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            continue
        count += isinstance(node, COMPREHENSIONS)
        pending.extend(ast.iter_child_nodes(node))
    return count


def import_graph(modules: list[Module], package: str) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, also within functions and under TYPE_CHECKING."""
    known = {module.name for module in modules}
    graph = {}
    for module in modules:
        named = imported_names(module, package)
        graph[module.name] = {name for name in named if name in known} - {module.name}
    return graph


def imported_names(module: Module, package: str) -> set[str]:
    """What a module's imports name within the package ("": anywhere); attributes are still among them.

    `from package.data import chat, LIMIT` gives data.chat and data.LIMIT, and data for the latter alone.
    """
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, module, package)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    prefix = f"{package}." if package else ""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def absolute_base(statement: ast.ImportFrom, module: Module, package: str) -> str:
    """The dotted name after `from`, with leading dots resolved."""
    if not statement.level:
        return statement.module or ""
    here = [*filter(None, [package, *module.name.split(".")])]
    up = statement.level - module.is_package
    parts = here[: len(here) - up]
    return ".".join([*parts, *filter(None, [statement.module])])


def measure_revision(package: Path, revision: str) -> list[Measure]:
    """The measures of the same package folder at a git revision, formatted by today's rules."""
    folder = package.resolve()
    archive = subprocess.run(
        ["git", "archive", "--format=zip", revision, "."], cwd=folder, capture_output=True, check=False
    )
    if archive.returncode:
        sys.exit(f"error: {package} at {revision}: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / folder.name
        with zipfile.ZipFile(io.BytesIO(archive.stdout)) as files:
            files.extractall(target)
        ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--no-cache", f"--config={RULES}"]
        subprocess.run([*ruff, str(target)], check=True)
        return measure(target)


def worse(now: Measure, then: Measure) -> bool:
    """Whether a measure got worse; one that has no better side never does."""
    return now.cost is not None and then.cost is not None and now.cost > then.cost


def table(now: list[Measure], then: list[Measure] | None, revision: str | None) -> str:
    """The measures as a Markdown table, with the revision's beside them if there is one."""
    if then is None:
        rows = [("measure", "value"), *((here.name, here.text) for here in now)]
    else:
        rows = [("measure", "now", f"{revision}")]
        for here, before in zip(now, then, strict=True):
            rows.append((here.name, here.text + (" (worse)" if worse(here, before) else ""), before.text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a measure is worse than at the revision."""
    parser = argparse.ArgumentParser(description="Measure how readable a package is.")
    parser.add_argument("package", nargs="?", type=Path, default=Path("sft_play"), help="folder to measure")
    parser.add_argument("--against", metavar="REVISION", help="git revision to compare with")
    args = parser.parse_args(argv)
    if not any(args.package.rglob("*.py")):
        parser.error(f"{args.package}: no Python files there")
    now = measure(args.package)
    then = measure_revision(args.package, args.against) if args.against else None
    print(table(now, then, args.against))
    return int(then is not None and any(map(worse, now, then)))


if __name__ == "__main__":
    sys.exit(main())

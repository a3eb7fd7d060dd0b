"""docs/reference/python.md, made from the signatures and docstrings of the Python API."""

import ast
import inspect
import re
from types import ModuleType
from typing import Any

import sft_play.api
import sft_play.results

HEAD = """# Python

What scripts and notebooks call, made by `make docs` from the docstrings of `sft_play/api.py` and
`sft_play/results.py`. Importing them imports neither torch nor transformers. Errors are subclasses of
`sft_play.errors.SftPlayError`.

```python
import sft_play.api as sft
```
"""
PART = re.compile(r"^(Args|Raises|Returns):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\S[^:]*): ", re.MULTILINE)


def python_reference() -> str:
    """The page, in Markdown."""
    functions = [_function(name, found) for name, found in _public(sft_play.api, inspect.isfunction)]
    classes = [_class(name, found) for name, found in _public(sft_play.results, inspect.isclass)]
    return "\n".join([HEAD, *functions, *classes])


def _public(module: ModuleType, kind: Any) -> list[tuple[str, Any]]:
    """The public functions or classes that a module defines, in its order."""
    found = inspect.getmembers(module, lambda one: kind(one) and one.__module__ == module.__name__)
    own = [(name, one) for name, one in found if not name.startswith("_")]
    return sorted(own, key=lambda pair: inspect.getsourcelines(pair[1])[1])


def _function(name: str, function: Any) -> str:
    words, keyword_only = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        starred = f"**{one.name}" if one.kind is one.VAR_KEYWORD else one.name
        words.append(starred if one.default is one.empty else f"{starred}={one.default!r}")
    return f"## {name}\n\n`sft.{name}({', '.join(words)})`\n\n{_markdown(inspect.getdoc(function) or '')}\n"


def _class(name: str, found: Any) -> str:
    """A class with its fields, which have a docstring or a comment each, and its properties."""
    source = inspect.getsource(found)
    (body,), lines, rows = ast.parse(source).body, source.splitlines(), list[tuple[str, str, str]]()
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            text = lines[node.lineno - 1].partition("  # ")[2]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            rows.append((ast.unparse(node.target), ast.unparse(node.annotation), text))
        elif isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list):
            returns = ast.unparse(node.returns) if node.returns else ""
            rows.append((node.name, returns, ast.get_docstring(node) or ""))
    table = "".join(
        f"| `{name}` | `{kind.replace('|', 'or')}` | {_line(text)} |\n" for name, kind, text in rows
    )
    head = "| attribute | type | what it is |\n|---|---|---|\n"
    return f"## {name}\n\n{inspect.getdoc(found)}\n\n{head}{table}"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;")


def _markdown(docstring: str) -> str:
    """A Google-style docstring with its arguments and errors as lists."""

    def listed(part: re.Match[str]) -> str:
        entries = ENTRY.split(part[2])[1:]
        pairs = zip(entries[::2], entries[1::2], strict=True)
        lines = [f"- `{name}`: {' '.join(text.split())}" for name, text in pairs]
        return f"**{part[1]}**\n\n" + "\n".join(lines) + "\n\n"

    return PART.sub(listed, docstring + "\n").strip()

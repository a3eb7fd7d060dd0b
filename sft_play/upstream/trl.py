"""What we change in TRL, and take of its private parts."""

import __future__

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

UTILITIES = "trl.trainer.utils"  # where the fused head is, among much else
FOR_OTHERS = {"pandas", "datasets"}  # what is imported there, and the head has no use for


def add_fused_head(model: Any, function: object) -> None:
    """Gives a causal language model TRL's fused output head (since 1.15), which computes with this function.

    `function.apply` takes the arguments of its kernel, with supervised tokens alone on any device. TRL's own
    trainers in this process keep its kernel: the head is made by the same code over other globals. What makes
    this unnecessary: the kernel as an argument of `add_fused_lm_head`.
    """
    from trl.trainer.utils import add_fused_lm_head

    ours = {"_ChunkedLogProbFunction": function, "_use_triton": lambda device: True}
    add = FunctionType(add_fused_lm_head.__code__, {**add_fused_lm_head.__globals__, **ours})
    add(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "is_top1"))


@contextmanager
def head_alone() -> Iterator[None]:
    """In the block, the fused head comes without pandas and datasets, a sixth of what a plan imports.

    After it, a trainer imports the whole module. What makes this unnecessary: a module of its own for the
    head (1.15 has it beside tables and samplers of rows).
    """
    if UTILITIES in sys.modules:
        yield
        return
    sys.modules[UTILITIES] = _without_others()
    try:
        yield
    finally:
        del sys.modules[UTILITIES]


@cache
def _without_others() -> ModuleType:
    """The module without these imports. Annotations stay text: some name what is not imported."""
    spec = find_spec(UTILITIES)
    assert spec and spec.origin
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _imported(node) & FOR_OTHERS]
    sys.modules[UTILITIES] = module = module_from_spec(spec)  # a dataclass looks for its module there
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, spec.origin, "exec", flags), vars(module))  # noqa: S102 - TRL's own code
    return module


def _imported(node: ast.stmt) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()

"""Metrics of one's own: functions that eval.metrics names as module:function. Does not import torch."""

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sft_play.builtin import replies
from sft_play.choices.metrics import DEFAULT
from sft_play.commands.answers import Compared
from sft_play.config.inputs import GIVEN
from sft_play.config.load import ResolvedConfig
from sft_play.config.resolved import OF_RUN
from sft_play.errors import ConfigError
from sft_play.spelling import var
from sft_play.ui.console import warn

Judge = Callable[[str, str, Mapping[str, Any]], Any]  # of an answer, its reference and the row

_handed_over = set[str]()  # functions that the code of this process has given itself, by name


def hand_over(name: str) -> None:
    """Lets runs of this process name a function, also from their folders: whoever calls us has it already."""
    _handed_over.add(name)


def require_given(resolved: ResolvedConfig) -> None:
    """Refuses functions that the folder of a run names, but for those of built-in rows; ConfigError."""
    ours = f"{replies.__name__}:"
    named = [name for name in resolved.config.eval.metrics if ":" in name and not name.startswith(ours)]
    own = [name for name in named if name not in _handed_over]
    origin = Path(resolved.origins.get("eval.metrics", ""))
    if own and (origin.name == OF_RUN or origin.parent.name == GIVEN):
        metrics = ",".join(resolved.config.eval.metrics)
        again, without = (var(ARGS=f"eval.metrics=[{names}]") for names in (metrics, DEFAULT[0]))
        if any(name.startswith("__main__:") for name in own):  # of a script or notebook, as no command is
            again = f"metrics=[..., {own[0].partition(':')[2]}] to sft.evaluate in the script that has it"
        raise ConfigError(
            f"eval.metrics: {origin} names {', '.join(own)}, and code that the folder of a run names is run "
            f"only if you name it too; add {again}, or do without it: {without}"
        )


def judges(names: Iterable[str]) -> dict[str, Judge]:
    """The functions among the metrics, by their own names.

    Raises:
        ConfigError: a module cannot be imported, or has no such function.
    """
    return {name.partition(":")[2]: _judge(name) for name in names if ":" in name}


def _judge(name: str) -> Judge:
    module, _, function = name.partition(":")
    try:
        with _importing_from_here():
            found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever its code raises
        raise ConfigError(
            f"eval.metrics: {name}: importing {module} fails with {type(error).__name__}: {error}; run the "
            f"command in the folder of {module.partition('.')[0]}, or install its package"
        ) from None
    if not callable(found):
        raise ConfigError(f"eval.metrics: {name}: the module {module} has no function {function}")
    return found


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Also from the folder in which a command was typed, as `python -m` does."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


def try_judges(names: Sequence[str], compared: Compared) -> None:
    """Calls each function once, with a reference as the answer to it; ConfigError says what is wrong."""
    for name, judge in judges(names).items():
        try:
            _judged(judge, compared)
        except Exception as error:  # whatever its code raises
            raise ConfigError(
                f"eval.metrics: {_said(name, compared, error)}. It was tried with a reference as the answer; "
                "it takes an answer, its reference and the row, and returns a number, or true or false"
            ) from None


def judged(name: str, judge: Judge, compared: Sequence[Compared]) -> list[float | bool | None]:
    """What a function says of each answer; None where it fails, and the first failure is shown."""
    values, failed = list[float | bool | None](), list[str]()
    for one in compared:
        try:
            values.append(_judged(judge, one))
        except Exception as error:  # whatever its code raises: the other scores are not lost for it
            values.append(None)
            failed.append(_said(name, one, error))
    if failed:
        warn(f"eval.metrics: {failed[0]}; {len(failed)} of {len(compared)} answers have no {name}")
    return values


def _judged(judge: Judge, compared: Compared) -> float | bool:
    value = judge(compared.answer, compared.reference, compared.row)
    value = value.item() if hasattr(value, "item") else value  # of NumPy or PyTorch
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise TypeError(f"it returned {value!r:.60}; expected a number, or true or false")
    return value


def _said(name: str, compared: Compared, error: Exception) -> str:
    return f"{name} on the row {compared.row.get('source')}: {type(error).__name__}: {error}"

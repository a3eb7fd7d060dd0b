"""A plugin of pytest that prints which tests come closest to their tolerances: `pytest -p tests.margins`.

A margin is the share of what is allowed that a difference does not take. Those of tests.rounding depend on the
machine and are listed by themselves; those of pytest.approx and torch.testing.assert_close come after them. Works
with several workers. A difference above its tolerance is left to the test.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._comparison import get_tolerances

from tests import rounding

SHOWN = 3
SUMS, OTHERS = "two orders of summation", "pytest.approx and assert_close"


def share(difference: float, allowed: float) -> float:
    """What a difference takes of what is allowed."""
    return difference / allowed if allowed else 0.0


def watch_approx(tell: Callable[[float], None]) -> None:
    """Notes each comparison with a pytest.approx of a number; lists and dicts are compared number by number."""
    kind = type(pytest.approx(1.0))
    equal = kind.__eq__

    def noted(self: Any, actual: Any) -> bool:
        same = equal(self, actual)
        if same and isinstance(self.expected, int | float):
            tell(share(abs(float(actual) - self.expected), self.tolerance))
        return same

    kind.__eq__ = noted  # type: ignore[method-assign]


def watch_assert_close(tell: Callable[[float], None]) -> None:
    """Notes each torch.testing.assert_close of two tensors."""
    check = torch.testing.assert_close

    def noted(actual: Any, expected: Any, **options: Any) -> None:
        check(actual, expected, **options)
        if isinstance(expected, torch.Tensor) and expected.numel():
            given = {name: options.get(name) for name in ("rtol", "atol")}
            rtol, atol = get_tolerances(actual, expected, **given)
            allowed = atol + rtol * expected.detach().double().abs()
            difference = (actual.detach().double() - expected.detach().double()).abs()
            tell(float((difference / allowed.clamp(min=1e-300)).nan_to_num().max()))

    torch.testing.assert_close = noted


class Margins:
    """Keeps the largest share of each test, and prints the largest of all."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}  # of the test that runs, by kind
        self.of_tests: dict[str, list[tuple[float, str]]] = {SUMS: [], OTHERS: []}
        rounding.observers.append(lambda share: self.note(SUMS, share))
        watch_approx(lambda share: self.note(OTHERS, share))
        watch_assert_close(lambda share: self.note(OTHERS, share))

    def note(self, kind: str, share: float) -> None:
        self.largest[kind] = max(float(share), self.largest.get(kind, 0.0))  # no NumPy type is sent

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.largest.clear()
        try:
            return (yield)
        finally:  # with several workers, properties are what reaches the one that prints
            item.user_properties.extend((kind, share) for kind, share in self.largest.items())

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            for kind, share in report.user_properties:
                if kind in self.of_tests:
                    self.of_tests[kind].append((share, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter):
        for kind, found in self.of_tests.items():
            terminalreporter.section(f"lowest margins: {kind}, {len(found)} tests")
            for share, test in sorted(found, reverse=True)[:SHOWN]:
                terminalreporter.write_line(f"{100 * (1 - share):5.1f}% left  {test}")


def pytest_configure(config):
    config.pluginmanager.register(Margins())

"""A long suite that was cut goes on with what has not passed."""

from types import SimpleNamespace

import pytest

from tests.resumed import Resumed


class Config:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)


def run(file, outcomes: dict[str, bool], status: int) -> list[str]:
    """What is run of tests with these outcomes, in a session that ends with this status."""
    plugin = Resumed(file)
    items = [SimpleNamespace(nodeid=name) for name in outcomes]
    plugin.pytest_collection_modifyitems(Config, items)
    for item in items:
        plugin.pytest_runtest_logreport(
            SimpleNamespace(when="call", passed=outcomes[item.nodeid], nodeid=item.nodeid)
        )
    plugin.pytest_sessionfinish(pytest.ExitCode(status))
    return [item.nodeid for item in items]


def test_only_what_has_not_passed_is_run_again_until_all_have(tmp_path):
    file = tmp_path / "passed" / "code"
    assert run(file, {"a": True, "b": False, "c": True}, 1) == ["a", "b", "c"]
    assert run(file, {"a": True, "b": True, "c": True, "d": True}, 0) == ["b", "d"]
    assert run(file, {"a": True, "b": True}, 0) == ["a", "b"]

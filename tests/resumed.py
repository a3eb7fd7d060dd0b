"""A plugin of pytest for suites that take long: `pytest -p tests.resumed`.

A suite that was cut or has failed goes on with the tests that have not passed yet, unless a file has changed.
"""

from pathlib import Path

import pytest

from sft_play.fingerprints import sources_digest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS, SUFFIXES = ("sft_play", "tests", "benchmarks", "configs"), (".py", ".yaml", ".json", ".jinja")


class Resumed:
    """Remembers the names of the tests that have passed, until all have."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.passed = set(file.read_text().splitlines()) if file.exists() else set()
        self.called = ""  # the test whose body has passed; what it leaves behind is not cleaned up yet

    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if item.nodeid in self.passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.called = report.nodeid
        if report.when == "teardown" and report.passed and report.nodeid == self.called:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session):
        if session.config.option.collectonly:
            return
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK  # all had passed when it was cut
        if session.exitstatus == pytest.ExitCode.OK:
            self.file.unlink(missing_ok=True)


def pytest_configure(config):
    found = [path for name in FOLDERS for path in (REPOSITORY / name).rglob("*") if path.suffix in SUFFIXES]
    digest = sources_digest(*sorted(path for path in found if path.is_file()))
    config.pluginmanager.register(Resumed(config.rootpath / ".pytest_cache" / "passed" / digest[:16]))

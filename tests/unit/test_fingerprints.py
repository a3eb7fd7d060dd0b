import subprocess
import sys

import pytest

from sft_play import fingerprints
from sft_play.fingerprints import installed_versions, sources_digest
from sft_play.sizing.step import step_code


@pytest.fixture(autouse=True)
def _read_anew():
    sources_digest.cache_clear()
    yield
    sources_digest.cache_clear()


def digest(*paths) -> str:
    sources_digest.cache_clear()
    return sources_digest(*paths)


def test_a_changed_renamed_or_added_source_gives_another_digest(tmp_path):
    (tmp_path / "a.py").write_text("one")
    seen = {digest(tmp_path)}
    for name, text in (("a.py", "two"), ("b.py", "two"), ("c.py", "")):
        (tmp_path / name).write_text(text)
        seen.add(digest(tmp_path))
    (tmp_path / "c.py").rename(tmp_path / "d.py")
    seen.add(digest(tmp_path))
    (tmp_path / "deeper" / "down").mkdir(parents=True)
    (tmp_path / "d.py").rename(tmp_path / "deeper" / "down" / "d.py")
    seen.add(digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "notes.txt").write_text("no source")
    assert digest(tmp_path) in seen


def test_a_single_file_counts_too(tmp_path):
    (tmp_path / "a.py").write_text("one")
    before = digest(tmp_path / "a.py")
    (tmp_path / "a.py").write_text("two")
    assert digest(tmp_path / "a.py") != before


def test_packages_that_are_not_installed_are_left_out():
    assert list(installed_versions(("torch", "no-such-package"))) == ["torch"]


@pytest.mark.parametrize("package", ["trl", "peft", "bitsandbytes"])
def test_the_code_of_a_step_names_the_versions_of_its_libraries(monkeypatch, package):
    before, real = step_code(), fingerprints._version
    monkeypatch.setattr(fingerprints, "_version", lambda name: "99" if name == package else real(name))
    assert step_code() != before


def test_nothing_is_hashed_when_modules_are_imported():
    script = (
        "from sft_play import fingerprints\n"
        "import sft_play.data.prepare, sft_play.builtin.demo, sft_play.sizing.estimate.estimator\n"
        "assert fingerprints.sources_digest.cache_info().misses == 0\n"
        "assert fingerprints._version.cache_info().misses == 0"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

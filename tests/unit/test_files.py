"""A file appears whole or not at all."""

import os
import tracemalloc
from pathlib import Path

import pytest

from sft_play.files import read_whole, replacing_file, write_atomic
from sft_play.units import MIB
from tests.conftest import file_size_limit


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "file"
    for content in ("täxt", b"\x00\xff", ""):
        write_atomic(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "before")
    with pytest.raises(OSError, match="File too large"), file_size_limit(16):
        write_atomic(path, "after" * 10)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(KeyError), replacing_file(path) as temporary:
        temporary.write_text("half")
        raise KeyError("row")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "removed" / "file", "text")


@pytest.mark.parametrize("flush", [True, False])
def test_the_content_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch, flush):
    done = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor):
        done.append("flushed")
        sync(descriptor)

    def note_replace(path, target):
        done.append("named")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_atomic(tmp_path / "file", "text", flush=flush)
    assert done == (["flushed", "named"] if flush else ["named"])


def test_no_other_module_flushes_or_makes_temporary_files():
    package = Path(__file__).resolve().parents[2] / "sft_play"
    words = ("fsync", "tempfile", "os.replace", "os.rename")
    found = [
        f"{path.relative_to(package)}: {word}"
        for path in package.rglob("*.py")
        for word in words
        if path.name != "files.py" and word in path.read_text()
    ]
    assert not found


def test_a_short_file_is_read_in_little_memory_however_long_it_may_be(tmp_path):
    """A run whose memory is limited reads its metrics at its end."""
    path = tmp_path / "metrics"
    path.write_bytes(b"line\n")
    tracemalloc.start()
    try:
        assert read_whole(path, 256 * MIB) == b"line\n"
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_whole(path, 4)

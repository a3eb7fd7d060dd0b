"""What a folder's manifest notices, and how a folder is replaced."""

import hashlib
import os
from pathlib import Path

import pytest

from sft_play import manifest
from sft_play.manifest import (
    MANIFEST,
    files_in,
    find_damage,
    has_manifest,
    hash_files,
    read_manifest,
    replacing,
    write_manifest,
)

FILES = {"a.bin": b"weights" * 100, "b.bin": b"states" * 100, "below/c.bin": b"shard", "empty": b""}


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "whole")


def written_files(folder):
    (folder / "below").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


def written(folder):
    written_files(folder)
    write_manifest(folder, {"step": 3}, hash_files(folder, files_in(folder), flush=True))
    return folder


def flip_bit(path, place=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def test_a_whole_folder_has_no_damage_and_its_manifest_says_what_it_is(folder):
    (folder / "notes.txt").write_text("mine")
    assert find_damage(folder) is None
    assert read_manifest(folder)["step"] == 3
    assert read_manifest(folder)["files"]["a.bin"] == {
        "bytes": 700,
        "sha256": [hashlib.sha256(FILES["a.bin"]).hexdigest()],
    }


@pytest.mark.parametrize("place", [0, 250, -1])
@pytest.mark.parametrize("name", ["a.bin", "b.bin"])
def test_a_flipped_bit_is_noticed_in_every_part_of_a_file(tmp_path, monkeypatch, name, place):
    monkeypatch.setattr(manifest, "PART_BYTES", 100)
    folder = written(tmp_path / "parts")
    assert find_damage(folder) is None and len(read_manifest(folder)["files"]["a.bin"]["sha256"]) == 7
    flip_bit(folder / name, place)
    assert find_damage(folder) == f"{name} has changed since it was written"
    assert find_damage(folder, hashes=False) is None


def test_every_bit_of_the_manifest_itself_counts(folder):
    whole = (folder / MANIFEST).read_bytes()
    for place in range(len(whole)):
        flip_bit(folder / MANIFEST, place)
        still_the_same = read_manifest(folder)  # a space for another white space, for instance
        assert not still_the_same or still_the_same["files"] == hash_files(folder, FILES), whole[place:][:20]
        (folder / MANIFEST).write_bytes(whole)
    assert find_damage(folder) is None


def test_what_is_cut_missing_swapped_or_a_link_is_named(folder):
    def damage_after(spoil):
        spoil()
        found = find_damage(folder)
        for name, content in FILES.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(content)
        assert find_damage(folder) is None
        return found

    assert damage_after(lambda: (folder / "a.bin").write_bytes(b"we")) == "a.bin has 2 bytes instead of 700"
    assert damage_after((folder / "below" / "c.bin").unlink) == "below/c.bin is missing"
    assert "a.bin has 600" in damage_after(lambda: (folder / "b.bin").replace(folder / "a.bin"))

    def link():
        (folder / "a.bin").rename(folder / "elsewhere")
        (folder / "a.bin").symlink_to(folder / "elsewhere")

    assert damage_after(link) == "a.bin is a symbolic link"


def test_without_its_manifest_or_with_a_cut_one_a_folder_is_damaged(folder):
    (folder / MANIFEST).write_text("{")
    assert has_manifest(folder) and "is missing or damaged" in find_damage(folder)
    (folder / MANIFEST).unlink()
    assert not has_manifest(folder) and "is missing or damaged" in find_damage(folder)


def test_a_model_card_may_be_edited(folder):
    (folder / "README.md").write_text("by hand")
    assert find_damage(folder) is None and "README.md" not in files_in(folder)


def test_only_some_files_can_be_checked(folder):
    flip_bit(folder / "a.bin")
    assert find_damage(folder, only=lambda name: name != "a.bin") is None


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "result"
    for text in ("one", "two"):
        with replacing(target, {"step": 1}) as folder:
            (folder / "file").write_text(text)
        assert (target / "file").read_text() == text and find_damage(target) is None
    assert list(tmp_path.iterdir()) == [target]


def test_what_fails_leaves_the_earlier_folder_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "result"
    with replacing(target, {}) as folder:
        (folder / "file").write_text("one")
    with pytest.raises(OSError, match="disk"), replacing(target, {}) as folder:
        (folder / "file").write_text("two")
        raise OSError("disk")
    rename = type(target).rename

    def fail_at_the_last(path, to):
        if to == target and path.name.endswith("-incomplete"):
            raise OSError("disk")
        return rename(path, to)

    monkeypatch.setattr(type(target), "rename", fail_at_the_last)
    with pytest.raises(OSError, match="disk"), replacing(target, {}) as folder:
        (folder / "file").write_text("three")
    assert (target / "file").read_text() == "one" and list(tmp_path.iterdir()) == [target]


def test_after_a_kill_between_the_two_renames_the_earlier_folder_comes_back(tmp_path):
    (tmp_path / "result.sft-play-earlier").mkdir()
    (tmp_path / "result.sft-play-earlier" / "file").write_text("one")
    with pytest.raises(OSError, match="disk"), replacing(tmp_path / "result", {}):
        raise OSError("disk")
    assert (tmp_path / "result" / "file").read_text() == "one"


def test_every_file_and_folder_is_flushed_before_the_one_rename_and_the_parent_after_it(
    tmp_path, monkeypatch
):
    done = []
    flush, rename = os.fsync, type(tmp_path).rename

    def note_flush(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    def note_rename(path, to):
        done.append(f"{path.name} -> {to.name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(type(tmp_path), "rename", note_rename)
    with replacing(tmp_path / "result", {}) as folder:
        written_files(folder)
    before, after = done[: done.index("result.sft-play-incomplete -> result")], done[-1:]
    assert before[:4] == ["a.bin", "b.bin", "c.bin", "empty"] and before[4].startswith(f".{MANIFEST}.")
    assert set(before[5:]) == {"below", "result.sft-play-incomplete"} and after == [tmp_path.name]

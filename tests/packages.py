"""Tests of extras and of newer libraries, which are skipped where the package is not installed, or older."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.version import Version

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao (`make install EXTRAS=float8`)"
)


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Skips a test with an older transformers than it needs."""
    older = Version(version("transformers")) < Version(release)
    return pytest.mark.skipif(older, reason=f"needs transformers {release}")


needs_tiles = needs_transformers("5.21")  # SmolVLM's and Idefics3's pictures

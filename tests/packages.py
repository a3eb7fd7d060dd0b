"""Tests of extras, which are skipped where the package is not installed."""

from importlib.util import find_spec

import pytest

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao (`make install EXTRAS=float8`)"
)

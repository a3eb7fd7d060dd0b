"""Imports: the garbage collector leaves them alone, and comes back; nothing is compiled by them."""

import gc
import importlib
import sys

import pytest

from sft_play.machine.process import collector_off, importing_libraries


@pytest.fixture(autouse=True)
def _frozen_again():
    """Else each full collection of the tests that follow would look at all libraries."""
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("context", [collector_off, importing_libraries])
def test_the_collector_is_off_inside_and_on_again_after_an_error(context):
    with pytest.raises(KeyError), context():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_imported_is_kept_for_good_and_nothing_else(tmp_path, monkeypatch):
    gc.unfreeze()
    with importing_libraries():
        pass
    assert gc.get_freeze_count() == 0
    (tmp_path / "a_new_module.py").write_text("made = [[] for _ in range(10)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with importing_libraries():
        importlib.import_module("a_new_module")
    assert gc.get_freeze_count() > 10
    del sys.modules["a_new_module"]

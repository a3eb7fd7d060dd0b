"""Imports of bitsandbytes leave PyTorch's compiler out; that they do, ranks of tests/integration assert."""

import sys
from importlib.machinery import PathFinder

import bitsandbytes
import torch

from sft_play.upstream import bitsandbytes as ours


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch):
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: found.append(settings) or function)
    double = ours._when_called(lambda number: 2 * number, dynamic=False)
    assert found == []
    assert [double(2), double(3)] == [4, 6] and found == [{"dynamic": False}]


def test_one_module_is_found_and_only_in_the_block():
    before = list(sys.meta_path)
    with ours.compiled_when_called():
        spec = sys.meta_path[0].find_spec(ours.COMPILED, bitsandbytes.backends.default.__path__)
        assert (
            isinstance(spec.loader, ours._Loader)
            and "torch.compile(fn" in spec.loader.get_data(spec.origin).decode()
        )
        assert sys.meta_path[0].find_spec("bitsandbytes.optim", bitsandbytes.__path__) is None
    assert sys.meta_path == before and PathFinder in before

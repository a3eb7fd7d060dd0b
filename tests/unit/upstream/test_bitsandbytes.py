"""Imports of bitsandbytes leave PyTorch's compiler out; that they do, ranks of tests/integration assert."""

import torch

from sft_play.upstream import bitsandbytes as ours


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch):
    found = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: found.append(settings) or function)
    double = ours._when_called(lambda number: 2 * number, dynamic=False)
    assert found == []
    assert [double(2), double(3)] == [4, 6] and found == [{"dynamic": False}]

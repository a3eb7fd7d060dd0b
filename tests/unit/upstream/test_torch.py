"""What is changed in PyTorch for a while."""

import subprocess
import sys

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from sft_play.upstream.torch import compiled_when_called, dividing_integers


def test_functions_are_compiled_when_they_are_called_and_once(monkeypatch):
    compiled = []

    def compile_now(function, **options):
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiled_when_called():
        half = torch.compile(lambda x: x / 2, dynamic=False)

        @torch.compile(dynamic=True)
        def twice(x):
            return 2 * x

    assert not compiled and torch.compile is compile_now and twice.__name__ == "twice"
    assert (twice(3), twice(4), half(3)) == (6, 8, 1.5)
    assert compiled == [("twice", {"dynamic": True}), ("<lambda>", {"dynamic": False})]


def test_bitsandbytes_is_imported_without_the_compiler():
    code = (
        "import sys; from sft_play.machine.process import importing_libraries\n"
        "with importing_libraries(): import bitsandbytes\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_integers_ask_for_no_gradients_where_they_are_divided():
    with dividing_integers():
        assert not _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8)).requires_grad
        assert _fsdp_param.nn.Parameter(torch.zeros(2)).requires_grad
    assert _fsdp_param.nn is torch.nn

"""Results of operations that are kept are those of PyTorch, and so is every byte of a trace."""

from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.sizing.recording import fake_results
from sft_play.sizing.recording.fake_results import KeepingFakeMode
from sft_play.sizing.step import JoinedRows, PaddedRows
from sft_play.sizing.trace.trace import trace_step

GPU = {"dtype": "bfloat16", "mixed_precision": "bf16", "device": "cuda"}
JOINED = {"batch": JoinedRows(192), "longest": 64}
CASES = {
    "joined": ("llama", {**GPU, **JOINED, "mode": "lora"}),
    "dropout": ("llama", {**GPU, "batch": PaddedRows(2, 64), "mode": "lora", "lora": LoraSettings(dropout=0.1)}),
    "recomputed-in-4-bits": ("llama", {**GPU, **JOINED, "mode": "qlora", "activations": "recompute"}),
    "offloaded": ("qwen3", {**GPU, **JOINED, "mode": "lora", "activations": "offload"}),
    "divided": ("llama", {**GPU, **JOINED, "mode": "lora", "shards": 2, "activations": "recompute"}),
    "divided-in-ram": ("llama", {**GPU, **JOINED, "mode": "qlora", "shards": 2, "offload": True}),
    "experts": ("mixtral", {**GPU, **JOINED, "mode": "full"}),
    "cpu": ("gemma3_text", {"device": "cpu", "batch": PaddedRows(2, 64), "mode": "full", "optimizer": "adafactor"}),
}  # fmt: skip


DAILY = ("joined", "divided", "cpu")
RARE = ("recomputed-in-4-bits",)  # of what "divided" and "divided-in-ram" have


def mark_of(name: str) -> pytest.MarkDecorator | tuple[()]:
    return () if name in DAILY else pytest.mark.slow if name in RARE else pytest.mark.thorough


@pytest.fixture(params=[pytest.param(name, marks=mark_of(name)) for name in CASES])
def traced(request):
    """`traced()`: the trace of a case."""
    name, changes = CASES[request.param]
    config = small_config(name, WIDE | {"layers": 3, "vocabulary": 300})
    return lambda: trace_step(config, step_of(**changes))


def bytes_of(trace) -> dict[str, bytes]:
    """All that a trace holds, and what follows from it."""
    found = {f"work.{each.name}": getattr(trace.work, each.name) for each in fields(trace.work)}
    found |= {each.name: getattr(trace, each.name) for each in fields(trace) if each.name != "work"}
    found["peaks"] = trace.step.on_device().peaks()
    return {
        name: value.tobytes() if hasattr(value, "tobytes") else repr(value) for name, value in found.items()
    }


def test_a_trace_is_the_same_to_the_byte_without_kept_results(traced, monkeypatch):
    kept = bytes_of(traced())
    monkeypatch.setattr(KeepingFakeMode, "found", lambda *_: (fake_results._LEFT, None))
    assert kept == bytes_of(traced())


def described(value, storages):
    """What may differ between two results, tensors of any shape; strides of single elements mean nothing."""
    if isinstance(value, torch.Tensor):
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
        storage = value.untyped_storage()
        shared = storage._cdata if storage._cdata in storages else None
        kind = type(value), value.dtype, value.device, value.layout, value.requires_grad
        return (
            kind,
            value.shape,
            strides,
            value.storage_offset(),
            storage.nbytes(),
            shared,
            sorted(vars(value)),
        )
    if isinstance(value, (list, tuple)):
        return type(value), [described(each, storages) for each in value]
    return type(value) if isinstance(value, torch.ScriptObject) else value  # work of a process group


def test_each_result_that_is_found_is_the_one_of_pytorch(traced, monkeypatch):
    found, run, wrong = [], KeepingFakeMode.run, {}

    def compared(mode, func, args, kwargs):
        ours, _ = mode.found(func, args, kwargs)
        if ours is fake_results._LEFT:
            return run(mode, func, args, kwargs)
        mode._asks_pytorch = True
        theirs = func(*args, **kwargs)
        given = {
            each.untyped_storage()._cdata for each in fake_results._tensors((args, tuple(kwargs.values())))
        }
        if described(ours, given) != described(theirs, given):
            wrong[str(func)] = described(ours, given), described(theirs, given)
        found.append(func)
        return ours

    monkeypatch.setattr(KeepingFakeMode, "run", compared)
    traced()
    assert not wrong and len(found) > 500


def test_a_tensor_of_another_mode_and_what_changes_a_tensor_are_left_to_pytorch():
    with FakeTensorMode():
        other = torch.empty(3)
    with KeepingFakeMode(allow_non_fake_inputs=True) as mode:
        own = torch.empty(3, 4)
        for func, args in (
            (torch.ops.aten.neg.default, (other,)),
            (torch.ops.aten.add.Tensor, (own, object())),
        ):
            assert mode.found(func, args, {}) == (fake_results._LEFT, None)
        for _ in range(2):
            own.transpose_(0, 1)
        assert own.shape == (3, 4)
        first, second = own + 1, own + 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata

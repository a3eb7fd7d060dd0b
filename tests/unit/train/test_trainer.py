import pytest
import torch

from sft_play.errors import DoesNotFitError
from sft_play.sizing.planner import Plan
from sft_play.train.meter import MemoryMeter
from sft_play.train.trainer import memory_errors_explained

PLAN = Plan(
    micro_batch_size=4, gradient_accumulation_steps=2, effective_batch_size=8, world_size=1, engine="none", max_seq_len=64,
    packing=False, gradient_checkpointing=False, mixed_precision="no", dtype="float32", attention="sdpa", learning_rate=1e-4,
    steps_per_epoch=2, total_steps=2, device="cpu",
)  # fmt: skip


def test_running_out_of_memory_says_what_to_change():
    with pytest.raises(DoesNotFitError, match=r"micro-batch 4 .*\n.*gradient_checkpointing=true or train.batch_size=1"):
        with memory_errors_explained(PLAN, MemoryMeter("cpu")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

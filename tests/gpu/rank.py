"""A rank of a test: one backward pass under DDP with gloo, on its half of the rows.

rank.py <rank> <ranks> <device> <model folder> <folder for the store and the results>
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds its own folder alone

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from sft_play.config.schema import ModelConfig
from sft_play.model.attention import varlen
from sft_play.model.build import load_base
from sft_play.model.layers.loss_head import add_loss_head, token_loss
from sft_play.train.memory_meter import overhead_bytes
from sft_play.units import MIB

LENGTHS = [[7, 12, 5], [9, 3, 12]]  # of the joined rows of each rank, which have equally many tokens
HELD = 64 * MIB  # on the GPU, by rank 1 only


def batch_of(rank: int, device: torch.device) -> dict[str, Any]:
    """Joined rows of random tokens, all supervised."""
    lengths = LENGTHS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 256, (1, sum(lengths)), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "sequence_lengths": lengths}


def make_model(folder: Path, device: torch.device) -> Any:
    """The model with our attention and output head, in fp32."""
    model: Any = load_base(
        ModelConfig(name=str(folder)),
        dtype="float32",
        attn_implementation=varlen.NAME,
        device=device,
        quantize=False,
    )
    add_loss_head(model)
    return model.train()


def main(rank: int, ranks: int, device: torch.device, model: Path, folder: Path) -> None:
    """Leaves the gradients of all ranks, and what this one holds on the device."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks
    )
    wrapped = DistributedDataParallel(make_model(model, device))
    held = torch.empty(HELD * rank, dtype=torch.uint8, device=device)
    token_loss(wrapped, batch_of(rank, device)).backward()
    if rank == 0:
        gradients = {name: each.grad.cpu() for name, each in wrapped.module.named_parameters()}
        torch.save(gradients, folder / "gradients.pt")
    distributed.barrier()  # both hold what they have while each looks
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    found = {"overhead": overhead_bytes(device), "reserved": reserved}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    while not all((folder / f"{other}.json").exists() for other in range(ranks)):
        time.sleep(0.05)
    del held
    os._exit(0)  # a rank that waits for its threads, while the other is gone already, may wait for ever


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(int(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]), *map(Path, sys.argv[4:6]))

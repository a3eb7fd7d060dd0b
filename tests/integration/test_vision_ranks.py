"""One rank has pictures and the other has none: the same gradients as one process has for both."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sft_play.model.architecture.shape import units_of
from sft_play.model.layers.loss_head import token_loss
from tests.vision_built import batch_of, difference, gradients, ours
from tests.vision_models import picture_rows

CASES = [
    (kind, engine, vision)
    for kind in ("smolvlm", "qwen3_vl", "gemma3", "qwen3_5")
    for engine in ("ddp", "fsdp2")
    for vision in ("frozen", "full")
]
IMAGES = [2, 1, 0, 0]  # of the rows, of which each rank has two


def micro_batches(kind, vision):
    rows = picture_rows(kind, 4, seed=11, images=IMAGES)
    batches = [batch_of(kind, rows, chosen, always=vision != "frozen") for chosen in ([0, 1], [2, 3])]
    return batches, sum(label != -100 for row in rows for label in row["labels"])


def work(rank, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit
    )
    for kind, engine, vision in CASES:
        model = ours(kind, vision=vision)
        if engine == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            for unit in units_of(model):
                fully_shard(unit)
            wrapped = model
        batches, count = micro_batches(kind, vision)
        for _ in range(2):  # an unused parameter is only missed in the next one
            model.zero_grad()
            (2 * token_loss(wrapped, batches[rank], count)).backward()
        whole = {
            name: grad.full_tensor() if engine == "fsdp2" else grad for name, grad in gradients(model).items()
        }
        torch.save(whole, f"{folder}/{kind} {engine} {vision} {rank}")
        dist.barrier()  # neither frees what the other still waits for
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder with what each rank found in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "engine", "vision"), CASES)
def test_a_rank_without_pictures_gives_what_one_process_gives(ranks, kind, engine, vision):
    model = ours(kind, vision=vision)
    batches, count = micro_batches(kind, vision)
    for batch in batches:
        token_loss(model, batch, count).backward()
    expected = gradients(model)
    for rank in (0, 1):
        found = torch.load(ranks / f"{kind} {engine} {vision} {rank}")
        assert found.keys() == expected.keys()
        assert difference(found, expected) < 1e-6

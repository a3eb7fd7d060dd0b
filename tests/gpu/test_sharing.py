"""Processes that share a device, and plans that turn out to be too large for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sft_play.builtin.demo import materialise
from sft_play.cache import write_value
from sft_play.config.load import load_config
from sft_play.job import prepare_job
from sft_play.model.layers.loss_head import token_loss
from sft_play.sizing.estimate.budget import LEAST_BYTES
from sft_play.train.probe import correction_path
from sft_play.units import GIB, MIB
from tests.gpu.rank import HELD, batch_of, make_model
from tests.gpu.test_runs import settings
from tests.integration.cli import environment, finish, make_workspace, start, write_rows

RANKS = 2
LARGE_BATCH = (
    "train.batch_size=auto",
    "train.effective_batch_size=32",
    "train.gradient_checkpointing=false",
    "train.probe=true",
)
SHARE = 0.7  # of what the largest micro-batch needs: enough for half of it


@pytest.mark.slow  # on a CPU; tests/integration/test_many_processes.py does it through the launcher
def test_two_processes_on_one_device_have_the_gradients_of_one(device, tiny_model, tmp_path):
    """With gloo, as NCCL refuses two ranks on one GPU; and the driver counts each process by itself."""
    words = [RANKS, device.type, tiny_model, tmp_path]
    commands = [
        [sys.executable, str(Path(__file__).with_name("rank.py")), str(rank), *map(str, words)]
        for rank in range(RANKS)
    ]
    started = [
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in started:
        done = finish(process, timeout_s=240)
        assert done.code == 0, done.err
    model = make_model(tiny_model, device)
    sum(token_loss(model, batch_of(rank, device)) / RANKS for rank in range(RANKS)).backward()
    together = torch.load(tmp_path / "gradients.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad.cpu(), rtol=1e-4, atol=1e-6)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    if device.type == "cuda":
        assert second["reserved"] - first["reserved"] >= HELD
        if first["overhead"] is not None:  # None where the driver does not report processes
            assert abs(second["overhead"] - first["overhead"]) < HELD // 2


@pytest.fixture
def config(tiny_model, tmp_path):
    """Rows that are long enough for memory to matter."""
    config = make_workspace(tmp_path, tiny_model)
    words = " ".join(f"w{number % 250}" for number in range(150))
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    write_rows(config.parent / "train.jsonl", [{"messages": messages}] * 64)
    return config


@pytest.mark.slow  # on a CPU; tests/integration/test_probe.py does it for two processes
def test_a_plan_that_is_too_large_gives_way_to_a_smaller_one(device, config):
    """The stored correction promises that the largest micro-batch fits: on a GPU, memory really runs out."""
    job = prepare_job(materialise(load_config(config, list(LARGE_BATCH))), processes=1, progress=False)
    whole = job.plan.memory
    phases = ("forward", "backward", "optimizer", "evaluation", "reserved")
    write_value(correction_path(job, job.plan), {"ratios": dict.fromkeys(phases, 0.05)})
    limit, environment_ = [], settings(device)
    if device.type == "cuda":
        share = SHARE * whole.peak_bytes / torch.cuda.get_device_properties(device).total_memory
        environment_["PYTORCH_ALLOC_CONF"] = f"per_process_memory_fraction:{share:.6f}"
    else:
        limit = [f"parallel.memory_gib={(LEAST_BYTES + SHARE * whole.peak_bytes) / GIB}"]
    words = ("--json", "--config", config, *LARGE_BATCH, *limit)
    done = finish(start("probe", *words, **environment_), timeout_s=300)
    assert done.code == 0, done.err
    plan, probe = (done.json[key] for key in ("plan", "probe"))
    assert plan["plan"]["micro_batch_tokens"] < job.plan.rows.most_tokens
    assert plan["plan"]["effective_batch_size"] == 32 and not probe["ran_out"]
    assert max(probe["phases"].values()) < SHARE * whole.peak_bytes
    assert any("does not fit" in reason for reason in plan["why"])


def test_a_plan_leaves_alone_what_another_process_holds(only_gpu, config):
    """This process takes half of what is free; the command plans with the rest."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free // 2, dtype=torch.uint8, device=only_gpu)
    done = finish(start("plan", "--json", "--config", config, **settings(only_gpu)), timeout_s=300)
    assert done.code == 0, done.err
    memory = done.json["memory"]
    assert memory["budget_bytes"] + memory["guard_bytes"] == pytest.approx(free // 2, abs=64 * MIB)
    del held

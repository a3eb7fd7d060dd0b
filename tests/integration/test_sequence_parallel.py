"""Processes that divide the tokens of a micro-batch give the curve of one process (fp32, no dropout).

The tiny model has 4 heads and 2 key and value heads, so that 4 processes have fewer of these than there are of them.
"""

import shutil
from pathlib import Path

import pytest
import torch

from sft_play.train.run import train
from tests.conftest import VOCABULARY
from tests.integration.processes import CLOSE, assert_same_curve, launch_jobs
from tests.jobs import SEQ, make_job

pytestmark = [pytest.mark.integration, pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

STEPS, SAVED = 4, 2
COMMON = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED, "effective_batch_size": 12, "batch_size": 3,
    "weight_decay": 0.1,
}  # fmt: skip
PACKED = {"packing": True, "effective_batch_size": 12 * SEQ, "batch_size": 3 * SEQ}
KINDS = {
    "lora-joined": {"mode": "lora"},
    "full-packed": {"mode": "full", "learning_rate": 1e-3, **PACKED},
    "full-joined": {"mode": "full", "learning_rate": 1e-3, "max_grad_norm": 0.1},
    "lora-sinks": {"mode": "lora"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sequence")


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory) -> dict[str, str]:
    """The tiny model, and one with attention sinks, sliding windows and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sinks = tmp_path_factory.mktemp("sinks") / "model"
    shutil.copytree(tiny_model, sinks)
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.save_pretrained(sinks)
    return {"sinks": str(sinks), "tiny": str(tiny_model)}


@pytest.fixture(scope="module")
def one(models, folder):
    """The curves of one process, by kind."""
    for kind, settings in KINDS.items():
        train(make_job(Path(models[model_of(kind)]), folder, f"one-{kind}", **{**COMMON, **settings}))
    return folder


def model_of(name: str) -> str:
    return "sinks" if "sinks" in name else "tiny"


@pytest.fixture(scope="module")
def launch(models, one, folder):
    """Trains jobs, all in one launch: settings beside a kind's by name."""

    def run(engine: str, processes: int, jobs: dict[str, dict]) -> None:
        specs = [
            {"model": models[model_of(name)], "name": name, "settings": {**COMMON, **settings}}
            | ({"loses_boundaries": True} if name.startswith("lost") else {})
            for name, settings in jobs.items()
        ]
        launch_jobs(folder, engine, processes, specs, forked=True)

    return run


def job(kind: str, ranks: int, **settings) -> dict:
    return {**KINDS[kind], "sequence_parallel_size": ranks, **settings}


def resumed(folder: Path, name: str, kind: str, ranks: int) -> dict:
    return job(kind, ranks, resume=str(folder / name / "checkpoints" / f"checkpoint-{SAVED}"))


@pytest.fixture(scope="module")
def ddp(launch, folder):
    """DDP on two processes, one micro-batch at a time."""
    jobs = {
        "ddp2-lora-joined": job("lora-joined", 2, probe=True),
        "ddp2-full-packed": job("full-packed", 2),
        "ddp2-lora-sinks": job("lora-sinks", 2),
        "lost-lora-joined": job("lora-joined", 2),
        "from-one-full-packed": resumed(folder, "one-full-packed", "full-packed", 2),
    }
    launch("ddp", 2, jobs)
    return folder


@pytest.fixture(scope="module")
def fsdp2(ddp, launch, folder):
    """FSDP2 on four processes: two micro-batches at a time on two each, or one on all four."""
    jobs = {
        "fsdp2x2-lora-joined": job("lora-joined", 2, gradient_checkpointing=True),
        "fsdp4-full-joined": job("full-joined", 4, probe=True),
        "from-two-full-packed": resumed(folder, "ddp2-full-packed", "full-packed", 4),
    }
    launch("fsdp2", 4, jobs)
    return folder


def assert_curve_of_one(folder: Path, name: str, after: int = 0) -> None:
    assert_same_curve(folder / name, folder / f"one-{name.split('-', 1)[1]}", CLOSE, after)


@pytest.mark.parametrize("name", ["ddp2-lora-joined", "ddp2-full-packed", "ddp2-lora-sinks"])
def test_two_processes_have_the_curve_of_one(ddp, name):
    assert_curve_of_one(ddp, name)


def test_the_curve_is_another_if_boundaries_of_joined_rows_are_lost(ddp):
    with pytest.raises(AssertionError):
        assert_curve_of_one(ddp, "lost-lora-joined")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2x2-lora-joined", "fsdp4-full-joined"])
def test_four_processes_have_the_curve_of_one(fsdp2, name):
    assert_curve_of_one(fsdp2, name)


@pytest.mark.parametrize(
    ("launched", "name"),
    [("ddp", "from-one-full-packed"), pytest.param("fsdp2", "from-two-full-packed", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_with_more_processes_for_a_micro_batch(request, launched, name):
    folder = request.getfixturevalue(launched)
    assert_same_curve(folder / name, folder / "one-full-packed", CLOSE, after=SAVED)


@pytest.fixture(scope="module")
def others(fsdp2, launch, folder):
    """ZeRO-2 and ZeRO-3 on two processes, DDP on four, and what goes on with fewer or none."""
    launch("deepspeed_z2", 2, {f"zero2-{kind}": job(kind, 2) for kind in KINDS})
    launch("deepspeed_z3", 2, {f"zero3-{kind}": job(kind, 2) for kind in ("lora-joined", "full-packed")})
    more = {f"ddp4-{kind}": job(kind, 4) for kind in KINDS}
    more |= {f"ddp2x2-{kind}": job(kind, 2) for kind in KINDS}
    more["from_four-full-joined"] = resumed(folder, "fsdp4-full-joined", "full-joined", 1)
    launch("ddp", 4, more)
    launch("fsdp2", 2, {f"fsdp2-{kind}": job(kind, 2, gradient_checkpointing=True) for kind in KINDS})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "ddp4", "ddp2x2", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_engines_have_the_curve_of_one(others, engine, kind):
    if not (others / f"{engine}-{kind}").exists():
        pytest.skip(f"{kind} is not trained with {engine}")
    assert_curve_of_one(others, f"{engine}-{kind}")


@pytest.mark.slow
def test_a_run_goes_on_without_dividing_tokens(others):
    assert_curve_of_one(others, "from_four-full-joined", after=SAVED)

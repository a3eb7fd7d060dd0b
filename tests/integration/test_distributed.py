"""Two launched CPU processes learn what one does: fp32, no dropout, a row count that does not divide."""

import functools
import signal
import sys
from pathlib import Path

import pytest

from sft_play.manifest import files_in, find_damage, read_manifest
from sft_play.runlog import RunDir, read_json, read_metrics
from tests.conftest import REPOSITORY
from tests.integration.cli import finish, make_workspace, sft, signal_at_step, start
from tests.rounding import assert_same_values, summed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

# Relative; sums in another order: over the 8 rows of a step, conversations of up to 22 tokens, and the text of 700
# tokens, which an epoch has twice. Largest differences seen: loss 1.8e-7 with DDP, 1e-7 with ZeRO-2; gradient
# norm 3e-5 after 30 steps of a learning rate that makes much of small differences, 1.2e-7 after 8.
NEAR = summed(8 * 22 + 2 * 700)
CLOSE = {"train/loss": NEAR, "eval/loss": NEAR, "eval/token_accuracy": 2e-6, "train/grad_norm": 2e-4}
PACKED = (
    "train.packing=true",
    "model.max_seq_len=32",
    "train.batch_size=32",
    "train.effective_batch_size=128",
)
SETTINGS = {
    "lora": ("train.batch_size=2",),
    "packed": PACKED,
    # So that a signal finds it training; at 1e-2 rounding alone moves the loss by 5e-3 after 16 steps.
    "long": ("train.max_steps=30", "train.batch_size=1", "train.learning_rate=1e-3"),
}
SAME = ("optimizer_steps", "supervised_tokens", "effective_batch_size")


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    """Conversations and raw text, each row of which is seen more than once an epoch, and new tokens."""
    config = make_workspace(tmp_path_factory.mktemp("distributed"), tiny_model)
    folder = config.parent
    (folder / "notes.txt").write_text("".join(f"w{number % 200} " for number in range(700)))
    path = f"train_path: {folder}/train.jsonl"
    sources = f"[{{path: {folder}/train.jsonl, weight: 1.5}}, {{path: {folder}/notes.txt, weight: 2}}]"
    assert path in config.read_text()
    text = config.read_text().replace(path, f"task: mixed\n  sources: {sources}")
    config.write_text(text.replace("\ndata:", "\n  new_tokens: [w100 w101, <tool>]\ndata:", 1))
    return config


@pytest.fixture(scope="module")
def alone(config):
    """The run of one process, by kind."""

    @functools.cache
    def of(kind: str) -> RunDir:
        assert (
            sft(
                "train",
                "--config",
                config,
                *SETTINGS[kind],
                "eval.generate=false",
                f"output.name=alone-{kind}",
            ).code
            == 0
        )
        return RunDir(config.parent / "runs" / f"alone-{kind}")

    return of


def logged(run: RunDir, key: str) -> list[tuple[int, float]]:
    """The steps at which a figure was logged, and its values."""
    return [(record["step"], record[key]) for record in read_metrics(run) if key in record]


def assert_same_result(run: RunDir, alone: RunDir) -> None:
    """Every training loss, gradient norm and evaluation loss, with the row and token counts behind them."""
    for key, tolerance in CLOSE.items():
        ours, theirs = (logged(one, key) for one in (run, alone))
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        assert_same_values([value for _, value in ours], [value for _, value in theirs], tolerance)
    ended = [read_json(one.summary) for one in (run, alone)]
    assert ended[0]["status"] == "done" and [ended[0][key] for key in SAME] == [ended[1][key] for key in SAME]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "banner"),
    [
        ("packed", "ddp", "MULTI_CPU"),
        ("lora", "deepspeed_z2", "DEEPSPEED"),
        ("lora", "fsdp2", "MULTI_CPU"),
        ("lora", "deepspeed_z3", "DEEPSPEED"),
    ],
)
def test_two_processes_learn_what_one_does(config, alone, kind, engine, banner):
    name = f"{kind}-{engine}"
    words = ["--config", config, *SETTINGS[kind], f"output.name={name}"]
    done = finish(start("train", "--processes", "2", "--engine", engine, *words), timeout_s=200)
    assert done.code == 0 and done.err == "", done.err
    for text in (
        f"Distributed type: {banner}", "Number of processes: 2",
        "Process 0 using device: cpu", "Process 1 using device: cpu",
        "done: trained for", "exact match",
    ):  # fmt: skip
        assert done.out.count(text) == 1, f"{text}: {done.out}"
    assert ("in this process" in done.out) == (
        engine in ("fsdp2", "deepspeed_z3")
    )  # about half of the weights
    assert "x 2 processes" in done.out
    run = RunDir(config.parent / "runs" / name)
    assert read_json(run.summary)["world_size"] == read_json(run.plan)["plan"]["world_size"] == 2
    assert_same_result(run, alone(kind))
    assert_whole_checkpoints(run, engine)


def assert_whole_checkpoints(run: RunDir, engine: str) -> None:
    """With the files of both ranks in their manifests."""
    checkpoints = list(run.checkpoints.glob("checkpoint-*"))
    assert checkpoints and not (run.checkpoints / "incomplete").exists()
    for checkpoint in checkpoints:
        manifest = read_manifest(checkpoint)
        assert find_damage(checkpoint) is None and set(manifest["files"]) == set(files_in(checkpoint))
        assert (manifest["engine"], manifest["world_size"]) == (engine, 2)
        own = [name for name in manifest["files"] if "_rank_1" in name or "rng_state_1" in name]
        assert len(own) == (2 if engine == "deepspeed_z2" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed_z2", "deepspeed_z3"])
def test_deepspeed_trains_fp32_adapters_of_16_bit_weights(config, engine):
    """It casts both to bf16, but not before the checks and the first pass of a probe."""
    precision = ("model.dtype=bfloat16", "train.mixed_precision=bf16", "train.probe=true")
    words = ("--config", config, *SETTINGS["lora"], *precision, f"output.name=16-bit-{engine}")
    command = ("train", "--processes", "2", "--engine", engine, *words, "eval.generate=false")
    done = finish(start(*command), timeout_s=200)
    assert done.code == 0, done.err
    losses = [loss for _, loss in logged(RunDir(config.parent / "runs" / f"16-bit-{engine}"), "eval/loss")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_with_compiled_layers_learn_what_one_does_without(config, alone, engine):
    name = f"compiled-{engine}"
    words = ("--config", config, *SETTINGS["lora"], "train.compile=true", f"output.name={name}")
    command = ("train", "--processes", "2", "--engine", engine, *words, "eval.generate=false")
    done = finish(start(*command), timeout_s=500)
    assert done.code == 0, done.err
    assert_same_result(RunDir(config.parent / "runs" / name), alone("lora"))


@pytest.mark.slow
def test_torchrun_needs_no_launcher_of_ours(config, alone):
    """Every rank finds the data and makes a plan; they agree on one."""
    script = REPOSITORY / "scripts" / "train_distributed.py"
    torchrun = [
        "--nproc_per_node=2",
        str(script),
        "--config",
        config,
        *SETTINGS["lora"],
        "output.name=torchrun",
    ]
    done = finish(start(Path(sys.executable).with_name("torchrun"), *torchrun), timeout_s=200)
    assert done.code == 0, done.err
    assert done.out.count("Number of processes: 2") == 1 and done.out.count("done: trained for") == 1
    assert_same_result(RunDir(config.parent / "runs" / "torchrun"), alone("lora"))


@pytest.mark.faults
def test_a_run_on_two_processes_that_is_stopped_ends_on_one(config, alone):
    """SIGTERM to the command: all ranks stop after the same step, and a single process resumes from there."""
    words = ["--config", config, *SETTINGS["long"], "output.name=moved", "eval.generate=false"]
    process = start("train", "--processes", "2", "--engine", "ddp", *words)
    run = RunDir(config.parent / "runs" / "moved")
    signal_at_step(run, 2, process.pid, signal.SIGTERM)
    done = finish(process)
    assert done.code == 75 and "make resume" in done.err, done.err
    assert 2 <= read_json(run.summary)["optimizer_steps"] < 30 and not run.adapter.exists()
    assert sft("train", "--resume", *words).code == 0
    assert_same_result(run, alone("long"))

"""Memory that runs out in the middle of training: the step is done again, or a smaller plan goes on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from sft_play.commands.train import train_job
from sft_play.errors import OutOfMemory
from sft_play.launch.accelerate import launch_command, run_launcher
from sft_play.model.build import build_model
from sft_play.plan import Plan
from sft_play.runlog import RunDir, read_json
from sft_play.train import session
from sft_play.train.trainer import train
from tests.integration.cli import make_workspace, sft
from tests.integration.jobs import losses, make_job
from tests.integration.memory_faults import failing, failing_optimizer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
PACKED = {"mode": "lora", "packing": True, "effective_batch_size": 8 * 64, "batch_size": 2 * 64}
BUILD = "sft_play.train.trainer.build_model"


@pytest.fixture
def fault(monkeypatch):
    """`fault(where, *passes)`: memory runs out in these passes of the sessions that follow."""
    return lambda where, *passes: monkeypatch.setattr(BUILD, failing(build_model, where, set(passes)))


@pytest.fixture
def optimizer_fault():
    """`optimizer_fault(*updates)`: memory runs out in these updates of the weights."""
    handles = []
    yield lambda *updates: handles.append(failing_optimizer(set(updates)))
    for handle in handles:
        handle.remove()


def weights(job) -> dict[str, torch.Tensor]:
    folder = job.run.model if job.config.tuning.mode == "full" else job.run.adapter
    return load_file(next(folder.glob("*.safetensors")))


def assert_same_result(job, clean) -> None:
    for found, expected in zip(losses(job), losses(clean), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for name, expected in weights(clean).items():
        torch.testing.assert_close(weights(job)[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("forward", {"mode": "lora"}),
        pytest.param("backward", {"mode": "full", "padding_free": False}, marks=pytest.mark.faults),
        pytest.param("backward", PACKED, marks=pytest.mark.faults),
    ],
    ids=["forward", "backward-padded", "backward-packed"],
)
def test_the_step_is_done_again_in_smaller_micro_batches(
    tiny_model, tmp_path, fault, capsys, where, settings
):
    settings = {"batch_size": 4, **settings}
    clean = make_job(tiny_model, tmp_path, "clean", **settings)
    before = train(clean)
    assert before["out_of_memory"] == []
    fault(where, 2 * 4 + 2)  # the third of four micro-batches of step 3
    job = make_job(tiny_model, tmp_path, "one", **settings)
    summary = train(job)
    assert_same_result(job, clean)
    assert summary["effective_batch_size"] == before["effective_batch_size"]
    assert summary["micro_batch_size"] == before["micro_batch_size"] // 2
    assert summary["gradient_accumulation_steps"] == 8
    assert summary["micro_batch_tokens"] < before["micro_batch_tokens"]
    assert Plan.from_json(read_json(job.run.plan)).gradient_accumulation_steps == 8
    [said] = summary["out_of_memory"]
    assert "in step 3 at micro-batch" in said and said in " ".join(capsys.readouterr().out.split())


@pytest.mark.faults
def test_memory_may_run_out_until_each_row_is_alone(tiny_model, tmp_path, fault):
    clean = make_job(tiny_model, tmp_path, "clean", batch_size=16)
    train(clean)
    fault("backward", 1, 2, 4)  # step 2 three times: whole, in halves, in the second of the quarters
    job = make_job(tiny_model, tmp_path, "one", batch_size=16)
    summary = train(job)
    assert_same_result(job, clean)
    assert (summary["micro_batch_size"], summary["gradient_accumulation_steps"]) == (2, 8)


def test_the_step_draws_the_same_random_numbers_again(tiny_model, tmp_path, fault, monkeypatch):
    """Bit for bit as if its micro-batches had been as small from its beginning."""
    settings = dict(batch_size=4, dropout=0.3, mode="lora")
    with pytest.MonkeyPatch.context() as patch:

        class Smaller(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    running[0].redo.cut.into(2)

        running = []
        make = session._make_trainer

        def remember_trainer(*given):
            running.append(make(*given))
            running[0].add_callback(Smaller())
            return running[0]

        patch.setattr(session, "_make_trainer", remember_trainer)
        torch.manual_seed(1)
        expected = make_job(tiny_model, tmp_path, "expected", **settings)
        train(expected)
    fault("backward", 2 * 4 + 1)
    torch.manual_seed(1)
    job = make_job(tiny_model, tmp_path, "one", **settings)
    train(job)
    assert losses(job)[1] == losses(expected)[1]
    assert losses(job)[0] == pytest.approx(
        losses(expected)[0], rel=1e-6
    )  # the log adds them up in another order
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(job)[name], tensor), name


@pytest.mark.faults
def test_an_evaluation_goes_on_in_smaller_batches_and_training_as_before(tiny_model, tmp_path, fault, capsys):
    clean = make_job(tiny_model, tmp_path, "clean", batch_size=16)
    train(clean)
    fault("evaluation", 1, 2)
    job = make_job(tiny_model, tmp_path, "one", batch_size=16)
    summary = train(job)
    assert_same_result(job, clean)
    assert (summary["micro_batch_size"], len(summary["out_of_memory"])) == (16, 1)
    assert "memory ran out in the evaluation" in capsys.readouterr().out


def test_a_single_row_that_does_not_fit_ends_the_run(tiny_model, tmp_path, fault):
    fault("forward", 16 + 2)  # the third row of step 2
    job = make_job(tiny_model, tmp_path, "one", batch_size=1, gradient_checkpointing=True)
    with pytest.raises(
        OutOfMemory, match="step 2, memory ran out at micro-batch 1: CUDA out of memory"
    ) as ended:
        train_job(job, [])
    assert "no smaller plan to go on with" in str(ended.value) and ended.value.exit_code == 4


@pytest.mark.faults
def test_a_single_row_that_does_not_fit_goes_on_with_activations_recomputed(
    tiny_model, tmp_path, fault, capsys
):
    settings = dict(batch_size=1, save_steps=2, eval_steps=2, max_steps=4)
    clean = make_job(tiny_model, tmp_path, "clean", **settings)
    assert not clean.plan.gradient_checkpointing
    train(clean)
    fault("forward", 2 * 16 + 5)  # a row of step 3
    job = make_job(tiny_model, tmp_path, "one", **settings)
    summary = train_job(job, [])
    assert_same_result(job, clean)
    plan = Plan.from_json(read_json(job.run.plan))
    assert plan.gradient_checkpointing and (plan.micro_batch_size, plan.gradient_accumulation_steps) == (
        1,
        16,
    )
    assert "going on from the last checkpoint" in summary["out_of_memory"][0]
    assert "activations recomputed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.faults
def test_an_update_is_never_done_again_but_a_smaller_plan_goes_on_from_the_checkpoint(
    tiny_model, tmp_path, optimizer_fault, capsys
):
    settings = dict(batch_size=16, gradient_checkpointing=False, save_steps=2, eval_steps=2, max_steps=6)
    clean = make_job(tiny_model, tmp_path, "clean", **settings)
    train(clean)
    optimizer_fault(3)
    job = make_job(tiny_model, tmp_path, "one", **settings)
    summary = train_job(job, [])
    assert_same_result(job, clean)
    assert summary["effective_batch_size"] == 16 and summary["micro_batch_size"] < 16
    [said] = summary["out_of_memory"]
    assert (
        "in step 4, memory ran out" in said
        and "going on from the last checkpoint with a smaller plan" in said
    )
    assert said in " ".join(capsys.readouterr().out.split())
    assert read_json(job.run.summary)["out_of_memory"] == [said]
    assert not list(tmp_path.glob("one.*"))


@pytest.mark.faults
def test_without_a_checkpoint_the_smaller_plan_begins_at_the_start_and_only_once(
    tiny_model, tmp_path, optimizer_fault
):
    optimizer_fault(1, 3)  # the second update of both attempts
    job = make_job(tiny_model, tmp_path, "one", batch_size=16, gradient_checkpointing=False)
    with pytest.raises(OutOfMemory, match="in step 2, memory ran out at micro-batch"):
        train_job(job, [])
    assert Plan.from_json(read_json(job.run.plan)).micro_batch_size < 16


def launched(tmp_path: Path, engine: str, specs: list[dict]):
    file = tmp_path / "specs.json"
    file.write_text(json.dumps(specs))
    worker = [str(Path(__file__).with_name("worker.py")), str(file)]
    command = launch_command(worker, engine=engine, device="cpu", processes=2, cores=1)
    return run_launcher(command, RunDir(tmp_path), processes=2, timeout_s=300)


@pytest.mark.faults
def test_one_rank_of_two_does_its_share_of_the_step_or_of_the_evaluation_again(tiny_model, tmp_path):
    """DDP; the second fault is in the pass that exchanges gradients."""
    settings = dict(batch_size=4, mode="full")
    shared = {"model": str(tiny_model), "output": str(tmp_path), "settings": settings | {"engine": "ddp"}}
    faults = {
        "early": ("backward", [2 * 2]),
        "late": ("forward", [2 * 2 + 1]),
        "evaluation": ("evaluation", [1]),
    }
    specs = [
        shared | {"name": name, "fault": {"rank": 1, "where": where, "passes": passes}}
        for name, (where, passes) in faults.items()
    ]
    result = launched(tmp_path, "ddp", specs)
    assert result.code == 0, result.message
    alone = make_job(tiny_model, tmp_path, "alone", batch_size=8, mode="full")
    train(alone)
    for name in faults:
        two = make_job(tiny_model, tmp_path, name, **settings)
        assert_same_result(two, alone)
        summary = read_json(two.run.summary)
        if name == "evaluation":
            assert summary["micro_batch_size"] == 4
            assert "memory ran out in the evaluation" in summary["out_of_memory"][0]
            continue
        assert (summary["micro_batch_size"], summary["gradient_accumulation_steps"]) == (2, 4)
        assert (
            summary["effective_batch_size"] == 16 and "step 3 at micro-batch 4" in summary["out_of_memory"][0]
        )


FAULTY_RANK = """\
import os, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from sft_play.machine.process import die_with_parent
die_with_parent()
from sft_play.cli import run_rank
from sft_play.train import trainer
from tests.integration.memory_faults import failing, failing_optimizer
once = Path({once!r})
if os.environ["RANK"] == "1" and not once.exists():
    once.touch()
    if {where!r} == "update":
        failing_optimizer({{{number}}})
    else:
        trainer.build_model = failing(trainer.build_model, {where!r}, {{{number}}})
raise SystemExit(run_rank(sys.argv[1:]))
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("engine", "where"),
    [
        ("ddp", "backward"),
        ("ddp", "update"),
        ("deepspeed_z2", "forward"),
        ("deepspeed_z2", "backward"),
        ("deepspeed_z2", "update"),
    ],
)
def test_where_ranks_exchange_gradients_the_launcher_goes_on_with_a_smaller_plan(
    tiny_model, tmp_path, monkeypatch, engine, where
):
    """Memory runs out on rank 1 in step 6, where the other rank cannot do it again; step 5 was saved."""
    config = make_workspace(tmp_path, tiny_model)
    words = [f"parallel.engine={engine}", "eval.generate=false", "train.save_steps=5", "train.eval_steps=5"]
    words += [
        "train.gradient_checkpointing=false",
        "train.probe=false",
        "train.report_to=[]",
        "parallel.timeout_s=60",
    ]
    clean = sft("train", "--config", config, *words, "output.name=clean", "--processes", "2")
    assert clean.code == 0, clean.err
    script = tmp_path / "scripts" / "train_distributed.py"
    script.parent.mkdir()
    repository = str(Path(__file__).resolve().parents[2])
    script.write_text(
        FAULTY_RANK.format(repository=repository, once=str(tmp_path / "once"), where=where, number=5)
    )
    monkeypatch.chdir(tmp_path)
    done = sft("train", "--config", config, *words, "--processes", "2")
    assert done.code == 0, done.err
    one, expected = RunDir(tmp_path / "runs" / "one"), RunDir(tmp_path / "runs" / "clean")
    summary = read_json(one.summary)
    assert "going on from the last checkpoint with a smaller plan" in summary["out_of_memory"][0]
    assert summary["effective_batch_size"] == 8 and summary["micro_batch_size"] < 4
    assert summary["train_loss"] == pytest.approx(read_json(expected.summary)["train_loss"], rel=1e-5)

"""Every command end to end on a tiny model: its files, its output, and interruptions that cost nothing."""

import json
import os
import re
import shutil
import signal
import threading

import pytest
import torch
import yaml
from safetensors.torch import load_file

import sft_play.api
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.runlog import RunDir, read_json, read_metrics
from tests.integration.cli import (
    TRAINED,
    finish,
    make_workspace,
    sft,
    signal_at_step,
    snapshot,
    start,
    untidy,
    write_rows,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread", "eighty_columns")]

SUMMARY_KEYS = {
    "status", "world_size", "effective_batch_size", "micro_batch_size", "gradient_accumulation_steps",
    "optimizer_steps", "supervised_tokens", "tokens_per_second", "predicted_peak_bytes",
    "measured_peak_bytes", "train_loss", "eval",
}  # fmt: skip
PLAN_KEYS = {
    "micro_batch_size", "gradient_accumulation_steps", "effective_batch_size", "world_size", "packing",
    "gradient_checkpointing", "mixed_precision", "learning_rate", "steps_per_epoch", "total_steps",
}  # fmt: skip


@pytest.fixture
def eighty_columns(monkeypatch):
    """Whatever the terminal is in which the tests run."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def workspace(tmp_path, tiny_model):
    """A config of its own; returns the file and the run directory that it leads to."""
    return make_workspace(tmp_path / "work", tiny_model), RunDir(tmp_path / "work" / "runs" / "one")


# --- training
# ---------------------------------------------------------------------------------------------------------


def test_a_run_leaves_config_plan_numbers_and_weights(finished):
    run = finished.run
    assert set(read_json(run.plan)) == {"plan", "memory", "why", "alternatives"}
    assert set(read_json(run.plan)["plan"]) >= PLAN_KEYS
    assert load_config(run.config).config == load_config(finished.config).config
    assert (
        f"train_path: {json.dumps(str(finished.config.parent / 'train.jsonl'))}  # {finished.config}"
        in run.config.read_text()
    )
    assert load_file(run.adapter / "adapter_model.safetensors") and (run.adapter / "tokenizer.json").is_file()
    card = (run.adapter / "README.md").read_text()
    assert "## Scores on held-out rows" in card and f"`{run.path.parent}" not in card
    assert list(run.checkpoints.glob("checkpoint-8")) and list(run.tensorboard.glob("events.*"))
    assert not list(run.checkpoints.rglob("README.md"))  # PEFT's and TRL's have nothing but placeholders


def test_the_summary_says_what_was_trained(finished):
    summary = read_json(finished.run.summary)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["status"] == "done" and summary["optimizer_steps"] == 8
    cut = [summary[key] for key in ("micro_batch_size", "gradient_accumulation_steps", "world_size")]
    assert cut == [4, 2, 1] and summary["effective_batch_size"] == 8
    assert summary["tokens_per_second"] > 0 and summary["measured_peak_bytes"] > 0
    without_first = summary["measured_step_seconds"] * (summary["optimizer_steps"] - 1)
    assert summary["training_seconds"] > without_first > 0  # the first step counts, but not for the speed
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert after["loss"] < before["loss"] - 0.02 and {"token_accuracy", "exact_match"} <= set(after)


def test_the_report_is_made_at_the_end_from_what_the_run_left(finished):
    run, page = finished.run, finished.run.report.read_text()
    assert f"report{run.report}" in re.sub(r"\s", "", finished.done.out)
    assert "Nothing was recorded" not in page and "is damaged" not in page and "Damaged" not in page
    assert str(finished.config.parent) not in page
    assert "measured by the probe" in page and "Length of the training rows" in page
    assert re.search(r"predicted \d[^<]*, measured \d", page)
    assert "activations" in page and "before training" in page
    data, found = read_json(run.data), read_json(run.environment)
    assert data["train"]["rows"] == TRAINED and torch.__version__.startswith(found["versions"]["torch"])


def test_metrics_have_a_line_for_each_logging_step_with_keys_of_group_and_unit(finished):
    lines = [json.loads(line) for line in finished.run.metrics.read_text().splitlines()]
    assert all(re.fullmatch(r"step|[a-z]+/[a-z_]+", key) for line in lines for key in line)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 9))
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    assert evaluated[0] == 0 and evaluated[-1] == 8


def test_the_console_shows_banner_and_closing_screen_and_libraries_are_in_the_log(finished):
    out, log = finished.done.out, finished.run.log.read_text()
    assert re.search(r"^  probe at the largest batch: .*\S$", out, re.MULTILINE)  # words, not a block of them
    for text in (
        "Distributed type: NO", "Number of processes: 1", "Number of GPUs: 0", "Mixed precision: no",
        "Process 0 using device: cpu", "Effective batch: 8 sequences = 4 x 2 x 1", "step 8/8  loss",
        "done: trained for", "held-out rows", "exact match",
        f"make infer RUN={finished.run.typed}", str(finished.run.adapter),
    ):  # fmt: skip
        assert text.replace(" ", "") in re.sub(r"[\s\\]", "", out), text
    assert not untidy(out)
    assert not re.search(r"Warning|WARNING|it/s|s/it|Loading|Writing|Setting accelerator|kernels", out)
    assert finished.done.err == ""
    assert "CPUAllocator.cpp" in log and "step 8/8" not in log  # a warning of PyTorch


@pytest.mark.thorough
def test_training_again_moves_the_earlier_run_aside_whole(finished, workspace):
    config, run = workspace
    shutil.copytree(finished.run.path, run.path)
    before = snapshot(run.path)
    short = ["train.max_steps=2", "train.logging_steps=10", "eval.generate=false"]
    done = sft("train", "--config", config, *short)
    assert done.code == 0, done.err
    (aside,) = (folder for folder in run.path.parent.iterdir() if folder != run.path)
    assert snapshot(aside) == before and aside.name in done.out.replace("\n", "")
    summary = read_json(run.summary)
    assert summary["optimizer_steps"] == 2 and summary["train_loss"] > 0  # though no tenth step was logged


def test_what_has_finished_is_not_resumed(finished):
    before = snapshot(finished.run.path)
    done = sft("train", "--resume", "--config", finished.run.config)
    assert done.code == 0 and "has already finished" in " ".join(done.out.split())
    assert snapshot(finished.run.path) == before


@pytest.mark.thorough
def test_what_has_finished_and_lost_its_weights_makes_them_again(finished, workspace):
    config, run = workspace
    shutil.copytree(finished.run.path, run.path)
    weights = run.adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    done = sft("train", "--resume", "--config", config)
    assert done.code == 0 and "already finished" not in done.out, done.err
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(
    ("mode", "packing"),
    [
        ("qlora", False),
        ("full", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # of LoRA, `finished` shows it
            for case in (("lora", False), ("lora", True), ("qlora", True), ("full", False))
        ),
    ],
)
def test_every_mode_learns(workspace, mode, packing):
    config, run = workspace
    batch = (
        ["model.max_seq_len=32", "train.batch_size=32", "train.effective_batch_size=64"] if packing else []
    )
    batch += ["train.probe=false", "eval.generate=false"]
    done = sft("train", "--config", config, f"tuning.mode={mode}", f"train.packing={packing}".lower(), *batch)
    assert done.code == 0, done.err
    summary = read_json(run.summary)
    assert (
        summary["packing"] is packing
        and summary["eval"]["after"]["loss"] < summary["eval"]["before"]["loss"] - 0.02
    )
    weights = run.model / "model.safetensors" if mode == "full" else run.adapter / "adapter_model.safetensors"
    assert load_file(weights)


@pytest.mark.thorough
def test_after_a_probe_of_two_processes_the_next_command_trains_on_two(workspace):
    done = sft("probe", "--config", workspace[0], "--processes", "2")
    assert done.code == 0, done.err
    assert "next make train NGPU=2 " in " ".join(done.out.split())


# --- interruption
# -----------------------------------------------------------------------------------------------------


def assert_interrupted(done, run, step):
    assert done.code == 75, done.err
    assert (
        f"continue with: make resume RUN={run.typed}" in done.err and "Traceback" not in done.err + done.out
    )
    summary = read_json(run.summary)
    assert summary["status"] == "interrupted" and step <= summary["optimizer_steps"] < 30
    assert (
        run.checkpoints / f"checkpoint-{summary['optimizer_steps']}"
    ).is_dir() and not run.adapter.exists()


def test_a_signal_while_libraries_are_imported_ends_a_command_with_a_word(workspace):
    process = start("train", "--config", workspace[0])
    process.stdout.readline()  # the header, which comes before them
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    # a shell sees 130 in both cases; the second is Python's own way if it came while a dataclass was made,
    # that is, while a string was executed
    assert done.code in (130, -signal.SIGINT)
    assert done.err == "interrupted: stopped by SIGTERM\n"


@pytest.mark.slow
def test_a_run_that_is_stopped_twice_ends_as_one_that_was_not(workspace):
    """First by SIGTERM, then by Ctrl-C; numbers and weights equal an uninterrupted run bit for bit."""
    config, run = workspace
    long = ["train.max_steps=30", "train.batch_size=1", "train.effective_batch_size=8", "eval.generate=false"]
    process = start("train", "--config", config, *long)
    signal_at_step(run, 4, process.pid, signal.SIGTERM)
    assert_interrupted(finish(process), run, 4)
    assert "Interrupted with a checkpoint saved" in run.report.read_text()
    threading.Thread(target=signal_at_step, args=(run, 12, os.getpid(), signal.SIGINT), daemon=True).start()
    assert_interrupted(sft("train", "--config", config, *long, "--resume"), run, 12)
    done = sft("train", "--config", config, *long, "--resume")
    assert done.code == 0 and f"resuming from {run.checkpoints}/checkpoint-" in " ".join(done.out.split()), (
        done.err
    )
    assert sft("train", "--config", config, *long, "output.name=whole").code == 0
    whole = RunDir(run.path.with_name("whole"))
    numbers = [
        [(r["step"], r.get("train/loss"), r.get("eval/loss")) for r in read_metrics(one)]
        for one in (run, whole)
    ]
    assert sorted(map(str, numbers[0])) == sorted(map(str, numbers[1])) and len(numbers[1]) > 30
    ours, theirs = (load_file(one.adapter / "adapter_model.safetensors") for one in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ended = [read_json(one.summary) for one in (run, whole)]
    for key in ("status", "optimizer_steps", "supervised_tokens", "train_loss", "eval"):
        assert ended[0][key] == ended[1][key], key


# --- after training
# ---------------------------------------------------------------------------------------------------


def test_python_names_a_split_without_rows_as_it_is_called(finished):
    with pytest.raises(ConfigError, match="^split=test: the config has no test rows.*or use split=val$"):
        sft_play.api.evaluate(finished.run.path, split="test", test_path="")


@pytest.mark.thorough
def test_eval_gives_the_loss_that_training_ended_with(finished):
    done = sft("eval", "--config", finished.config, "--split", "val", "--limit", "3", "--json")
    assert done.code == 0, done.err
    summary = read_json(finished.run.summary)
    assert done.json["loss"] == pytest.approx(summary["eval"]["after"]["loss"], rel=1e-5)
    assert done.json["answered_rows"] == 3 and done.json["rows"] == 7
    shown = sft("eval", "--config", finished.config, "--limit", "3").out
    assert shown.count("token accuracy") == 1 and str(finished.run.path / "eval.val.json") in shown
    assert not untidy(shown)


def test_infer_answers_every_row_of_a_file(finished, tmp_path):
    asked = write_rows(
        tmp_path / "in.jsonl", [{"question": "w1 w2"}, {"messages": [{"role": "user", "content": "w3"}]}]
    )
    done = sft(
        "infer", "--config", finished.config, "--input", asked, "--output", tmp_path / "out.jsonl", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["answered"] == 2
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == [1, 2] and all(isinstance(row["generated"], str) for row in rows)
    assert rows[0]["question"] == "w1 w2" and rows[1]["messages"]


def test_the_merged_model_has_the_logits_of_the_adapter(finished, tmp_path):
    merged = sft("merge", "--config", finished.config, "--output", tmp_path / "merged", "--json")
    assert str(tmp_path / "merged") in merged.err and not untidy(merged.err)
    assert merged.code == 0, merged.err
    assert isinstance(merged.json, dict) and (tmp_path / "merged" / "model.safetensors").is_file()
    tested = sft("merge-test", "--config", finished.config, "--output", tmp_path / "merged", "--json")
    assert tested.code == 0 and tested.json["passed"] is True, tested.err


# --- one object on standard output
# ------------------------------------------------------------------------------------


def test_prepare_prints_what_was_counted(finished):
    assert sft("prepare", "--config", finished.config, "--json").json["train"]["rows"] == TRAINED
    shown = sft("prepare", "--config", finished.config, "--show", "1")
    assert (
        shown.code == 0 and "supervised" in shown.out and "<eos>+}" in shown.out
    )  # the end of a turn is learned
    assert not untidy(shown.out) and "next " in shown.out and "make train" in shown.out


def test_plan_prints_the_plan_and_leaves_the_run_alone(finished):
    before = snapshot(finished.run.path)
    tree = sft("plan", "--config", finished.config, "--gpus", "2", "--json").json
    assert (
        set(tree)
        == {"plan", "memory", "why", "alternatives", "scaling", "command", "complete", "method", "methods"}
        and set(tree["plan"]) >= PLAN_KEYS
    )
    assert tree["plan"]["world_size"] == 2 and tree["plan"]["effective_batch_size"] == 8
    assert snapshot(finished.run.path) == before
    shown = sft("plan", "--config", finished.config).out
    assert len(shown.splitlines()) <= 46 and not untidy(shown)  # paths are long here
    assert "> 4 x 2" in shown and "tokens/s" in shown


def test_check_prints_its_findings(finished):
    assert not untidy(sft("check", "--config", finished.config).out)
    done = sft("check", "--config", finished.config, "--json")
    assert done.json["exit_code"] == done.code and {f["topic"] for f in done.json["findings"]} >= {
        "config",
        "data",
        "model",
    }


def test_the_schema_and_the_machine_are_json_too():
    assert "properties" in sft("config-schema").json
    assert "gpus" in sft("gpu-info", "--json").json
    assert isinstance(sft("memory-check", "--json").json, dict)


def test_the_three_steps_of_the_data_can_be_looked_at(workspace):
    config, run = workspace
    for command in (["process"], ["style", "--style", "w5 w6"], ["render"]):
        done = sft(*command, "--config", config)
        assert done.code == 0, done.err
    rendered = (run.path / "data" / "rendered.jsonl").read_text().splitlines()
    assert len(rendered) == TRAINED and "w5 w6" in rendered[0]


@pytest.mark.thorough
def test_a_resolved_config_trains_the_same_run_again(finished, tmp_path):
    """Also from within the run directory that is set aside."""
    folder = tmp_path / "runs" / "one"
    shutil.copytree(finished.run.path, folder)
    done = sft(
        "train",
        "--config",
        folder / "config.resolved.yaml",
        f"output.dir={tmp_path / 'runs'}",
        "eval.generate=false",
    )
    assert done.code == 0, done.err
    assert yaml.safe_load((folder / "config.resolved.yaml").read_text())["eval"]["generate"] is False
    ours, theirs = (
        [r.get("train/loss") for r in read_metrics(run)] for run in (RunDir(folder), finished.run)
    )
    assert ours == theirs

"""Bad input: one clear sentence, the right exit code, no traceback, and an earlier run left untouched."""

import fcntl
import importlib.util
import json
import os
import random
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sft_play import cli
from sft_play.commands.handlers import MOST_PROCESSES
from sft_play.extras import install_command
from sft_play.manifest import MANIFEST
from tests.integration.cli import TRAINED, Done, conversation, finish, sft, snapshot, start, write_rows
from tests.unit.test_manifest import flip_bit

pytestmark = pytest.mark.integration

USER, ASSISTANT = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
GOOD = {"messages": [USER, ASSISTANT]}


def assert_refused(done: Done, code: int, *words: str) -> None:
    """The exit code, one error message with these words, and nothing that only a programmer could read."""
    said = " ".join(done.err.split())
    assert done.code == code, f"{done.code}: {done.err}"
    assert done.err.startswith("error: ") and done.err.count("\nerror: ") == 0, done.err
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"
    assert "Traceback" not in done.out + done.err and len(done.err.splitlines()) <= 9, done.err


@pytest.fixture
def refuses(finished):
    """Calls a command on the finished run's config, and asserts that the run is as it was."""

    def call(words: list, code: int, *said: str, function=None) -> None:
        before = snapshot(finished.run.path)
        beside = sorted(finished.run.path.parent.iterdir())
        command = [words[0], "--config", finished.config, *words[1:]] if function is None else words
        assert_refused(sft(*command, function=function or cli.main), code, *said)
        assert snapshot(finished.run.path) == before and sorted(finished.run.path.parent.iterdir()) == beside

    return call


# --- config, flags, environment: 2
# ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.learning_rat=1e-4"], ["train.learning_rat", "did you mean train.learning_rate?"]),
        (["train.learning_rate=-1"], ["train.learning_rate", "greater than 0", "found -1"]),
        (["train.learning_rate=1e30"], ["train.learning_rate", "less than or equal to 1"]),
        (["train.learning_rate=fast"], ["train.learning_rate", "valid number", 'found "fast"']),
        (["learning_rate=1"], ["section.key=value"]),
        (
            ["tuning.mode=adapter", "train.epochs=0"],
            ["2 problems", "MODE=adapter: expected full, lora or qlora", "train.epochs"],
        ),
        (["output.name=../../x"], ["RUN=../../x"]),
        (["model.max_seq_len=100000"], ["model.max_seq_len=100000", "512"]),
        (["train.mixed_precision=fp16"], ["train.mixed_precision=fp16", "auto, bf16 or no"]),
        (["train.batch_size=3"], ["train.batch_size=3", "allowed: 1, 2, 4, 8"]),
        (["--processes", "3"], ["8", "is not divisible by 3 processes", "nearest: 6 or 9"]),
        (["train.grad_accum=4"], ["contradicts", "remove one of the three"]),
        (
            ["train.save_steps=3", "train.eval_steps=2"],
            ["train.save_steps=3", "set train.save_steps=4, or train.eval_steps=3"],
        ),
        (["tuning.lora.target_modules=[nope]"], ["target_modules", "q_proj", "auto"]),
        (["tuning.lora.target_modules=[embed_tokens]"], ["target_modules", "embed_tokens is an embedding"]),
        (["tuning.lora.target_modules=[q_proj,lm_head]"], ["target_modules", "lm_head is an embedding or"]),
        (["train.max_steps=100000000000"], ["train.max_steps", "found 100000000000"]),
        (["train.max_steps=2000000000"], ["train.max_steps=2000000000", "at most 6,250,000 steps"]),
        (["train.epochs=1e9", "train.max_steps=null"], ["train.epochs=1e+09", "at most 6,250,000 steps"]),
        (["data.chat_template=none.jinja"], ["none.jinja"]),
        (["eval.answer_pattern=a("], ["eval.answer_pattern", "not a regular expression", 'found "a("']),
        (
            ["eval.answer_pattern=zzz", "eval.generate=true"],
            ["eval.answer_pattern: 'zzz' matches none of"],
        ),
        (
            ["model.attention=flash_attention_2"],
            ["model.attention=flash_attention_2: the CPU cannot run it", "allowed here: auto"],
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) and "=" in str(value[0]) else "",
)
def test_a_wrong_setting_is_named_with_what_is_allowed(refuses, words, said):
    refuses(["train", *words], 2, *said)


def test_flags_that_do_not_exist_are_refused_and_overrides_stand_anywhere(finished):
    for words, said in (
        (["train", "--config", finished.config, "--fast"], "No such option '--fast'"),
        (["gpu-info", "a.b=c"], "Got unexpected extra argument (a.b=c)"),
    ):
        done = sft(*words)
        assert done.code == 2 and said in done.err
    done = sft(
        "plan", "output.name=a", "--config", finished.config, "train.epochs=2", "--json", "train.max_steps=3"
    )
    assert done.json["plan"]["total_steps"] == 3


def test_a_config_that_is_not_there_or_not_yaml_is_named(refuses, finished, tmp_path):
    refuses(["train", "--config", "none.yaml"], 2, "none.yaml does not exist", "CONFIG=", function=cli.main)
    broken = tmp_path / "broken.yaml"
    broken.write_text("model:\n  name: [a\n")
    refuses(["train", "--config", broken], 2, "broken.yaml, line 3", "not valid YAML", function=cli.main)


def test_a_gpu_that_cannot_do_what_is_asked_is_named(refuses):
    refuses(
        ["plan", "--gpu", "Tesla T4", "train.mixed_precision=bf16"],
        2,
        "mixed_precision=bf16",
        "T4",
        "use fp16, or auto",
    )
    refuses(["plan", "--gpu", "RTX 9999"], 2, "RTX 9999", "RTX 4090")


def test_more_memory_than_the_device_has_is_refused(refuses):
    limit = "parallel.memory_gib=30"
    refuses(
        ["plan", "--gpu", "RTX 4090", limit],
        2,
        limit,
        "RTX 4090 has 23.99 GiB",
        "allowed: up to 23.98, or auto",
    )
    refuses(
        ["plan", "parallel.memory_gib=1e6"], 2, "parallel.memory_gib=1e+06", "the RAM has", "allowed: up to"
    )
    refuses(["train", "parallel.memory_gib=1e6"], 2, "parallel.memory_gib=1e+06", "the RAM has")
    refuses(
        ["plan", "parallel.memory_gib=0"], 2, "parallel.memory_gib", "a positive number or 'auto'", "found 0"
    )


@pytest.mark.thorough
def test_less_memory_than_a_run_needs_is_a_misfit_with_a_command_that_fits(finished):
    asked = ["train.batch_size=8", "train.gradient_checkpointing=false", "parallel.memory_gib=0.2515"]
    done = sft("plan", "--config", finished.config, *asked)
    assert done.code == 4 and done.err.startswith("error: this run does not fit: the smallest plan")
    heading, command, needs = done.err.splitlines()[2:]
    assert heading == "this makes it fit:"
    words = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    again = sft("plan", "--config", words["CONFIG"], *words["ARGS"].split())
    assert again.code == 0 and needs.split(" a process")[0].strip() in again.out


@pytest.mark.slow
@pytest.mark.timeout(300)  # without a bound on what is traced, it takes more than ten minutes
def test_advice_for_the_most_processes_ends(finished):
    words = ["--gpus", str(MOST_PROCESSES), f"train.effective_batch_size={MOST_PROCESSES}"]
    words += ["--gpu", "RTX 4090", "train.batch_size=auto", "parallel.memory_gib=0.75"]
    done = sft("plan", "--config", finished.config, *words)
    assert done.code == 4 and "no single setting makes it fit" in done.err


def test_an_effective_batch_that_the_gpus_do_not_divide_names_the_nearest(refuses):
    words = ["plan", "--gpu", "H100", "--gpus", "9", "train.batch_size=auto"]
    refuses(words, 2, "train.effective_batch_size=8 is 8 sequences, fewer than the 9 processes")


@pytest.mark.parametrize("size", ["two", "-1", "0", ""])
def test_a_world_size_that_is_no_number_is_refused_by_each_rank(refuses, finished, monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    refuses(
        ["--config", finished.config], 2, f"WORLD_SIZE={size}:", "whole number from 1", function=cli.run_rank
    )


def test_half_a_launchers_environment_is_refused(refuses, finished, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    refuses(
        ["--config", finished.config],
        2,
        "RANK, LOCAL_RANK, MASTER_ADDR not set",
        "torchrun",
        function=cli.run_rank,
    )
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    refuses(["train"], 2, "WORLD_SIZE=2 is set", "scripts/train_distributed.py")


def test_a_rank_whose_launcher_started_too_few_is_refused(refuses, finished, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_PROCESSES", "2")
    refuses(
        ["--config", finished.config], 2, "2 processes were requested", "started 1", function=cli.run_rank
    )


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(refuses, tracker):
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    refuses(["train", f"train.report_to=[tensorboard,{tracker}]"], 2, install_command(tracker))


WITHOUT_BITSANDBYTES = """
import importlib.machinery
find_spec = importlib.machinery.PathFinder.find_spec
def without(cls, name, path=None, target=None):
    return None if name.split(".")[0] == "bitsandbytes" else find_spec(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(without)
"""


@pytest.mark.thorough
def test_qlora_without_bitsandbytes_is_refused(finished, tmp_path):
    """A process in which Python does not find the package, as where it is not installed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_BITSANDBYTES)
    before = snapshot(finished.run.path)
    path = f"{tmp_path}{os.pathsep}{Path(cli.__file__).parents[1]}"
    done = finish(start("train", "--config", finished.config, "tuning.mode=qlora", PYTHONPATH=path))
    assert_refused(done, 2, "tuning.mode=qlora", "bitsandbytes", "make install")
    assert snapshot(finished.run.path) == before


# --- data: 3
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([GOOD, {"messages": [USER, {"role": "assistant"}]}], ["bad.jsonl:2", "messages[1]", "content"]),
        (
            [GOOD, GOOD, {"messages": [USER, {"role": "assistant", "content": None}]}],
            ["bad.jsonl:3", "content", "null"],
        ),
        (
            [GOOD, {"messages": [{"role": "wizard", "content": "w1"}, ASSISTANT]}],
            ["bad.jsonl:2", "messages[0].role", "wizard"],
        ),
        ([GOOD, {"messages": []}], ["bad.jsonl:2", "messages"]),
        ([GOOD, {"question": "w1", "answer": "w2"}], ["bad.jsonl:2", "messages"]),
        ([GOOD, '{"messages": [{"role"'], ["bad.jsonl:2", "JSON"]),
        (["not json"], ["bad.jsonl:1", "JSON"]),
        ([[1, 2]], ["bad.jsonl:1", "a JSON object"]),
        ([{"colour": "red"}], ["bad.jsonl:1", "colour"]),
        ([{"messages": [USER]}] * 3, ["0 supervised tokens", "3 rows"]),
        ([GOOD, '{"messages": ' + "[" * 500 + "]" * 500 + "}"], ["bad.jsonl:2", "more than 100 levels deep"]),
        ([GOOD, "[" * 100_000], ["bad.jsonl:2"]),
        ([], ["empty"]),
        ([""] * 3, ["no rows"]),
    ],
    ids=[
        "no content",
        "null",
        "role",
        "no messages",
        "other keys",
        "cut",
        "no json",
        "list",
        "unknown",
        "no answers",
        "deep",
        "too deep to be read",
        "0 B",
        "blank",
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_key(refuses, tmp_path, rows, said):
    refuses(["train", f"data.train_path={write_rows(tmp_path / 'bad.jsonl', rows)}"], 3, *said)


def test_data_that_is_not_there_or_of_no_known_kind_is_named(refuses, tmp_path):
    refuses(["train", "data.train_path=none.jsonl"], 3, "data.train_path", "none.jsonl", "does not exist")
    refuses(["train", f"data.val_path={tmp_path}"], 3, "data.val_path", "has no data files", ".parquet")
    for name, code, *said in (("rows.log", 3, ".jsonl"), ("rows.txt", 2, "is raw text", "data.task=cpt")):
        (tmp_path / name).write_text("w1")
        refuses(["train", f"data.train_path={tmp_path / name}"], code, name, *said)
    sources = "data.sources=[{path: a.jsonl, weight: 0}]"
    refuses(["train", "data.train_path=", sources], 2, "the weights add up to 0")


def test_rows_longer_than_the_model_supports_are_shortened_in_ways_that_are_named(refuses, tmp_path):
    long = write_rows(tmp_path / "long.jsonl", [{"question": "w1 " * 5000, "answer": "w1"}])
    refuses(
        ["train", f"data.train_path={long}"], 3, "Set data.overlong=truncate or split", "the model supports"
    )


@pytest.mark.parametrize("packing", ["false", "true"])
def test_rows_that_are_all_too_long_are_no_training(refuses, packing):
    refuses(
        ["train", "model.max_seq_len=4", f"train.packing={packing}"],
        3,
        "0 supervised tokens",
        f"{TRAINED} rows",
        "max_seq_len",
    )


def test_prompts_that_cannot_be_answered_are_named_before_any_is(refuses, tmp_path):
    refuses(["infer", "--input", "none.jsonl"], 3, "IN=none.jsonl", "does not exist")
    asked = write_rows(tmp_path / "in.jsonl", [{"question": "w1"}, {"answer": "w1"}])
    refuses(["infer", "--input", asked, "--output", tmp_path / "out.jsonl"], 3, "in.jsonl:2", "no prompt")
    assert not (tmp_path / "out.jsonl").exists()


# --- the model: 2
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["config.json"], ["has no config.json"]),
        (["model.safetensors"], ["no *.safetensors weights"]),
        (["tokenizer.json", "tokenizer_config.json"], ["tokenizer"]),
    ],
    ids=lambda names: names[0],
)
def test_a_model_folder_that_is_not_whole_is_refused(refuses, tiny_model, tmp_path, missing, said):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for name in missing:
        (folder / name).unlink()
    refuses(["train", f"model.name={folder}"], 2, "model.name", str(folder), *said)


def test_a_plan_needs_config_json_and_nothing_else_of_the_model(refuses, finished, tiny_model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    refuses(["plan", "--gpu", "H100", f"model.name={folder}"], 2, "model.name", "has no config.json")
    shutil.copy(tiny_model / "config.json", folder)
    done = sft("plan", "--config", finished.config, "--gpu", "H100", f"model.name={folder}", "--json")
    assert done.code == 0 and done.json["memory"]["peak_bytes"] > 0 and len(done.json["scaling"]) == 4


def test_an_architecture_that_cannot_be_traced_is_planned_without_a_prediction(finished, tmp_path):
    tree = {"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    words = [
        "plan",
        "--config",
        finished.config,
        "--gpu",
        "H100",
        f"model.name={tmp_path}",
        "tuning.mode=full",
    ]
    done = sft(*words, "train.gradient_checkpointing=true")
    assert done.code == 0 and "Traceback" not in done.out + done.err, done.err
    said = " ".join(done.out.split())
    assert "OpenAIGPTConfig cannot be traced" in said and "memory: not predicted" in said


@pytest.mark.parametrize("command", [["train"], ["plan"], ["plan", "--gpu", "H100"]], ids=str)
def test_a_model_with_impossible_sizes_is_refused(refuses, tiny_model, tmp_path, command):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for change, said in [({"hidden_size": -64}, "hidden_size"), ({"num_hidden_layers": 10**7}, "2,000")]:
        tree = json.loads((tiny_model / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(tree))
        refuses([*command, f"model.name={folder}"], 2, "model.name", str(folder), said)


def test_pickled_weights_are_not_loaded(refuses, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(["train", f"model.name={folder}"], 2, "no *.safetensors weights", "pytorch_model.bin")


def test_weights_that_are_cut_or_not_of_this_model_are_refused(refuses, tiny_model, tmp_path):
    cut = shutil.copytree(tiny_model, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:5000])
    refuses(["train", f"model.name={cut}"], 2, "model.name", str(cut))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(tiny_model / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:99].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    refuses(
        ["train", f"model.name={other}"],
        2,
        str(other),
        "model.embed_tokens.weight (99, 64) instead of (256, 64)",
    )
    header = (2**62).to_bytes(8, "little")
    (cut / "model.safetensors").write_bytes(header + (tiny_model / "model.safetensors").read_bytes()[8:])
    refuses(["train", f"model.name={cut}"], 2, "model.name", str(cut))
    del weights["model.embed_tokens.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    refuses(["train", f"model.name={other}"], 2, str(other), "model.embed_tokens.weight missing")


def test_a_model_that_is_neither_here_nor_on_the_hub_is_named(refuses):
    refuses(["train", "model.name=./models/none"], 2, "model.name", "./models/none")


def test_code_that_comes_with_a_model_is_not_run_unasked(refuses, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tree = json.loads((folder / "config.json").read_text())
    tree |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(tree))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refuses(["train", f"model.name={folder}"], 2, "model.name", "trust_remote_code=true")
    assert not (tmp_path / "ran").exists()


# --- run directory and checkpoints: 6, 7, 8
# ---------------------------------------------------------------------------


def test_a_run_directory_that_is_in_use_is_left_to_its_holder(refuses, finished):
    with (finished.run.path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refuses(["train"], 7, "is in use by", "RUN=<name>")


def test_a_folder_that_cannot_be_written_is_named(refuses, tmp_path):
    (tmp_path / "file").write_text("")
    refuses(["train", f"output.dir={tmp_path / 'file'}"], 6, "cannot write", "output.dir=")
    refuses(["train", "output.dir=/proc"], 6, "/proc", "output.dir=")


@pytest.mark.parametrize(
    "command", [["eval"], ["infer"], ["merge"], ["merge-test"]], ids=lambda words: words[0]
)
def test_what_comes_after_training_says_so_when_nothing_was_trained(refuses, command):
    refuses([*command, "output.name=never"], 8, "never", "make train")


def test_a_run_that_does_not_exist_or_has_not_begun_is_not_resumed(refuses, finished):
    refuses(["train", "--resume", "output.name=nothere"], 8, "nothere does not exist", "latest runs", "one")
    begun = finished.run.path.with_name("begun")
    begun.mkdir()
    try:
        refuses(["train", "--resume", "output.name=begun"], 8, "begun has not begun to train", "one")
    finally:
        shutil.rmtree(begun)


@pytest.mark.thorough
def test_a_checkpoint_that_is_typed_beside_resume_is_not_ignored(refuses):
    refuses(["train", "--resume", "train.resume=none/checkpoint-3"], 8, "none/checkpoint-3")
    refuses(["train", "--resume", "train.resume=never"], 2, "train.resume=never contradicts `make resume`")


def test_an_engine_that_is_typed_beside_another_one_is_not_ignored(refuses):
    for command in ("train", "probe"):
        words = [command, "--engine", "ddp", "parallel.engine=deepspeed_z2"]
        refuses(words, 2, "parallel.engine=deepspeed_z2 contradicts --engine ddp", "make train NGPU=<n>")


@pytest.mark.parametrize("command", ["eval", "infer", "merge"])
def test_a_finished_run_whose_weights_are_damaged_is_refused(finished, tmp_path, command):
    folder = shutil.copytree(finished.run.path, tmp_path / "runs" / "one")
    flip_bit(folder / "adapter" / "adapter_model.safetensors", 1000)
    asked = write_rows(tmp_path / "in.jsonl", [{"question": "w1"}])
    words = ["--input", asked, "--output", tmp_path / "out"] if command == "infer" else []
    done = sft(command, "--config", finished.config, *words, f"output.dir={tmp_path / 'runs'}")
    assert_refused(done, 8, "is damaged: adapter_model.safetensors has changed", "make resume")


@pytest.mark.parametrize("command", ["eval", "infer", "merge"])
@pytest.mark.parametrize("change", ["missing", "unexpected", "other shape", "other base"])
def test_an_adapter_that_does_not_fit_its_base_is_refused_before_that_is_loaded(
    finished, tiny_model, tmp_path, command, change
):
    base = tmp_path / tiny_model.name  # without weights, which would be missed once they are loaded
    shutil.copytree(tiny_model, base, ignore=shutil.ignore_patterns("*.safetensors"))
    folder = shutil.copytree(finished.run.path, tmp_path / "runs" / "one")
    (folder / "adapter" / MANIFEST).unlink()  # as in an adapter from elsewhere
    (folder / "base.json").unlink()  # which knows the weights
    file = folder / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    first, *others = sorted(weights)
    if change == "missing":
        weights = {name: weights[name] for name in others[len(others) // 2 :]}
    elif change == "unexpected":
        weights[first.replace("layers.0", "layers.9")] = weights[first].clone()
    elif change == "other shape":
        weights[first] = weights[first][:, :-1].clone()
    else:
        tree = json.loads((base / "config.json").read_text()) | {"intermediate_size": 96}
        (base / "config.json").write_text(json.dumps(tree))
    save_file(weights, file, metadata={"format": "pt"})
    asked = write_rows(tmp_path / "in.jsonl", [{"question": "w1"}])
    words = ["--input", asked, "--output", tmp_path / "out"] if command == "infer" else []
    words += [f"output.dir={tmp_path / 'runs'}", f"model.name={base}"]
    done = sft(command, "--config", finished.config, *words)
    said = {"other shape": "of another shape", "other base": "of another shape"}.get(change, change)
    assert_refused(done, 8, "does not fit the model", f": {said}")


def test_a_checkpoint_that_cannot_be_resumed_from_is_named(refuses, finished):
    refuses(["train", "train.resume=none/checkpoint-3"], 8, "none/checkpoint-3", "train.resume=auto")


def test_there_is_nothing_to_merge_after_full_fine_tuning(refuses):
    refuses(["merge", "tuning.mode=full"], 2, "nothing to merge")


def test_a_split_without_rows_cannot_be_judged(refuses):
    refuses(["eval", "--split", "test", "data.test_path=null"], 2, "SPLIT=test", "SPLIT=val")


@pytest.mark.thorough
def test_a_new_run_that_failed_before_training_is_started_again_in_place(finished, tmp_path):
    """Nothing is set aside for it: there was nothing."""
    runs = [f"output.dir={tmp_path / 'runs'}", "eval.generate=false", "train.max_steps=1"]
    assert sft("train", "--config", finished.config, *runs, "tuning.lora.target_modules=[nope]").code == 2
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(random.Random(1)) for _ in range(9)])
    assert sft("train", "--config", finished.config, *runs, f"data.train_path={rows}").code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]

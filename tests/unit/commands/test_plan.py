"""Plans without a config file and without a network."""

import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from sft_play.cli import main, parse
from sft_play.commands import each_gpu
from sft_play.commands import plan as plan_module
from sft_play.commands.plan import plan_command
from sft_play.config.load import load_config
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.machine import gpus
from sft_play.machine.catalogue import find_specs
from sft_play.model.architecture import published
from sft_play.model.load import planning_config
from sft_play.planning.answers import other_machines
from sft_play.planning.answers.other_machines import COMMON_GPUS, MODES
from sft_play.report.ways import gpus_report
from sft_play.ui.console import set_console
from sft_play.ui.screen import Screen
from tests.conftest import REPOSITORY
from tests.unit.report.test_plan import screen

TINY = """\
sources: {here: {url: "https://example.org/tiny", date: 2026-11-22}}
models:
  - name: org/Tiny-1
    gated: true
    parameters: 1
    source: here
    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, vocab_size: 256,
             num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    """A published model whose steps are traced in a moment, in a folder without data."""
    (tmp_path / "models.yaml").write_text(TINY)
    monkeypatch.setattr(published, "MODELS_FILE", tmp_path / "models.yaml")
    monkeypatch.chdir(tmp_path)
    published.published_models.cache_clear()
    yield
    published.published_models.cache_clear()


def plan(*words: str):
    found = plan_command(parse(["plan", "--json", *words]))
    return found.tree, found.shown


def test_a_model_and_a_gpu_are_enough_for_a_plan():
    tree, report = plan("--model", "tiny-1", "--gpu", "RTX 4090")
    assert tree["plan"]["world_size"] == 1 and tree["memory"]["peak_bytes"] < tree["memory"]["budget_bytes"]
    assert tree["complete"]
    text = " ".join(screen(report).split())
    assert "no training rows found: planned for 10,000 rows of 512 tokens" in text
    assert "architecture of org/Tiny-1 as of 2026-11-22, from models.yaml; the Hub was not asked" in text
    assert "to train it, accept its license at https://huggingface.co/org/Tiny-1" in text


def test_the_plan_is_said_before_the_other_methods_are_planned_and_stays_if_these_are_not(monkeypatch):
    def stop(*_args, **_options):
        raise KeyboardInterrupt

    said = []
    monkeypatch.setattr(plan_module, "other_methods", stop)
    args = parse(["plan", "--model", "tiny-1", "--gpu", "RTX 4090"])
    found = plan_command(args, said.append)
    tree = found.tree
    assert not tree["complete"] and tree["methods"] == [] and tree["plan"]["micro_batch_size"] > 0
    first, rest = (" ".join(screen(part).split()) for part in (*said, found.shown))
    assert "LoRA of org/Tiny-1 fits on 1 x" in first and "micro-batch" in first
    assert "LoRA of org/Tiny-1 fits" not in rest and "Stopped: the other methods were not planned" in rest


def test_where_a_batch_cannot_be_shared_by_all_gpus_of_this_machine_one_is_planned(
    monkeypatch, tiny_model, tmp_path
):
    monkeypatch.setattr(plan_module, "detect", lambda: gpus.what_if("L4", 3))
    monkeypatch.setattr(plan_module, "ensure_profile", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one two", "completion": "three"}\n' * 20)
    words = ["--config", str(REPOSITORY / "configs" / "run_lora.yaml"), f"model.name={tiny_model}"]
    words += ["data.train_path=rows.jsonl", "train.effective_batch_size=8", "train.grad_accum=1"]
    tree, _ = plan(*words)
    assert tree["plan"]["world_size"] == 1
    assert any(
        "on one GPU of 3: train.effective_batch_size=8 is not divisible by 3" in each for each in tree["why"]
    )
    with pytest.raises(ConfigError, match="is not divisible by 3"):
        plan(*words, "--gpus", "3")


@pytest.mark.parametrize("machine", [["--gpu", "RTX 4090"], []])
def test_rows_longer_than_the_model_supports_are_not_sized(machine):
    with pytest.raises(
        ConfigError, match=r"max_seq_len=10000000 exceeds the 512 positions that 'org/Tiny-1'"
    ):
        plan("--model", "tiny-1", *machine, "model.max_seq_len=10000000")


@pytest.mark.thorough
def test_without_a_gpu_there_is_a_row_for_each_of_twelve_cards():
    tree, report = plan("--model", "tiny-1", "tuning.mode=lora")
    assert [row["gpu"] for row in tree["cards"]] == list(COMMON_GPUS) and len(COMMON_GPUS) == 12
    json.dumps(tree)
    text = screen(report)
    for row in tree["cards"]:
        found = row["plans"]["lora"]
        assert found["peak_bytes"] <= row["total_bytes"] and row["gpu"] in text
    speed = {row["gpu"]: row["plans"]["lora"]["tokens_per_second"] for row in tree["cards"]}
    assert speed["H100 80GB"] > speed["L4"] > 0


@pytest.mark.thorough
def test_each_tuning_mode_is_planned_unless_one_is_asked_for(monkeypatch):
    monkeypatch.setattr(other_machines, "COMMON_GPUS", ("A100 80GB",))
    tree, _ = plan("--model", "tiny-1")
    (row,) = tree["cards"]
    assert list(row["plans"]) == ["full", "lora", "qlora"]
    assert all(found["tokens_per_second"] > 0 for found in row["plans"].values())
    cheapest = {row["method"]: row for row in tree["cheapest"]}
    assert all(cheapest[mode]["hours"] == found["hours"] for mode, found in row["plans"].items())


FOUND = {
    "gpus": 4, "engine": "fsdp2", "replicas": 1, "sequence_ranks": 1, "micro_batch_size": 8, "peak_bytes": 2**30,
    "effective_batch_size": 16, "tokens_per_second": None, "hours": None, "gpu_hours": 2.5, "step_seconds": 1.0,
}  # fmt: skip

NOWHERE = {"problem": "this run does not fit: the smallest plan (micro-batch 1) needs 90.00 GiB"}


def cards(**plans):
    """What is known of one card with 15 GiB."""
    row = {"gpu": "T4", "total_bytes": 15 * 2**30, "plans": plans}
    tree = {"model": "org/m", "gpus": None, "row_tokens": 2048, "seen": False, "cards": [row]}
    return tree | {"why": ["a note"], "cheapest": []}


def test_a_table_of_cards_says_in_words_what_is_needed():
    tree = cards(full=FOUND, lora=FOUND, qlora=FOUND | {"gpus": 2, "sequence_ranks": 2})
    tree["cards"] += [tree["cards"][0] | {"gpu": "A10", "plans": dict.fromkeys(MODES, NOWHERE)}]
    lines = [" ".join(line.split()) for line in screen(gpus_report(tree)).splitlines()]
    assert lines[0] == "org/m on the fewest GPUs that fit, rows of 2,048 tokens" and "a note" in lines
    assert lines.index("T4 15 GiB 4 GPUs, FSDP2 8 n/a n/a") < lines.index("A10 15 GiB does not fit")
    assert "T4 15 GiB 2 GPUs, FSDP2 8 of 2 GPUs n/a n/a" in lines
    text = screen(gpus_report(tree | {"gpus": 4, "seen": True}))
    assert "org/m on 4 GPUs" in text and "GPU hours" in text and "2.5" in text and "1, 2, 4" not in text


def test_why_there_is_no_plan_is_said_once_and_not_for_each_gpu():
    refused = {"problem": "train.batch_size: 3 does not divide 16"}
    tree = cards(full=NOWHERE, lora=refused, qlora=FOUND)
    tree["cards"] += [row | {"gpu": "A10"} for row in tree["cards"]]
    lines = [" ".join(line.split()) for line in screen(gpus_report(tree)).splitlines()]
    assert lines.count("Full fine-tuning does not fit on any of these GPUs.") == 1
    assert lines.count("LoRA: train.batch_size: 3 does not divide 16") == 1
    assert sum(line.startswith(("T4", "A10")) for line in lines) == 2  # of QLoRA
    nothing = screen(gpus_report(cards(full=NOWHERE)))
    assert "Full fine-tuning does not fit on any of these GPUs." in nothing and "tokens/s" not in nothing


def test_the_cheapest_ways_come_before_the_tables_of_cards():
    plan = FOUND | {"tokens_per_second": 100.0, "hours": 1.5}
    way = plan | {"method": "full", "gpu": "H200", "total_bytes": 140 * 2**30}
    in_ram = way | {"gpus": 1, "gpu": "L4", "offload": "ram", "ram_bytes": 64 * 2**30}
    text = screen(gpus_report(cards(full=plan) | {"cheapest": [way, in_ram]}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    first = lines.index("Full fine-tuning 4 x H200 (140 GiB) 100 1.5")
    assert lines[first + 1] == "1 x L4 (140 GiB) and 64 GiB of RAM 100 1.5"
    assert first < lines.index("T4 15 GiB 4 GPUs, FSDP2 8 100 1.5") and "OFFLOAD=ram" in text


def stopping_after(found: int):
    """Plans for so many GPUs, and then Ctrl-C."""
    calls = []

    def plans(request, modes, count, **options):
        calls.append(1)
        if len(calls) > found:
            raise KeyboardInterrupt
        return dict.fromkeys(modes, FOUND)

    return plans


@pytest.mark.parametrize("found", [0, 2])
def test_a_table_that_is_interrupted_keeps_its_rows(found, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(each_gpu, "plans_by_mode", stopping_after(found))
    assert main(["plan", "--model", "tiny-1", "--json"]) == 130
    tree = json.loads(capsys.readouterr().out)
    assert not tree["complete"] and [row["gpu"] for row in tree["cards"]] == list(COMMON_GPUS[:found])
    monkeypatch.setattr(each_gpu, "plans_by_mode", stopping_after(1))
    assert main(["plan", "--model", "tiny-1"]) == 130
    text = " ".join(capsys.readouterr().out.split())
    assert f"Stopped: {found + 1} of 12 GPUs were planned" in text  # the first ones were kept
    assert text.endswith("next make plan MODEL=tiny-1")


@pytest.mark.thorough
def test_ctrl_c_ends_a_table_with_what_was_found(tiny_model, tmp_path):
    """A real signal to a real process, whose bar is on a terminal and whose JSON goes into a pipe."""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sft_play", "plan", "--json", "--model", str(tiny_model), "tuning.mode=lora"],
        env=os.environ | {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "COLUMNS": "150", "TERM": "xterm"},
        stdin=side,
        stdout=subprocess.PIPE,
        stderr=side,
    )
    os.close(side)
    shown = b""
    while b"1/12" not in shown:
        shown += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    tree = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 130 and not tree["complete"]
    assert 1 <= len(tree["cards"]) < 12 and tree["cards"][0]["gpu"] == COMMON_GPUS[0]


def test_rows_appear_on_a_terminal_as_they_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SFT_PLAY_VERBOSE", "1")  # the console stays ours
    monkeypatch.setattr(each_gpu, "plans_by_mode", stopping_after(1))
    terminal = Screen(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    set_console(terminal)
    try:
        plan_command(parse(["plan", "--model", "tiny-1"]))
    finally:
        set_console(None)
    text = terminal.file.getvalue()
    assert "Full fine-tuning" in text and "RTX 3060    12 GiB  4 GPUs, FSDP2      4 GPUs, FSDP2" in text
    assert "planning" in text and "1/12" in text


def test_tables_of_cards_fit_into_80_columns():
    found = FOUND | {"tokens_per_second": 123456.0, "gpu_hours": 9999.9, "gpus": 512, "micro_batch_size": 64}
    tree = cards(**dict.fromkeys(MODES, found | {"sequence_ranks": 8, "hours": 999.9}))
    for seen in (True, False):
        text = screen(gpus_report(tree | {"seen": seen}))
        assert text.count("123,456") == text.count("512 GPUs, FSDP2") == 3 and "…" not in text


def test_hours_and_cost_of_a_card_are_ranges_where_its_step_is():
    found = FOUND | {"gpu_hours": 100.0, "step_seconds": 2.0, "step_seconds_range": (1.5, 2.2), "cost": 40.0}
    text = screen(gpus_report(cards(**dict.fromkeys(MODES, found)) | {"seen": True}))
    assert text.count("75.0 to 110") == text.count("30.00 to 44.00") == 3 and "…" not in text


@pytest.fixture()
def one_gpu_of(monkeypatch):
    """A catalogue with one GPU that has so many GiB."""

    def known(gib: float):
        specs = replace(find_specs("RTX 4090"), memory_mib=int(1024 * gib))
        monkeypatch.setattr(gpus, "find_specs", lambda name: specs)
        monkeypatch.setattr(other_machines, "COMMON_GPUS", ("small",))

    return known


LARGE = """\
  - name: org/Large-1
    parameters: 1
    source: here
    config: {model_type: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 24, vocab_size: 256,
             num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 512, head_dim: 128}
"""


@pytest.fixture()
def large(tmp_path):
    """A model of 1.6 GiB in fp32, with layers that are small beside it."""
    (tmp_path / "models.yaml").write_text(TINY + LARGE)
    published.published_models.cache_clear()


FULL, NEVER = ("tuning.mode=full", "model.max_seq_len=64"), "parallel.offload=none"


@pytest.mark.slow
def test_the_fewest_gpus_are_those_of_which_half_are_too_few(large, one_gpu_of):
    """By the plans for the fewest and for half of them."""
    one_gpu_of(2.5)
    alone, _ = plan("--model", "large-1", "--gpu", "small", *FULL)
    count, memory = alone["plan"]["world_size"], alone["memory"]
    assert count > 2 and alone["plan"]["engine"] == "fsdp2"
    assert f"{count} x small: the fewest that fit" in " ".join(alone["why"])
    assert f"NGPU={count} " in alone["command"] and memory["process_bytes"] <= memory["budget_bytes"]
    half = ("--model", "large-1", "--gpu", "small", "--gpus", str(count // 2), *FULL)
    with pytest.raises(DoesNotFitError, match=f"make plan MODEL=large-1 GPU=small NGPU={count} "):
        plan(*half, NEVER)


@pytest.mark.slow
def test_fewer_gpus_than_the_fewest_offload_and_a_table_of_cards_has_the_fewest(large, one_gpu_of):
    one_gpu_of(2.5)
    tree, _ = plan("--model", "large-1", *FULL)
    found = tree["cards"][0]["plans"]["full"]
    assert found["gpus"] > 2 and found["engine"] == "fsdp2"
    half = found["gpus"] // 2
    offloaded, _ = plan("--model", "large-1", "--gpu", "small", "--gpus", str(half), *FULL)
    assert offloaded["plan"]["offload"] == "ram" and offloaded["memory"]["host"]["budget_bytes"] is None
    assert f"NGPU={half} OFFLOAD=ram" in offloaded["command"]


@pytest.mark.slow
def test_the_batch_grows_with_the_gpus_unless_it_was_typed(large, one_gpu_of):
    one_gpu_of(2.5)
    with pytest.raises(DoesNotFitError):
        plan("--model", "large-1", "--gpu", "small", *FULL, "train.effective_batch_size=1", NEVER)
    tree, _ = plan("--model", "large-1", "--gpu", "small", *FULL, "train.batch_size=8")
    count = tree["plan"]["world_size"]
    assert tree["plan"]["effective_batch_size"] == 8 * count > 16
    assert f"train.effective_batch_size={8 * count}" in tree["command"]


def test_a_model_that_is_too_large_for_every_card_is_said_to_be(monkeypatch):
    monkeypatch.setattr(other_machines, "COMMON_GPUS", ("RTX 3060",))
    words = ["parallel.memory_gib=0.3", "tuning.mode=full", "train.effective_batch_size=1"]
    tree, _ = plan("--model", "tiny-1", *words)
    assert tree["cards"][0]["plans"]["full"]["problem"].startswith("this run does not fit: the smallest plan")


def test_every_card_has_a_known_memory():
    assert all(find_specs(card).memory_mib for card in COMMON_GPUS)


def test_nothing_to_plan_says_what_to_type():
    with pytest.raises(ConfigError, match="make plan MODEL=qwen3-8b"):
        plan()


@pytest.mark.thorough
def test_another_model_can_be_planned_with_a_config_and_overrides():
    config = str(REPOSITORY / "configs" / "run_distributed.yaml")
    overrides = ["model.max_seq_len=128", "train.effective_batch_size=8"]
    tree, _ = plan("--config", config, "--model", "tiny-1", "--gpu", "L4", "--gpus", "2", *overrides)
    found = tree["plan"]
    assert (found["max_seq_len"], found["effective_batch_size"], found["world_size"]) == (128, 8, 2)
    assert any("org/Tiny-1" in reason for reason in tree["why"])
    typed = " ".join(["model.name=org/Tiny-1", *overrides])
    assert tree["command"] == f'make train-distributed NGPU=2 CONFIG={config} ARGS="{typed}"'


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "make train CONFIG=configs/run_lora.yaml ARGS="),
        (
            # with less to choose from, of which each takes a trace
            ["--gpus", "2", "tuning.mode=full", "train.batch_size=1", "train.gradient_checkpointing=true"],
            "make train-distributed NGPU=2 CONFIG=configs/run_full.yaml ARGS=",
        ),
        pytest.param(
            ["--gpus", "4", "parallel.engine=fsdp2"],
            "make train-fsdp NGPU=4 CONFIG=configs/run_lora.yaml ARGS=",
            marks=pytest.mark.slow,
        ),
        (
            ["--gpus", "16", "tuning.mode=qlora"],
            "make train-slurm NODES=2 NGPU=8 ENGINE=ddp CONFIG=configs/run_qlora.yaml ARGS=",
        ),
    ],
)
def test_the_plan_of_a_model_says_what_to_type_and_that_is_what_was_planned(words, command, monkeypatch):
    tree, _ = plan("--model", "tiny-1", "--gpu", "RTX 4090", *words, "train.seed=7")
    assert tree["command"].startswith(command)
    settings = dict(word.split("=", 1) for word in shlex.split(tree["command"])[2:])
    typed = load_config(REPOSITORY / settings["CONFIG"], shlex.split(settings["ARGS"])).config
    assert (typed.model.name, typed.data.train_path, typed.train.seed) == ("org/Tiny-1", "my.jsonl", 7)
    assert typed.train.learning_rate == tree["plan"]["learning_rate"]
    assert tree["plan"]["total_steps"] == tree["plan"]["steps_per_epoch"] * typed.train.epochs


def test_the_plan_of_a_model_and_several_sources_says_what_to_type_too(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b", "completion": "c"}\n' * 40)
    sources = f"data.sources=[{{path: {rows}, weight: 2}}]"
    tree, _ = plan("--model", "tiny-1", "--gpu", "L4", "tuning.mode=lora", sources)
    settings = dict(word.split("=", 1) for word in shlex.split(tree["command"])[2:])
    typed = load_config(REPOSITORY / settings["CONFIG"], shlex.split(settings["ARGS"])).config
    assert typed.model.name == "org/Tiny-1" and typed.data.train_path is None
    assert [source.path for source in typed.data.sources] == [str(rows)]


def test_the_config_of_a_gated_model_needs_neither_network_nor_access(monkeypatch):
    monkeypatch.undo()
    published.published_models.cache_clear()
    config = load_config(REPOSITORY / "configs" / "run_llama70b_qlora.yaml").config
    architecture, notes = planning_config(config.model)
    assert architecture.num_hidden_layers == 80 and "the Hub was not asked" in notes[0]

"""`sft-play plan --context`, and plans for rows that are described."""

import io
import json
from pathlib import Path

import pytest

from sft_play.cli import main, parse
from sft_play.commands import context
from sft_play.commands.context import asked_tokens
from sft_play.commands.plan import plan_command
from sft_play.errors import ConfigError, DoesNotFitError
from sft_play.report.context import context_report, problem_of
from sft_play.ui.console import set_console
from sft_play.ui.screen import Screen
from tests.unit.commands.test_plan import TINY, tiny  # noqa: F401  an autouse fixture
from tests.unit.report.test_plan import screen

CARD, SMALL = ("--gpu", "RTX 4090", "--gpus", "1"), "parallel.memory_gib=2"


def plan(*words: str):
    found = plan_command(parse(["plan", "--json", "--model", "tiny-1", *words]))
    return found.tree, found.shown


@pytest.fixture()
def many_positions(tmp_path):
    (tmp_path / "models.yaml").write_text(
        TINY.replace("max_position_embeddings: 512", "max_position_embeddings: 999000")
    )


@pytest.mark.thorough
def test_each_method_has_a_longest_row_and_the_model_may_be_the_limit():
    tree, report = plan(*CARD, "--context", "max")
    assert [row["mode"] for row in tree["rows"]] == ["full", "lora", "qlora"]
    assert {(row["longest"], row["limit"]) for row in tree["rows"]} == {(512, "positions")}
    assert all(row["tokens_per_second"] > 0 for row in tree["rows"])
    json.dumps(tree)
    text = " ".join(screen(report).split())
    assert "the model has 512 positions" in text and "LoRA 1 512 positions one process" in text


@pytest.mark.slow
def test_memory_may_be_the_limit_and_an_asked_length_fits_or_does_not(many_positions):
    words = (*CARD, SMALL, "tuning.mode=lora", "parallel.offload=none")
    (row,) = plan(*words, "--context", "max")[0]["rows"]
    longest = row["longest"]
    assert row["limit"] == "memory" and longest % 1024 == 0
    (same,) = plan(*words, "--context", str(longest))[0]["rows"]
    assert same["fits"] and same["longest"] == longest
    too_long = f"rows of {longest + 1024:,} tokens do not fit org/Tiny-1 on NVIDIA GeForce RTX 4090"
    with pytest.raises(
        DoesNotFitError, match=rf"{too_long}: the longest that fit have LoRA on 1 GPU {longest:,} tokens"
    ):
        plan(*words, "--context", str(longest + 1024))


def test_searches_that_are_interrupted_keep_their_rows(monkeypatch):
    def searches(*_args):
        row = {"mode": "full", "processes": 1, "offload": "none", "longest": 512, "limit": "positions"}
        yield [row | {"sequence_ranks": 1}]
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "longest_rows", searches)
    tree, report = plan(*CARD, "--context", "max")
    assert not tree["complete"] and [row["longest"] for row in tree["rows"]] == [512]
    text = " ".join(screen(report).split())
    assert "full 1 512 positions" in text and "Stopped: 1 of 6 searches were made" in text
    assert "next make plan MODEL=tiny-1 GPU='RTX 4090' NGPU=1 CONTEXT=max" in text
    terminal = Screen(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    set_console(terminal)
    monkeypatch.setenv("SFT_PLAY_VERBOSE", "1")  # the console stays ours
    try:
        plan_command(parse(["plan", "--model", "tiny-1", *CARD, "--context", "max"]))
    finally:
        set_console(None)
    assert "full on 1 GPU: 512 tokens" in terminal.file.getvalue()


@pytest.mark.thorough
def test_without_a_number_of_gpus_there_is_one_and_a_machine_of_eight():
    tree, _ = plan("--gpu", "RTX 4090", "--context", "max", "tuning.mode=lora")
    assert [row["processes"] for row in tree["rows"]] == [1, 8]


def test_a_config_is_answered_for_this_machine():
    words = ["plan", "--json", "--config", "run.yaml", "--context", "256"]
    Path("run.yaml").write_text("model: {name: org/Tiny-1}\ndata: {train_path: none.jsonl}\n")
    found = plan_command(parse(words))
    (row,) = found.tree["rows"]
    assert found.tree["gpu"] is None and row["fits"] and row["longest"] == 512
    assert "this CPU" in screen(found.shown)


@pytest.mark.parametrize("typed", ["0", "1", "abc", "-5", "3.5", ""])
def test_what_is_no_length_is_refused(typed):
    with pytest.raises(ConfigError, match=f"CONTEXT={typed}: expected max"):
        asked_tokens(typed)
    assert asked_tokens("32768") == asked_tokens("32,768") == 32768 and asked_tokens("MAX") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*CARD, "--context", "513"], "CONTEXT=513 exceeds the 512 positions that 'org/Tiny-1' supports"),
        (["--context", "max"], "CONTEXT=max needs one kind of GPU"),
        ([*CARD, "--context", "max", "--rows", "5", "--tokens", "9"], "CONTEXT asks for the longest row"),
        (
            [*CARD, "--context", "max", "train.packing=true", "train.effective_batch_size=4096"],
            "leave it out",
        ),
        (["--gpu-hour", "2"], "GPU_HOUR is the price of one kind of GPU"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(words, said):
    with pytest.raises(ConfigError, match=said) as raised:
        plan(*words)
    assert "\n" not in str(raised.value)


def test_the_table_fits_into_80_columns():
    row = {
        "mode": "qlora", "processes": 512, "offload": "ram", "longest": 1_048_576, "limit": "positions", "fits": True,
        "engine": "fsdp2", "replicas": 64, "tokens_per_second": 123456.0, "process_bytes": 2**37,
    }  # fmt: skip
    tree = {"model": "m", "gpu": "g", "asked": 524_288, "positions": 1_048_576, "rows": [row], "why": []}
    text = screen(context_report(tree))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80 and "123,456" in text
    missing = {**row, "longest": None, "problem": "fused experts"}
    assert "QLoRA, RAM: fused experts" in screen(context_report(tree | {"rows": [missing]}))


def test_the_table_has_the_groups_that_reach_a_length():
    row = {
        "mode": "qlora", "processes": 512, "offload": "ram", "longest": 16_777_216, "limit": "positions", "fits": False,
        "sequence_ranks": 1,
    }  # fmt: skip
    more = {
        "longest": 16_777_216, "fits": True, "sequence_ranks": 128, "engine": "fsdp2", "replicas": 64,
        "tokens_per_second": 123456.0, "process_bytes": 2**37,
    }  # fmt: skip
    tree = {
        "model": "m",
        "gpu": "g",
        "asked": 524_288,
        "positions": 1_048_576,
        "rows": [row, row | more],
        "why": [],
    }
    text = screen(context_report(tree))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80 and "123,456" in text
    assert "QLoRA, RAM 512 128 16,777,216" in " ".join(text.split())
    assert "parallel.sequence_parallel_size" in text
    alone = screen(context_report(tree | {"rows": [row]}))
    assert "group" not in alone
    assert "on 512 GPUs in groups of 128 16,777,216 tokens" in problem_of(tree)


@pytest.mark.thorough
def test_rows_that_are_described_have_steps_hours_and_a_price():
    described = ("--rows", "5000", "--tokens", "100", "--gpu-hour", "2.5")
    tree, report = plan(*CARD, "tuning.mode=lora", *described)
    found = tree["plan"]
    assert found["steps_per_epoch"] == -(-5000 // 16)
    assert found["cost"] == pytest.approx(2.5 * found["gpu_hours"]) and found["gpu_hours"] > 0
    text = " ".join(screen(report).split())
    assert "5,000 rows assumed, half of them up to 100 tokens and 95% up to 180 (lognormal)" in text
    assert "GPU hours" in text and "which cost" in text
    assert any("planned without data: 5,000 rows assumed" in reason for reason in tree["why"])


@pytest.mark.thorough
def test_rows_above_the_limit_are_counted():
    described = ("--rows", "5000", "--lengths", "lognormal:400:600")
    tree, _ = plan(*CARD, "tuning.mode=lora", *described, "data.overlong=truncate")
    assert any("rows above the limit are cut" in reason for reason in tree["why"])


def test_a_price_is_a_number_above_0(capsys):
    for typed in ("-1", "0", "nan", "free"):
        with pytest.raises(SystemExit):
            main(["plan", "--model", "tiny-1", *CARD, "--gpu-hour", typed])
        assert f"GPU_HOUR={typed}: expected a number above 0" in capsys.readouterr().err

"""What is typed on the command line is checked before anything is done."""

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sft_play.cli import main, parse, report_error, run_rank
from sft_play.commands.command_line import GROUPS, PROGRAM, arguments
from sft_play.errors import ConfigError
from sft_play.launch.environment import WAITING, set_environment
from sft_play.spelling import BY_MAKE
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train", "--processes", "-1"], "NGPU=-1: expected a whole number from 0 to 16384"),
        (["probe", "--processes", "two"], "NGPU=two: expected a whole number from 0 to 16384"),
        (["plan", "--gpus", "0"], "NGPU=0: expected a whole number from 1 to 16384"),
        (["plan", "--gpus", "1000000000"], "NGPU=1000000000: expected a whole number from 1 to 16384"),
        (["eval", "--limit", "0"], "LIMIT=0: expected a whole number of at least 1"),
        (["prepare", "--show", "-1"], "SHOW=-1: expected a whole number of at least 0"),
        (["eval-lm", "--tasks", "a", "--limit", "0"], "LIMIT=0: expected a whole number of at least 1"),
        (["eval-lm", "--tasks", "a", "--shots", "-1"], "SHOTS=-1: expected a whole number of at least 0"),
        (["eval", "--split", "dev"], "error: SPLIT=dev: expected val or test\n"),
        (["merge", "--dtype", "int8"], "DTYPE=int8: expected auto, bfloat16, float16 or float32"),
        (["export", "--format", "onnx"], "FORMAT=onnx: expected gguf"),
        (["push", "--repo", "a/b", "--what", "all"], "WHAT=all: expected result or merged"),
        (["eval-lm", "--tasks", "a", "--what", "all"], "WHAT=all: expected result, base or merged"),
    ],
)
def test_a_number_or_a_name_that_makes_no_sense_is_refused(words, problem, capsys):
    with pytest.raises(SystemExit) as error:
        parse([*words, "--config", "configs/demo.yaml"])
    said = capsys.readouterr().err
    assert error.value.code == 2 and problem in said and "Usage" not in said


def test_without_make_a_wrong_value_names_its_flag(monkeypatch, capsys):
    monkeypatch.delenv(BY_MAKE)
    for flag, problem in (("--split", "val or test"), ("--limit", "a whole number of at least 1")):
        with pytest.raises(SystemExit):
            parse(["eval", "--config", "configs/demo.yaml", flag, "dev"])
        assert capsys.readouterr().err == f"error: {flag} dev: expected {problem}\n"


@pytest.mark.parametrize(
    "words", [["report"], ["plan", "--model"], ["dapt-docx", "--output", "x.jsonl", "--input"]]
)
def test_a_name_that_no_file_can_have_is_refused(words, capfd):
    assert main([*words, "n" * 5000]) == 2
    said = capfd.readouterr().err
    assert "nnn... (" in said and "use a shorter name" in said and "bug" not in said and len(said) < 300


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prepare", "--config", ""], 2, "no config file is named. Shipped configs: configs/demo.yaml"),
        (["merge", "--config", "configs/demo.yaml", "output.name=none"], 8, "runs/none does not exist"),
        (["eval", "--config", "configs/demo.yaml", "--limit", "0"], 2, "LIMIT=0: expected"),
        (["plan", "--modl", "qwen3-8b"], 2, "No such option '--modl'"),
    ],
)
def test_a_failure_is_json_too_where_a_result_would_be(words, code, said, capsys):
    try:
        assert main([*words, "--json"]) == code
    except SystemExit as error:
        assert error.code == code
    shown = capsys.readouterr()
    tree = json.loads(shown.out)
    assert tree["exit_code"] == code and said in tree["error"] and said in shown.err


@pytest.mark.parametrize("command", ["tensorboard", "runs", "report"])
def test_a_folder_of_runs_that_does_not_exist_is_not_made(command, tmp_path, capsys):
    assert main([command, "--runs", str(tmp_path / "typo")]) == (0 if command == "runs" else 8)
    assert "run `make train` first" in capsys.readouterr().err or command == "runs"
    assert not list(tmp_path.iterdir())


def test_a_config_that_cannot_be_written_says_how_to_name_another(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["init", "file/my.yaml"]) == 6
    assert capsys.readouterr().err == (
        "error: file/my.yaml cannot be written: Not a directory; name a file in another folder: sft-play init "
        "<folder>/my.yaml\n"
    )


def test_python_without_docstrings_is_refused():
    command = [sys.executable, "-OO", "-m", "sft_play", "config-schema"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2 and done.stderr.startswith("error: PYTHONOPTIMIZE=2")


def test_a_command_in_an_error_can_be_copied_from_a_narrow_terminal(monkeypatch, capsys):
    command = "make train-multinode NODES=2 RANK=0 MASTER_ADDR=10.0.0.1 CONFIG=configs/run_distributed.yaml"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    assert report_error(ConfigError(f"not set: RANK. Run:\n  {command}")) == 2
    said, *lines = capsys.readouterr().err.splitlines()
    assert said == "error: not set: RANK. Run:" and len(lines) > 1
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == command.split()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", [ConfigError, KeyboardInterrupt, RuntimeError])
def test_an_error_obeys_nothing_that_its_text_asks_of_the_terminal(monkeypatch, capsys, terminal, kind):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    report_error(kind("model_type '\x1b]0;title\x07' [bold]\r"))
    said = capsys.readouterr().err
    assert "\\x1b]0;title" in said and "[bold]" in said and not set("\x1b\x07\r") & set(said)


@pytest.mark.parametrize("start", [lambda: main(["gpu-info"]), lambda: run_rank(["--config", "x.yaml"])])
def test_more_threads_than_a_process_can_have_are_refused_before_anything_is_loaded(
    monkeypatch, capsys, start
):
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert start() == 2 and "error: OMP_NUM_THREADS=100000: " in capsys.readouterr().err


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_wait_as_the_user_has_set_it_or_by_our_setting(own, monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the rest of what it sets stays here
    set_environment()
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == (own or WAITING)


@pytest.mark.parametrize("path", [None, "/nowhere", f"/nowhere:{Path(sys.executable).parent}"])
def test_programs_of_an_environment_that_is_not_activated_are_found(path, monkeypatch):
    """DeepSpeed builds with ninja, which the lock installs beside Python; what the user has comes first."""
    monkeypatch.setattr(os, "environ", {"PATH": path} if path else {})
    set_environment()
    assert shutil.which("ninja", path=os.environ["PATH"].removeprefix(os.defpath))
    assert os.environ["PATH"].startswith(path or os.defpath)
    assert os.environ["PATH"].count(str(Path(sys.executable).parent)) == 1


def test_bitsandbytes_recommends_no_package(monkeypatch, caplog):
    """On a CPU with AVX-512 BF16 it does so while it is imported, before any output is redirected."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    main(["eval", "--config", "nothing.yaml"])
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Please make sure you `pip install kernels`")
    assert not caplog.records


@pytest.mark.parametrize(
    ("typed", "settings"),
    [
        (["--batch_size", "4"], "train.batch_size=4"),
        (["--lr=1e-4", "--bf16", "train.epochs=1"], "train.learning_rate=1e-4 train.mixed_precision=bf16"),
        (["--frobnicate", "1"], None),
        (["--gpus", "2"], None),  # of plan; here it is --processes
    ],
)
def test_a_flag_that_is_a_setting_here_is_shown_as_one(typed, settings, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--config", "configs/demo.yaml", *typed])
    unknown, _, said = capsys.readouterr().err.splitlines()[-1].partition("; ")
    assert "No such option '--" in unknown
    if settings:
        assert said == f"settings are written as section.key=value: {settings}"
    else:
        assert said.startswith("its flags: --config, --processes, --engine, ")


def test_a_config_without_its_flag_is_recognized(capsys):
    with pytest.raises(SystemExit):
        parse(["train", "my.yaml"])
    assert capsys.readouterr().err.endswith("Missing option '--config'; did you mean --config my.yaml?\n")


def test_without_a_config_it_says_where_one_comes_from(capsys):
    with pytest.raises(SystemExit):
        parse(["check"])
    said = capsys.readouterr().err
    assert "Missing option '--config'; that of the demo is configs/demo.yaml, and `sft-play init` " in said


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_a_rank_takes_what_the_older_launcher_of_torch_passes(flag, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert run_rank([flag, "--config", "nothing.yaml"]) == 2
    assert "error: config file nothing.yaml does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", [PROGRAM, *PROGRAM.commands.values()], ids=lambda each: each.name)
def test_no_example_is_broken_at_80_columns(command):
    shown = CliRunner().invoke(command, ["--help"], terminal_width=80).output
    for line in (command.epilog or "").replace("\b", "").splitlines():
        assert f"{line}\n" in shown


def test_help_has_its_short_flag_too():
    arguments("check", config="my.yaml")  # as from Python, after which click keeps the flags of a command
    for words in ([], ["train"], ["check"]):
        long, short = (CliRunner().invoke(PROGRAM, [*words, flag]) for flag in ("--help", "-h"))
        assert short.exit_code == 0 and short.output == long.output


def test_help_lists_each_command_once():
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(PROGRAM.commands) and len(set(listed)) == len(listed)
    shown = CliRunner().invoke(PROGRAM, ["--help"], terminal_width=80).output
    assert (
        shown.index("To start:") < shown.index("\n  demo ") < shown.index("Data:") < shown.index("\n  push ")
    )

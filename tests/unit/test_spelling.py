"""Messages name make's targets and variables; who typed sft-play reads its commands and flags."""

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from sft_play.cli import parse
from sft_play.commands.command_line import PROGRAM
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.spelling import BY_MAKE, FLAGS, OVERRIDES, SWITCHES, TARGETS, either, make, var
from tests.conftest import REPOSITORY

DEMO = REPOSITORY / "configs" / "demo.yaml"
MAKEFILE = (REPOSITORY / "Makefile").read_text()
VARIABLES = {*FLAGS, *SWITCHES, *OVERRIDES, "ARGS"}
# A message may speak of a command of make where only make is meant, and of variables that are not ours.
BY_HAND = {"cli.py", "commands/first_handlers.py"}


@pytest.mark.parametrize(
    ("target", "settings", "of_make", "of_package"),
    [
        ("train", {"CONFIG": "a.yaml", "NGPU": 2}, "make train CONFIG=a.yaml NGPU=2", "sft-play train --config a.yaml --processes 2"),
        ("train-fsdp", {"CONFIG": "a.yaml"}, "make train-fsdp CONFIG=a.yaml", "sft-play train --engine fsdp2 --processes 0 --config a.yaml"),
        ("plan", {"NGPU": 2, "GPU": "'RTX 4090'"}, "make plan NGPU=2 GPU='RTX 4090'", "sft-play plan --gpus 2 --gpu 'RTX 4090'"),
        ("report", {"RUN": "runs/a"}, "make report RUN=runs/a", "sft-play report runs/a"),
        ("infer", {"RUN": "a"}, "make infer RUN=a", "sft-play infer --config runs/a/config.resolved.yaml"),
        ("resume", {"RUN": "/data/a"}, "make resume RUN=/data/a", "sft-play train --resume --config /data/a/config.resolved.yaml"),
        ("resume", {"ALLOW": "train.epochs", "ARGS": "train.epochs=<more>"}, 'make resume ALLOW=train.epochs ARGS="train.epochs=<more>"', "sft-play train --resume train.allow_changed=[train.epochs] train.epochs=<more>"),
        ("train", {"ARGS": 'data.train_path="my rows.jsonl"'}, "make train ARGS='data.train_path=\"my rows.jsonl\"'", 'sft-play train data.train_path="my rows.jsonl"'),
        ("install", {}, "make install", "pip install <the wheel of SFT-Play>"),
    ],
)  # fmt: skip
def test_a_command_is_the_one_of_make_or_of_sft_play(target, settings, of_make, of_package, monkeypatch):
    assert make(target, **settings) == of_make
    monkeypatch.delenv(BY_MAKE)
    assert make(target, **settings) == of_package


@pytest.mark.parametrize(
    ("settings", "of_make", "of_package"),
    [
        ({"NGPU": "two"}, "NGPU=two", "--processes two"),
        ({"RUN": "<name>"}, "RUN=<name>", "output.name=<name>"),
        ({"NGPU": None}, "NGPU", "--processes"),
        ({"RUN": None}, "RUN", "output.name"),
        ({"TASKS": ""}, "TASKS=", "--tasks"),
        ({"ROWS": 5, "FORCE": 1}, "ROWS=5 FORCE=1", "--rows 5 --force"),
    ],
)
def test_a_setting_is_a_variable_of_make_or_a_flag(settings, of_make, of_package, monkeypatch):
    assert var(**settings) == of_make
    monkeypatch.delenv(BY_MAKE)
    assert var(**settings) == of_package


@pytest.mark.parametrize(
    ("override", "of_make"),
    [
        ("tuning.mode=lorra", "MODE=lorra: expected full, lora or qlora"),
        ("parallel.offload=disk", "OFFLOAD=disk: disk cannot hold everything; set OFFLOAD=ram, and to keep"),
        ("train.probe=serch", "PROBE=serch: expected true or false or search"),
    ],
)
def test_a_wrong_value_of_a_variable_of_make_is_no_problem_of_the_file(monkeypatch, override, of_make):
    for problem in (of_make, of_make.replace(of_make.partition(":")[0], override, 1)):
        with pytest.raises(ConfigError) as error:
            load_config(DEMO, [override])
        said = str(error.value).replace("parallel.offload=ram", "OFFLOAD=ram")
        assert said.startswith(problem) and "\n" not in said
        monkeypatch.delenv(BY_MAKE, raising=False)


def test_a_wrong_value_of_a_variable_beside_another_problem_is_named_alike():
    with pytest.raises(
        ConfigError, match=r"2 problems in the config\n  MODE=a: expected .*\n  train.epochs: .*\(found"
    ):
        load_config(DEMO, ["tuning.mode=a", "train.epochs=x"])


def test_a_text_of_the_user_that_looks_like_a_command_stays_as_it_is(monkeypatch):
    monkeypatch.delenv(BY_MAKE)
    found = "/data/make train/ROWS/NGPU=2"
    assert str(ConfigError(f"{found} is no file; run `{make('prepare')}`")) == (
        f"{found} is no file; run `sft-play prepare`"
    )


def test_every_target_for_users_has_a_command():
    for_users = MAKEFILE[: MAKEFILE.index("##@ Development")]
    targets = set(re.findall(r"^([a-z][\w-]*):.*## ", for_users, re.MULTILINE))
    assert targets - {"help", "install"} == set(TARGETS)


def test_every_setting_that_a_command_of_sft_play_takes_is_known():
    of_make = {"CONFIRM", "REMOVE", "ZERO", "PYTHON", "VENV", "EXTRAS", "V", "AGAINST", "MINUTES"}
    typed = re.search(r"^TYPED = (.*?)\n\$", MAKEFILE, re.MULTILINE | re.DOTALL)[1].replace("\\", "").split()
    others = {"SBATCH"}  # no message names it
    assert set(typed) - of_make - others <= VARIABLES


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of code but its docstrings."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node
            yield from nodes_of(node)


PACKAGE = REPOSITORY / "sft_play"
CODE = {
    str(path.relative_to(PACKAGE)): list(nodes_of(ast.parse(path.read_text())))
    for path in PACKAGE.rglob("*.py")
}


def test_no_message_spells_a_command_or_a_setting_by_hand():
    """Such a message would be wrong for half of its readers."""
    by_hand = re.compile(
        rf"\bmake ({'|'.join(sorted(TARGETS, reverse=True))})\b|(?<!\w)({'|'.join(VARIABLES)})="
    )
    found = {
        (file, node.value)
        for file, nodes in CODE.items()
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and by_hand.search(node.value)
    }
    assert {file for file, _ in found} <= BY_HAND, found


def test_no_message_is_spelled_when_its_module_is_imported():
    """Who its reader is, is known when a command runs."""
    spelled = {"make", "var", "either", "login", "settings_page"}
    found = [
        (file, node.lineno)
        for file, nodes in CODE.items()
        for outer in nodes
        if isinstance(outer, ast.Module)
        for statement in outer.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in spelled
    ]
    assert len(CODE) > 300 and not found


def value_of(node: ast.expr) -> object:
    """What is written, or a word or number for what is filled in."""
    return node.value if isinstance(node, ast.Constant) else "1"


def test_every_command_in_a_message_is_one_that_sft_play_understands(monkeypatch):
    monkeypatch.delenv(BY_MAKE)
    needed = {"eval-lm": "--tasks x", "style": "--style x", "push": "--repo a/b", "compare": "a b"}
    needed["dapt-docx"] = "--input a --output b"
    calls: list[tuple[str, dict[str, Any]]] = [
        (value_of(node.args[0]), {word.arg: value_of(word.value) for word in node.keywords if word.arg})
        for nodes in CODE.values()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "make"
        and node.args
    ]
    written = [(target, settings) for target, settings in calls if target in TARGETS]
    assert len(written) > 40
    for target, settings in written:
        counts = {name: 1 for name in settings if name in {"NGPU", "NODES", "RANK", "LIMIT", "SHOW", "SHOTS"}}
        words = shlex.split(re.sub("[<>]", "", make(target, **(settings | counts))))[1:]
        takes = {name for parameter in PROGRAM.commands[words[0]].params for name in parameter.opts}
        words += ["--config", "x"] if "--config" in takes - set(words) else []
        words += needed.get(words[0], "").split() if "--tasks" not in words else []
        assert parse(words).command == words[0], (target, settings)


def test_what_differs_between_a_clone_and_a_package(monkeypatch):
    assert either("a", "b") == "a"
    monkeypatch.delenv(BY_MAKE)
    assert either("a", "b") == "b"

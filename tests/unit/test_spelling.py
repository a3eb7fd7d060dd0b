"""Messages are written with make's targets and variables; who typed sft-play reads its commands and flags."""

import ast
import re
import shlex
from collections.abc import Iterator

import pytest

from sft_play.cli import parse
from sft_play.commands.command_line import PROGRAM
from sft_play.errors import ConfigError
from sft_play.spelling import BY_MAKE, COMMAND, FLAGS, OVERRIDES, SWITCHES, TARGETS, as_typed
from tests.conftest import REPOSITORY

MAKEFILE = (REPOSITORY / "Makefile").read_text()


@pytest.fixture(autouse=True)
def _not_by_make(monkeypatch):
    monkeypatch.delenv(BY_MAKE)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("run `make train CONFIG=a.yaml NGPU=2` first", "run `sft-play train --config a.yaml --processes 2` first"),
        ("make train-fsdp CONFIG=a.yaml", "sft-play train --engine fsdp2 --processes 0 --config a.yaml"),
        ("make plan NGPU=2 GPU='RTX 4090'", "sft-play plan --gpus 2 --gpu 'RTX 4090'"),
        ("make report RUN=runs/a", "sft-play report runs/a"),
        ("make infer RUN=a", "sft-play infer --config runs/a/config.resolved.yaml"),
        ("make resume RUN=/data/a", "sft-play train --resume --config /data/a/config.resolved.yaml"),
        ('make resume ALLOW=train.epochs ARGS="train.epochs=<more>"', "sft-play train --resume train.allow_changed=[train.epochs] train.epochs=<more>"),
        ("make train ARGS='data.train_path=\"my rows.jsonl\"'", 'sft-play train data.train_path="my rows.jsonl"'),
        ("NGPU=two: expected a number", "--processes two: expected a number"),
        ("or set another name (RUN=<name>).", "or set another name (output.name=<name>)."),
        ("set NGPU on all machines", "set --processes on all machines"),
        ("to make each of them, make it writable", "to make each of them, make it writable"),
        ("WORLD_SIZE=2 and the variable RANK=7, LOCAL_RANK=1", "WORLD_SIZE=2 and the variable RANK=7, LOCAL_RANK=1"),
        ("/data/make train-logs and make training", "/data/make train-logs and make training"),
    ],
)  # fmt: skip
def test_commands_and_settings_of_make_become_those_of_sft_play(written, shown):
    assert as_typed(written) == shown == as_typed(shown)


def test_an_error_is_spelled_for_its_reader(monkeypatch):
    error = ConfigError("nothing here; run `make prepare` first")
    assert str(error) == "nothing here; run `sft-play prepare` first"
    monkeypatch.setenv(BY_MAKE, "1")
    assert str(error) == "nothing here; run `make prepare` first"


def test_every_target_for_users_has_a_command():
    for_users = MAKEFILE[: MAKEFILE.index("##@ Development")]
    targets = set(re.findall(r"^([a-z][\w-]*):.*## ", for_users, re.MULTILINE))
    assert targets - {"help", "install"} == set(TARGETS)


def test_every_setting_that_a_command_of_sft_play_takes_is_known():
    of_make = {"ARGS", "CONFIRM", "REMOVE", "ZERO", "PYTHON", "VENV", "EXTRAS", "V", "AGAINST", "MINUTES"}
    typed = re.search(r"^TYPED = (.*?)\n\$", MAKEFILE, re.MULTILINE | re.DOTALL)[1].replace("\\", "").split()
    others = {"SBATCH"}  # no message names it
    assert set(typed) - of_make - others <= {*FLAGS, *SWITCHES, *OVERRIDES}


def strings(tree: ast.AST) -> Iterator[str]:
    """All strings in code that are no docstrings; of f-strings with a word for what is filled in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "word" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from strings(node)


def test_every_command_in_a_message_is_one_that_sft_play_understands():
    needed = {"eval-lm": "--tasks x", "style": "--style x", "push": "--repo a/b", "compare": "a b"}
    needed["dapt-docx"] = "--input a --output b"
    trees = (ast.parse(path.read_text()) for path in (REPOSITORY / "sft_play").rglob("*.py"))
    texts = (text for tree in trees for text in strings(tree))
    commands = {match[0] for text in texts for match in COMMAND.finditer(text)}
    assert len(commands) > 20
    for written in commands:
        numbers = re.sub(r"(NGPU|NODES|RANK|LIMIT|SHOW|SHOTS)=[^ ]*", r"\1=1", written)
        words = shlex.split(re.sub("[<>]", "", as_typed(numbers)))[1:]
        takes = {name for parameter in PROGRAM.commands[words[0]].params for name in parameter.opts}
        words += ["--config", "x"] if "--config" in takes - set(words) else []
        words += needed.get(words[0], "").split() if "--tasks" not in words else []
        assert parse(words).command == words[0], written

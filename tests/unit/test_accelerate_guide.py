"""ACCELERATE_SETUP.md has the questions of the installed accelerate, in its order, and names real files."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from sft_play.launch.environment import KEPT, OF_A_RANK, OF_THE_LAUNCHER, SETTLED_ELSEWHERE

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ACCELERATE_SETUP.md").read_text()
VARIABLES = (ROOT / "docs" / "reference" / "environment.md").read_text()


def test_the_reference_names_every_variable_that_is_removed_or_kept():
    known = [*SETTLED_ELSEWHERE, *OF_THE_LAUNCHER, *OF_A_RANK, *KEPT]
    assert [name for name in known if f"`{name}`" not in VARIABLES] == []


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def questions_of_the_wizard() -> list[str]:
    """What get_user_input and get_cluster_input ask, in the order of the source."""
    found = []
    folder = (
        Path(importlib.util.find_spec("accelerate").submodule_search_locations[0]) / "commands" / "config"
    )
    for name in ("config.py", "cluster.py"):
        tree = ast.parse((folder / name).read_text())
        variables = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("_ask_")
        ]
        for call in sorted(calls, key=lambda node: node.lineno):
            question = call.args[0]
            question = variables.get(question.id, question) if isinstance(question, ast.Name) else question
            found.append(plain("".join(words(question))))
    return found


def words(node: ast.expr) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return [word for part in node.values for word in words(part)]
    if isinstance(node, ast.FormattedValue):
        return ["GPU(s)"]  # the only thing that is filled in: the kind of device
    return [node.value] if isinstance(node, ast.Constant) else []


def questions_in_the_guide(section: str) -> list[str]:
    body = TEXT.split(f"### {section}")[1].split("\n### ")[0].split("\n## ")[0]
    rows = [line for line in body.splitlines() if line.startswith("|") and "`" in line]
    return [plain(re.search(r"`([^`]+)`", row).group(1)) for row in rows]


@pytest.mark.parametrize(
    ("section", "count"),
    [("Multiple GPUs in one machine (DDP)", 12), ("DeepSpeed ZeRO-2", 6), ("Multi-node", 5)],
)
def test_the_questions_are_those_of_the_wizard_in_its_order(section, count):
    asked, written = questions_of_the_wizard(), questions_in_the_guide(section)
    assert len(written) == count
    assert [question for question in written if question not in asked] == []
    positions = [max(i for i, question in enumerate(asked) if question == one) for one in written]
    assert positions == sorted(positions)


def test_the_version_that_the_guide_speaks_of_is_that_of_the_lock():
    version = re.search(r"accelerate (\d+\.\d+)", TEXT).group(1)
    assert f"\naccelerate=={version}." in (ROOT / "requirements.lock").read_text()


def test_every_file_that_the_guide_names_is_there():
    named = set(re.findall(r"(?:configs|scripts)/[\w./-]+\.\w+", TEXT))
    named |= {
        f"configs/accelerate/{name}"
        for name in re.findall(r"`(\w+\.yaml)`", TEXT)
        if name != "default_config.yaml"
    }
    assert {"configs/deepspeed_z2.json", "configs/accelerate/zero2_multi_node.yaml"} <= named
    assert [name for name in named if not (ROOT / name).is_file()] == []

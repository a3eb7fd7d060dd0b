"""What GitHub and editors read in a repository says what is true of this one."""

import re
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
GITHUB = REPOSITORY / ".github"
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def loaded(path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path):
    called = set()
    for job in loaded(path)["jobs"].values():
        for step in job["steps"]:
            words = step.get("run", "make test").split()
            assert words[0] == "make"
            matrix = re.fullmatch(r"\$\{\{ matrix\.(\w+) }}", " ".join(words[1:]))
            called |= set(job["strategy"]["matrix"][matrix[1]] if matrix else words[1:])
    assert called
    assert called <= TARGETS


def test_hooks_check_what_check_code_checks():
    recipe = (REPOSITORY / "Makefile").read_text().partition("\ncheck-code: ")[2].partition("\n\n")[0]
    checks = [line.partition(" -m ")[2].removesuffix(" .") for line in recipe.splitlines()[1:]]
    (source,) = loaded(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    hooks = [hook["entry"].partition(" -m ")[2].removesuffix(" --force-exclude") for hook in source["hooks"]]
    assert hooks == checks


def test_forms_ask_for_what_a_command_prints():
    forms = {path.stem: loaded(path) for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))}
    forms.pop("config")
    for form in forms.values():
        assert {"name", "description", "body"} == set(form)
        assert all(field["attributes"]["label"] for field in form["body"])
    assert "sft-play check --json" in str(forms["bug"])

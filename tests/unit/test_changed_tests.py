"""`make test-changed` finds the tests near to a change, in a tree small enough to be followed by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.changed_tests import all_modules, distances, near_tests
from tests.conftest import REPOSITORY

TREE = {
    "sft_play/__init__.py": "",
    "sft_play/units.py": "GIB = 2**30\n",
    "sft_play/data/__init__.py": "",
    "sft_play/data/chat.py": "from sft_play import units\n",
    "sft_play/data/rows.py": "def read():\n    from sft_play.data.chat import units\n",
    "sft_play/cli.py": "import sft_play.data.rows\n",
    "sft_play/report/pages.py": "PAGE = 'page.html.j2'\n",
    "sft_play/report/page.html.j2": "",
    "sft_play/configs/demo.yaml": "",
    "docs/guides/start.md": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/unit/data/test_chat.py": "from sft_play.data.chat import units\n\n\ndef test_chat():\n    pass\n",
    "tests/unit/data/test_order.py": "from sft_play import units\n\n\ndef test_order():\n    pass\n",
    "tests/unit/report/test_pages.py": "import sft_play.report.pages\n",
    "tests/unit/test_a_reader.py": "import sft_play.data.rows\n\n\ndef test_reader():\n    pass\n",
    "tests/unit/test_cli.py": "import sft_play.cli\nCONFIG = 'configs/demo.yaml'\n",
    "tests/unit/test_docs.py": "PAGES = ROOT / 'docs'\n",
    "tests/integration/test_runs.py": "from tests.unit import test_cli\nimport sft_play.cli\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def near(tree: Path, *files: str) -> tuple[list[str], int]:
    found, distant = near_tests(files, all_modules(tree, files))
    return [file.removeprefix("tests/") for file in found], distant


def test_the_nearest_come_first_and_the_rest_is_counted(tree):
    assert near(tree, "sft_play/data/chat.py") == (
        [
            "unit/data/test_chat.py",  # has its name
            "unit/data/test_order.py",  # stands beside it
            "unit/test_a_reader.py",  # imports it through a function of another module
        ],
        2,  # test_cli.py and test_runs.py: three imports away
    )
    assert near(tree, "sft_play/data/rows.py") == (
        ["unit/test_a_reader.py", "unit/data/test_chat.py", "unit/data/test_order.py", "unit/test_cli.py"],
        1,
    )


def test_the_test_of_a_module_in_a_room_stands_in_the_folder_of_its_package(tree):
    for file in ("sft_play/report/tables/cells.py", "tests/unit/report/test_cells.py"):
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text("def test_cells():\n    pass\n")
    found, _ = near(tree, "sft_play/report/tables/cells.py")
    assert found == ["unit/report/test_cells.py", "unit/report/test_pages.py"]


def test_a_changed_test_runs_wherever_it_is_and_a_deleted_one_does_not(tree):
    assert near(tree, "tests/integration/test_runs.py") == (["integration/test_runs.py"], 0)
    (tree / "sft_play/cli.py").unlink()
    (tree / "tests/unit/test_a_reader.py").unlink()
    assert near(tree, "sft_play/cli.py", "tests/unit/test_a_reader.py") == (["unit/test_cli.py"], 1)


def test_all_tests_below_a_conftest_are_near(tree):
    found, _ = near(tree, "tests/conftest.py")
    assert found == sorted(file.removeprefix("tests/") for file in TREE if file.startswith("tests/unit/"))


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("sft_play/configs/demo.yaml", ["unit/test_cli.py"]),
        ("sft_play/configs/accelerate/ddp.yaml", ["unit/test_cli.py"]),  # names a folder above it
        ("docs/guides/start.md", ["unit/test_docs.py"]),
        ("sft_play/report/page.html.j2", ["unit/report/test_pages.py"]),  # which imports what names it
        ("Makefile", []),
    ],
)
def test_files_that_are_no_modules_are_near_to_what_names_them(tree, file, tests):
    assert near(tree, file)[0] == tests


def test_distances_are_counted_along_the_shortest_way_and_circles_end():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": {"b"}, "alone": set()}
    assert distances(graph, {"d"}) == {"d": 0, "b": 1, "c": 1, "a": 2}


@pytest.mark.thorough
def test_the_command_runs_what_git_calls_changed_and_says_what_it_left_out(tree):
    def call(*words: str) -> subprocess.CompletedProcess:
        who = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a",
        }
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tree}:{REPOSITORY}", **who}
        return subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)

    def changed(*words: str) -> tuple[int, str]:
        done = call(sys.executable, "-m", "scripts.changed_tests", *words)
        return done.returncode, done.stdout + done.stderr

    (tree / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    for words in (["init"], ["add", "."], ["commit", "-m", "tree"], ["branch", "before"]):
        call("git", *words)
    assert changed() == (
        0,
        "changed since HEAD: nothing\nno unit test is near; 0 test files are more distant: make test\n",
    )
    (tree / "sft_play/data/chat.py").write_text("from sft_play import units\nunits.GIB\n")
    code, said = changed()
    assert (
        code == 0 and "3 passed" in said and "\n2 more distant test files were left out: make test" in said
    ), said
    code, said = changed("--seconds", "0")
    assert (
        code == 0 and "1 passed" in said and "2 of 3 test files were not finished in 0 s, 2 more" in said
    ), said
    call("git", "commit", "-a", "-m", "changed")
    assert "nothing" in changed()[1] and "3 passed" in changed("--against", "before")[1]
    (tree / "tests/unit/data/test_order.py").write_text("def test_order():\n    assert False\n")
    code, said = changed()
    assert code == 1 and "1 failed" in said, said
    code, said = changed("--against", "nowhere")
    assert code == 1 and said.startswith("error: git diff") and "nowhere" in said

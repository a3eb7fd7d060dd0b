"""The pages are connected, and those that are generated are what `make docs` writes."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.docs.__main__ import pages
from scripts.docs.tables import MARKED, TABLES, filled
from sft_play.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
INDEX = ROOT / "docs" / "README.md"
# What was tried may be gone.
HISTORY = ROOT / "docs" / "decisions"
CURRENT = [page for page in PAGES if not page.is_relative_to(HISTORY)]
MESSAGES = ROOT / "docs" / "guides" / "troubleshooting.md"  # looked up, not read from the beginning
BY_HAND = [ROOT / "MULTI_GPU_GUIDE.md", ROOT / "ACCELERATE_SETUP.md"]
GUIDES = [*BY_HAND, *(page for page in PAGES if page.parent.name == "guides" and page != MESSAGES)]


def links_of(page: Path) -> list[tuple[str, str]]:
    """The files and anchors that a page links to in this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [tuple(target.partition("#")[::2]) for target in targets]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere():
    wrong = []
    for page in PAGES:
        for file, anchor in links_of(page):
            target = (page.parent / file).resolve() if file else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {file}#{anchor}")
    assert not wrong, "\n".join(wrong)


def test_every_page_below_docs_can_be_reached_from_the_index():
    found, ahead = set(), [INDEX]
    while ahead:
        page = ahead.pop()
        if page in found:
            continue
        found.add(page)
        linked = [(page.parent / file).resolve() for file, _ in links_of(page) if file]
        ahead += [target for target in linked if target.suffix == ".md" and target.is_file()]
    missing = [str(page.relative_to(ROOT)) for page in PAGES if page not in found]
    assert not missing, "\n".join(missing)


def test_the_map_has_one_line_for_each_page():
    lines = [line for line in INDEX.read_text().splitlines() if line.startswith("- [")]
    mapped = [(INDEX.parent / re.search(r"\]\(([^)]+)\)", line)[1]).resolve() for line in lines]
    below = [page for page in CURRENT if page.is_relative_to(ROOT / "docs") and page != INDEX]
    assert len(set(mapped)) == len(mapped) and set(below) <= set(mapped)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_a_guide_begins_with_the_command_that_its_readers_came_for(guide):
    beginning = "\n".join(guide.read_text().splitlines()[:8])
    assert re.search(r"^```|`make \w", beginning, re.MULTILINE)


def test_every_page_that_code_mentions_exists():
    files = [ROOT / "Makefile", *(file for kind in ("py", "yaml", "sh") for file in sources(kind))]
    named = {(file, page) for file in files for page in re.findall(r"\bdocs/[\w/]+\.md", file.read_text())}
    missing = [f"{file.relative_to(ROOT)}: {page}" for file, page in named if not (ROOT / page).is_file()]
    assert not missing, "\n".join(sorted(missing))


def test_every_file_that_a_page_names_exists():
    pattern = r"(?<![\w/.*-])(?:configs|scripts|benchmarks|sft_play|tests)/[\w./-]+\.\w+"
    named = {(page, file) for page in CURRENT for file in re.findall(pattern, page.read_text())}
    missing = [f"{page.relative_to(ROOT)}: {file}" for page, file in named if not (ROOT / file).is_file()]
    assert named and not missing, "\n".join(sorted(missing))


def test_every_setting_that_a_page_names_exists():
    pattern = rf"(?<![/\w.])({'|'.join(RunConfig.model_fields)})\.(?!jsonl?`)([a-z_]+)(?=[=`])"
    unknown = []
    for page in CURRENT:
        for section, key in re.findall(pattern, page.read_text()):
            if key not in RunConfig.model_fields[section].annotation.model_fields:
                unknown.append(f"{page.relative_to(ROOT)}: {section}.{key}")
    assert not unknown, "\n".join(unknown)


def test_the_tour_names_everything_at_the_top_of_the_package():
    tour = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("## Codebase tour")[2]
        .partition("In reading order")[0]
    )
    rows = re.findall(r"^\| (`[^|]+) \|", tour, re.MULTILINE)
    named = sorted(name.strip("/") for row in rows[1:] for name in re.findall(r"`([^`]+)`", row))
    package = ROOT / "sft_play"
    folders = [path.parent.name for path in package.glob("*/__init__.py")]
    files = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    assert named == sorted([*folders, *files])


def sources(kind: str) -> list[Path]:
    """The files of this kind that are ours, without the results of benchmarks."""
    folders = ("sft_play", "scripts", "tests", "benchmarks", "configs")
    return [path for folder in folders for path in (ROOT / folder).rglob(f"*.{kind}")]


def test_generated_pages_are_what_make_docs_writes():
    stale = [str(path.relative_to(ROOT)) for path, text in pages().items() if path.read_text() != text]
    assert not stale, f"run make docs; it changes {', '.join(stale)}"


def test_every_table_is_on_a_page_and_an_unknown_one_is_an_error():
    shown = {found[2] for page in PAGES for found in MARKED.finditer(page.read_text())}
    assert shown == set(TABLES)
    with pytest.raises(KeyError, match="no-such-table"):
        filled("<!-- make docs: no-such-table -->\n<!-- end -->")


def test_every_message_of_the_troubleshooting_page_is_one_of_ours():
    """A piece of a message is one text of the code, without what is filled in."""
    texts = [
        node.value
        for file in (ROOT / "sft_play").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    pieces = re.findall(r"^\| `([^`]+)` \|", MESSAGES.read_text(), re.MULTILINE)
    missing = [piece for piece in pieces if not any(piece in text for text in texts)]
    assert len(pieces) >= 20 and not missing, missing


def test_the_site_leads_to_every_page_but_single_decisions():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = [page for part in nav for pages in part.values() for page in pages]
    assert len(set(listed)) == len(listed) and all((ROOT / page).is_file() for page in listed)
    elsewhere = "docs/decisions/0"  # reached from a page that is listed
    every = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {page for page in every if not page.startswith(elsewhere)} <= set(listed)


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("zensical", reason="needs zensical (make install EXTRAS=site)")
    (tmp_path / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    pages = tmp_path / "build" / "pages"
    shutil.copytree(ROOT / "docs", pages / "docs")
    shutil.copytree(ROOT / "examples", pages / "examples")
    for name in ("Dockerfile", *(page.name for page in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, pages / name)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "site" / "docs" / "guides" / "start.html").is_file()

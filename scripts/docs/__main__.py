"""`make docs`: writes the pages and tables that are generated, and the JSON files in configs."""

import json
from pathlib import Path

from benchmarks.architectures import GUIDE, guide, read_outcomes
from benchmarks.markdown import ROOT
from scripts.docs.config_reference import reference
from scripts.docs.python_reference import python_reference
from scripts.docs.tables import MARKED, filled
from sft_play.config.load import json_schema
from sft_play.engines.deepspeed import OF_STAGE, config_file, configuration


def pages() -> dict[Path, str]:
    """Each generated file and its text. The cookbook is written by `make cookbook`, which takes minutes."""
    found = {
        ROOT / "docs" / "reference" / "config.md": reference(),
        ROOT / "docs" / "reference" / "python.md": python_reference(),
        ROOT / "configs" / "schema.json": json.dumps(json_schema(), indent=2) + "\n",
        **{config_file(stage): json.dumps(configuration(stage), indent=2) + "\n" for stage in OF_STAGE},
        GUIDE: guide(read_outcomes()),
    }
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if MARKED.search(text):
            found[page] = filled(text)
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")

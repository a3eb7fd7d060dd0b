"""Prints the ranges of some of pyproject.toml's dependencies, one per line, for `make lock`.

python scripts/requirements_of.py deepspeed rouge-score
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def _name(requirement: str) -> str:
    """The package's name as indexes normalize it: `rouge_score>=0.1.2,<1` is of rouge-score."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def requirements_of(names: list[str], text: str) -> list[str]:
    """The lines of a pyproject.toml that require these packages."""
    lines = tomllib.loads(text)["project"]["dependencies"]
    return [line for line in lines if _name(line) in names]


if __name__ == "__main__":
    print("\n".join(requirements_of(sys.argv[1:], PROJECT.read_text(encoding="utf-8"))))

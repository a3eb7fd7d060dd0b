"""Prints the lowest versions that pyproject.toml allows, one per line, for `make test-floor`."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest(requirement: Requirement) -> str:
    """The requirement at its lowest version, or only its name if it has none."""
    floors = [part.version for part in requirement.specifier if part.operator == ">="]
    return f"{requirement.name}=={floors[0]}" if floors else requirement.name


def floor_requirements(text: str) -> list[str]:
    """The lowest versions of everything that a pyproject.toml requires, developer tools included."""
    project = tomllib.loads(text)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return [lowest(Requirement(line)) for line in wanted]


if __name__ == "__main__":
    print("\n".join(floor_requirements(PROJECT.read_text(encoding="utf-8"))))

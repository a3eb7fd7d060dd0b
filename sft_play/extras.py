"""The extras of pyproject.toml: packages that only some commands or settings need."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

from sft_play.spelling import by_make, make

WITHOUT_LOCK = ("mlflow", "trackio")  # they need older packages than requirements.lock has


def install_command(extra: str) -> str:
    """What installs an extra, by make where it has a lock; what installs all, if there is no such extra."""
    optional = [wanted for wanted in map(Requirement, requires("sft-play") or ()) if wanted.marker]
    chosen = [wanted for wanted in optional if wanted.marker and wanted.marker.evaluate({"extra": extra})]
    if not chosen:
        return make("install")
    if by_make() and extra not in WITHOUT_LOCK:
        return make("install", EXTRAS=extra)
    packages = " ".join(f'"{wanted.name}{wanted.specifier}"' for wanted in chosen)
    return f"{sys.executable} -m pip install {packages}"

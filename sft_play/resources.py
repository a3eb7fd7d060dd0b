"""The files that come with SFT-Play, as package data; `configs/` of the repository is a link to these."""

import difflib
import os
from pathlib import Path

PACKAGE = Path(__file__).parent
CONFIGS = PACKAGE / "configs"
SCRIPTS = PACKAGE / "scripts"  # of ranks and of nodes, which a launcher starts
CATALOGUES = {"hardware.yaml", "models.yaml", "prices.yaml"}  # among the configs, but no runs


def shipped_configs() -> list[str]:
    """The names of the configs that come with SFT-Play, as a person types them: configs/demo.yaml."""
    return sorted(f"configs/{file.name}" for file in CONFIGS.glob("*.yaml") if file.name not in CATALOGUES)


def meant_config(path: Path) -> str:
    """The file that may have been meant, and the configs that come with SFT-Play."""
    found, beside = shipped_configs(), map(str, path.parent.glob("*.yaml"))
    named = {Path(file).stem: file for file in (*found, *beside)}
    near = difflib.get_close_matches(path.stem, named, n=1)
    meant = f"; did you mean {named[near[0]]}?" if near else "."
    return f"{meant} Shipped configs: {', '.join(found)}"


def located(path: Path) -> Path:
    """Where the file of a config is: at its path or, if nothing is there, among `shipped_configs`."""
    if str(path) in shipped_configs() and not os.path.lexists(path):
        return PACKAGE / path
    return path

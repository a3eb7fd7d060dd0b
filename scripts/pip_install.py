"""`pip install` with one live line in place of pip's pages; the arguments are those of pip.

The last line says how many packages were installed. V=1 shows all that pip says, and so does an error.
"""

import os
import re
import subprocess
import sys
import time

COLLECTING = re.compile(
    r"^(?:Collecting|Obtaining|Processing|Requirement already satisfied:) (\S+?)(?:[=<>!~ ].*)?$"
)
DOWNLOADING = re.compile(r"Downloading (\S+?)-\d\S* \((.+)\)")
BUILDING = re.compile(r"(?:Building wheel|Building editable) for (\S+)")
INSTALLING = "Installing collected packages:"


def shown(line: str, packages: int) -> str:
    """What a line of pip means to a person who waits; "" if nothing."""
    if found := COLLECTING.match(line):
        return f"{counted(packages)}: {found[1]}"
    if found := DOWNLOADING.search(line):
        return f"{counted(packages)}: downloading {found[1]} ({found[2]})"
    if found := BUILDING.match(line):
        return f"building {found[1]}"
    return f"installing {counted(packages)}" if line.startswith(INSTALLING) else ""


def counted(packages: int) -> str:
    """How many packages, as text."""
    return f"{packages} package{'s' * (packages != 1)}"


def main(arguments: list[str]) -> int:
    """Runs pip, and returns its exit code."""
    command = [sys.executable, "-m", "pip", "install", *arguments]
    if os.environ.get("V") == "1":
        return subprocess.call(command)
    began, said, packages = time.monotonic(), [], 0
    live = sys.stderr.isatty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            said.append(line)
            packages += bool(COLLECTING.match(line))
            if live and (text := shown(line.strip(), packages)):
                sys.stderr.write(f"\r\x1b[K    {text[:70]}")
                sys.stderr.flush()
    if pip.returncode:
        sys.stderr.write(("\n" if live else "") + "".join(said))
    else:
        end = f"    {counted(packages)}, {time.monotonic() - began:.0f} s\n"
        sys.stderr.write(f"\r\x1b[K{end}" if live else end)
    return pip.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Measures each figure in a process of its own, which leaves no process behind.

What ran before in a process changes what follows it: memory that a library keeps, kernels that it has chosen,
and on a GPU an error after which nothing works any more. So a figure is a function of a benchmark that takes
and returns what JSON can hold, called in a fresh interpreter.

    python -m benchmarks.alone <module:function> <arguments as JSON> <file for the result>
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

import psutil

LIMIT_S = 240  # of a figure; with torch.compile, the first step of an 8B model took 91 s on an H200
LEAST_S = 20  # a figure that has less time is not begun
MARK = "SFT_PLAY_FIGURE"  # in the environment of all processes that come of a figure


def ended(words: list[str], timeout_s: float, output: IO[str] | None = None, **variables: str) -> int | None:
    """The exit code of a command; None if its time ran out.

    However it ends, all processes that came of it have been killed and are gone: ranks and workers too,
    whatever session they are in.

    Args:
        words: the command.
        timeout_s: seconds that it has.
        output: takes what it prints; None for where this process prints.
        variables: added to its environment.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, **variables, MARK: mark}
    out = {} if output is None else {"stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **out  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        return int(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(mark)


def _end(mark: str) -> None:
    """Kills what has this mark until nothing has it; gives up what the kernel holds for a minute."""
    deadline = time.monotonic() + 60
    while (left := list(marked(mark))) and time.monotonic() < deadline:
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=10)


def marked(mark: str) -> Iterator[psutil.Process]:
    """The living processes that have this mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process


def figure(function: str, *given: Any, deadline: float, limit_s: float = LIMIT_S) -> dict[str, Any] | None:
    """What `module:function` returns for `given`, or {"problem": why nothing}; None if it is too late.

    Args:
        function: it takes and returns what JSON can hold.
        given: its arguments.
        deadline: time.monotonic() until which there is time. What it cuts off is no result.
        limit_s: seconds that the figure may take; one that takes longer has a problem.
    """
    left_s = deadline - time.monotonic()
    if left_s < min(LEAST_S, limit_s):
        return None
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        words = [sys.executable, "-m", __spec__.name, function, json.dumps(given), str(found)]
        with log.open("w", encoding="utf-8") as output:
            code = ended(words, min(limit_s, left_s), output)
        if found.exists():
            return json.loads(found.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    if code is None:
        return {"problem": f"no answer in {limit_s:.0f} s"} if limit_s <= left_s else None
    return {"problem": f"exit code {code}: {said[-1]}"}


def main(function: str, given: str, found: str) -> None:
    """Calls the function, and writes what it returns at once."""
    result = json.dumps(resolve_name(function)(*json.loads(given)))
    partial = Path(f"{found}.part")
    partial.write_text(result, encoding="utf-8")
    partial.replace(found)


if __name__ == "__main__":
    main(*sys.argv[1:])

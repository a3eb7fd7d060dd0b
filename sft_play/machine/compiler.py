"""What compilers need on a machine of users: Triton's on a GPU, those of PyTorch and DeepSpeed on a CPU."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def missing_for_compiler(device: str) -> str | None:
    """What the compiler of a "cuda" or "cpu" device needs and is not here; None if nothing.

    Triton compiles a part in C for each kernel when it first runs it. Source: its runtime/build.py.
    """
    kind, variable, usual = ("C", "CC", ("gcc", "clang")) if device == "cuda" else ("C++", "CXX", ("g++",))
    asked = os.environ.get(variable, "").strip()
    names = asked.split()[:1] or usual  # as in "ccache g++"
    if not any(map(shutil.which, names)):
        return f"a {kind} compiler ({asked or usual[0]}; {variable} names another one)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # a scheme of Debian's
    headers = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not headers.is_file():
        return f"{headers} (on Debian and Ubuntu of python3-dev)"
    return "the package triton" if device == "cuda" and not find_spec("triton") else None

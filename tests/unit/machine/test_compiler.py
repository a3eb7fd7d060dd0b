"""What Triton and C++ compilers need: a program, Python's headers, the package."""

import os
import sys

import pytest

from sft_play.machine import compiler
from sft_play.machine.compiler import missing_for_compiler


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A function that puts empty programs of these names in a PATH of nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)  # as if triton were installed
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)

    def put(*names):
        for name in names:
            (folder / name).touch(mode=0o755)

    return put


def test_gcc_or_clang_compiles_for_a_gpu_and_another_compiler_if_it_is_named(programs, monkeypatch):
    assert missing_for_compiler("cuda") == "a C compiler (gcc; CC names another one)"
    programs("clang")
    assert missing_for_compiler("cuda") is None
    monkeypatch.setenv("CC", "icx -O1")
    assert missing_for_compiler("cuda") == "a C compiler (icx -O1; CC names another one)"
    programs("icx")
    assert missing_for_compiler("cuda") is None
    monkeypatch.setenv("CC", " ")
    assert missing_for_compiler("cuda") is None


def test_a_cpu_needs_a_compiler_of_cpp(programs, monkeypatch):
    programs("gcc")
    assert missing_for_compiler("cpu") == "a C++ compiler (g++; CXX names another one)"
    monkeypatch.setenv("CXX", f"{sys.executable} g++")  # a program that starts the compiler
    assert missing_for_compiler("cpu") is None


def test_headers_and_triton_are_needed_too(programs, monkeypatch, tmp_path):
    programs("gcc")
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert missing_for_compiler("cuda") == "the package triton"
    monkeypatch.setattr("sysconfig.get_path", lambda *of: str(tmp_path))
    found = missing_for_compiler("cuda")
    assert found == f"{tmp_path}{os.sep}Python.h (on Debian and Ubuntu of python3-dev)"

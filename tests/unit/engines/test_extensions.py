import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed import ops
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from sft_play.engines.deepspeed import clear_abandoned_locks
from sft_play.upstream import deepspeed as upstream


def old_lock(folder, name):
    lock = folder / "py311_cpu" / name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    return lock


def test_a_lock_that_nobody_works_behind_is_removed_and_one_in_use_or_young_stays(tmp_path):
    abandoned, in_use, young = (old_lock(tmp_path, name) for name in ("abandoned", "in_use", "young"))
    young.touch()
    builder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=in_use.parent)
    try:
        assert clear_abandoned_locks(tmp_path) == [abandoned]
    finally:
        builder.kill()
        builder.wait()
    assert not abandoned.exists() and in_use.exists() and young.exists()


def test_what_only_the_inference_of_deepspeed_uses_is_not_compiled():
    with upstream.inference_left_out():
        assert build_shm_op() is None
    assert ops.__compatible_ops__[ShareMemCommBuilder.NAME]


class Tiny(CPUOpBuilder):
    """A Python module in a few lines of C++, as DeepSpeed compiles its own."""

    NAME = "tiny"
    folder: Path

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return "tiny"

    def sources(self):
        return [str(self.folder / "tiny.cpp")]


TINY = """
#include <Python.h>
static PyModuleDef tiny = {PyModuleDef_HEAD_INIT, "tiny", 0, -1, 0};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&tiny); }
"""


@pytest.mark.thorough
def test_an_extension_that_is_compiled_is_told_of_and_a_compiled_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(Tiny, "folder", tmp_path, raising=False)
    (tmp_path / "tiny.cpp").write_text(TINY)
    said: list[str] = []
    monkeypatch.setattr(upstream, "BUILD_IS_SLOW_S", 0.0)
    with upstream.slow_builds_told(said.append):
        Tiny().jit_load(verbose=False)
    assert said == ["DeepSpeed compiles its extension tiny, once, which may take minutes"]
    monkeypatch.setattr(upstream, "BUILD_IS_SLOW_S", 60.0)
    with upstream.slow_builds_told(said.append):
        Tiny().jit_load(verbose=False)
    assert len(said) == 1 and (tmp_path / "tiny" / "tiny.so").exists()

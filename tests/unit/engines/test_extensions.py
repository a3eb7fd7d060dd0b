import os
import subprocess
import sys
import time

from sft_play.engines.deepspeed import clear_abandoned_locks


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

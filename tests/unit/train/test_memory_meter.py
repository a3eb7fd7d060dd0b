import subprocess
import sys

import pytest

# Each measurement in a process of its own, which inherits what takes seconds to import.
SCRIPT = """
import os
from sft_play.machine.process import importing_libraries
with importing_libraries():
    import torch
    from sft_play.train.memory_meter import MemoryMeter

def measure(mib):
    before = torch.ones(64 * 2**20 // 4)
    del before
    meter = MemoryMeter.start("cpu")
    held = torch.ones(mib * 2**20 // 4)
    del held
    print(meter.peak_bytes(), flush=True)

for mib in (32, 160):
    child = os.fork()
    if not child:
        measure(mib)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_meter_counts_from_its_start_and_keeps_the_peak():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert 30 * 2**20 < small < 48 * 2**20  # the 64 MiB before the start do not count
    assert 158 * 2**20 < large < 176 * 2**20

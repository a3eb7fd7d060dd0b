import subprocess
import sys

import pytest

SCRIPT = """
import torch
from sft_play.train.memory_meter import MemoryMeter
before = torch.ones(64 * 2**20 // 4)
del before
meter = MemoryMeter.start("cpu")
held = torch.ones({mib} * 2**20 // 4)
del held
print(meter.peak_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_meter_counts_from_its_start_and_keeps_the_peak():
    def peak(mib: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(mib=mib)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    small, large = peak(32), peak(160)
    assert 30 * 2**20 < small < 48 * 2**20  # the 64 MiB before the start do not count
    assert 158 * 2**20 < large < 176 * 2**20

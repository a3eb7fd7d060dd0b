"""Freed memory stays with the process, so that it need not be cleared again."""

import subprocess
import sys

CODE = """
import resource, sys, torch
from sft_play.machine.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def micro_batch():
    kept = [torch.ones(1 << 20) for _ in range(60)]  # 240 MiB in blocks of 4
micro_batch(), micro_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    micro_batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_micro_batch_finds_the_memory_of_the_one_before():
    assert page_faults("keep") < 0.05 * page_faults("give back")

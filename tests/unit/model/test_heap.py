"""Freed memory stays with the process, so that it need not be cleared again."""

import resource
import subprocess
import sys

import pytest

BLOCKS, MICRO_BATCHES = 60, 3
CODE = f"""
import resource, torch
from sft_play.model.layers.cpu import keep_freed_memory
keep_freed_memory()
def micro_batch():
    kept = [torch.ones(1 << 20) for _ in range({BLOCKS})]  # blocks of 4 MiB
micro_batch(), micro_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({MICRO_BATCHES}):
    micro_batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.thorough
def test_a_micro_batch_finds_the_memory_of_the_one_before():
    """Without the setting, a third of the pages is cleared again, or none: that depends on what else lies there."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    pages = MICRO_BATCHES * BLOCKS * (4 << 20) // resource.getpagesize()
    assert int(done.stdout) < 0.05 * pages

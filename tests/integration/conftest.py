"""Runs in the process of a test."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For runs in this process: tests run side by side, and with more threads sums change their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

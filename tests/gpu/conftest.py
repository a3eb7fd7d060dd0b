"""Each test of this folder runs on the CPU in `make test`, and on a GPU in `make test-gpu`.

So the tests themselves are known to work before the first minute on a GPU.
"""

import pytest
import torch

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)


@pytest.fixture(params=["cpu", GPU])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def only_gpu(device):
    """For what has no counterpart on a CPU."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    return device

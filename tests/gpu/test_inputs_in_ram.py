"""Inputs of layers that go to RAM and back beside the computation change no gradient, and leave the GPU."""

from functools import reduce

import pytest
import torch

from sft_play.model.layers.inputs_in_ram import InputsInRam

LAYERS, WIDTH = 6, 512
ROWS = {"cuda": 4096, "cpu": 256}  # where nothing is copied, fewer show the same
INPUT = ROWS["cuda"] * WIDTH * 4  # bytes in fp32


def gradients(device, offload):
    """Of several passes, in which copies take longer than the layers; with the GPU's bytes before each backward."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)]
    copier, held = InputsInRam(), []
    for _ in range(5):
        hidden = torch.randn(ROWS[device.type], WIDTH).to(device).requires_grad_()

        def call(hidden, layer):
            def compute(values):
                return torch.tanh(layer(values))

            if offload:
                return copier.checkpoint(compute, hidden)
            return torch.utils.checkpoint.checkpoint(compute, hidden, use_reentrant=False)

        result = reduce(call, layers, hidden)
        if device.type == "cuda":
            held.append(torch.cuda.memory_allocated(device))
        result.square().mean().backward()
        del result
    return [layer.weight.grad for layer in layers], held


@pytest.mark.thorough
def test_gradients_are_those_without_copies(device):
    (here, _), (in_ram, _) = (gradients(device, offload) for offload in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(here, in_ram, strict=True))


def test_inputs_have_left_the_gpu_when_the_forward_pass_ends(only_gpu):
    (_, here), (_, in_ram) = (gradients(only_gpu, offload) for offload in (False, True))
    saved = [one - other for one, other in zip(here, in_ram, strict=True)]
    assert saved == pytest.approx([(LAYERS - 1) * INPUT] * 5, abs=INPUT // 100)  # the batch itself stays

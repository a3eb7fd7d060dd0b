"""NEFTune's noise depends on a sequence, not on what it is joined with."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.data.collators import flash_boundaries
from sft_play.model.noise import add_noise

ALPHA, HIDDEN = 5.0, 64


@pytest.fixture
def embedded(tiny_model):
    """The embeddings of a batch, and their noise, of a model that has noise."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = model.get_input_embeddings().weight.detach().clone()
    add_noise(model, ALPHA)
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.detach()))

    def of(ids, *, training=True, **batch):
        model.train(training)
        model(input_ids=ids, **batch)
        return seen.pop() - plain[ids]

    return of


def test_a_joined_sequence_has_the_noise_that_it_would_have_alone(embedded):
    lengths = [40, 4, 20]
    ids = torch.arange(3, 3 + sum(lengths))[None]
    torch.manual_seed(0)
    noise = embedded(ids, sequence_lengths=lengths)[0]
    for part in noise.split(lengths):
        bound = ALPHA / (len(part) * HIDDEN) ** 0.5
        assert 0.97 * bound < part.abs().max() <= bound * 1.001
        assert part.mean().abs() < 0.1 * bound
    torch.manual_seed(0)
    bounds = flash_boundaries(np.array(lengths))
    flash = embedded(ids, **bounds)[0]
    assert torch.equal(flash, noise)


def test_padded_rows_have_noise_while_training_and_none_afterwards(embedded):
    ids = torch.arange(3, 35).view(2, 16)
    bound = ALPHA / (16 * HIDDEN) ** 0.5
    noise = embedded(ids)
    assert 0.97 * bound < noise.abs().max() <= bound * 1.001
    assert not torch.equal(noise, embedded(ids))
    assert not embedded(ids, training=False).any()

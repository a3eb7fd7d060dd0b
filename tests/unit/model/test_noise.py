"""NEFTune's noise follows from a row, the step and the seed, not from what the row is joined with."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_play.data.tokens import IGNORED
from sft_play.model.collators import flash_boundaries
from sft_play.model.noise import add_noise

ALPHA, HIDDEN = 5.0, 64


@pytest.fixture
def embedded(tiny_model):
    """The embeddings of a batch, and their noise, of a model that has noise."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = model.get_input_embeddings().weight.detach().clone()

    def of(ids, *, seed=0, step=0, training=True, **batch):
        model.get_input_embeddings()._forward_hooks.clear()
        add_noise(model, ALPHA, seed)
        seen = []
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.detach()))
        model.noise_step = step
        model.train(training)
        model(input_ids=ids, **batch)
        return seen.pop() - plain[ids]

    return of


def bound(tokens: int) -> float:
    return ALPHA / (tokens * HIDDEN) ** 0.5


def test_a_row_has_the_same_noise_joined_padded_and_alone(embedded):
    lengths = [40, 4, 20]
    rows = torch.arange(3, 3 + sum(lengths)).split(lengths)
    alone = [embedded(row[None])[0] for row in rows]
    joined = embedded(torch.cat(rows)[None], sequence_lengths=lengths)[0]
    flash = embedded(torch.cat(rows)[None], **flash_boundaries(np.array(lengths)))[0]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    padded = embedded(labels.clamp(min=0), labels=labels)
    for number, part in enumerate(joined.split(lengths)):
        assert torch.equal(part, alone[number])
        assert torch.equal(part, flash.split(lengths)[number])
        assert torch.equal(part, padded[number, : lengths[number]])
        assert 0.97 * bound(len(part)) < part.abs().max() <= bound(len(part)) * 1.001


def test_what_follows_the_last_token_with_loss_changes_no_noise(embedded):
    ids = torch.arange(3, 43)[None]
    labels = ids.clone()
    labels[:, 30:] = IGNORED
    noise = embedded(ids, labels=labels)[0, :30]
    other = ids.clone()
    other[:, 30:] = 7
    assert torch.equal(embedded(other, labels=labels)[0, :30], noise)
    assert torch.equal(embedded(ids[:, :30])[0], noise)
    assert 0.97 * bound(30) < noise.abs().max() <= bound(30) * 1.001


def test_noise_is_another_one_in_each_row_step_and_run_and_none_in_an_evaluation(embedded):
    ids = torch.arange(3, 163)[None]
    other = ids.clone()
    other[0, -1] = 3  # the beginning is the same, as with a system prompt
    found = [
        embedded(ids),
        embedded(other),
        embedded(ids, step=1),
        embedded(ids, step=2),
        embedded(ids, seed=1),
        embedded(ids, seed=2**32 - 1),
    ]
    assert not embedded(ids, training=False).any()
    flat = torch.stack([noise.flatten() / bound(160) for noise in found])
    for noise in flat:  # uniform: a tenth of the values is in each tenth of the range
        assert (torch.histc(noise, 10, -1, 1) / noise.numel() - 0.1).abs().max() < 0.015
    assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 0.05
    for one in (found[0][0], found[0][0].T):  # of tokens, and of dimensions
        assert (torch.corrcoef(one) - torch.eye(len(one))).abs().max() < 0.6

"""Every causal language model that transformers can build trains, or is refused in words."""

import pytest

from benchmarks.architectures import architectures, walk

SAMPLE = ("falcon", "gpt_oss", "phimoe", "jetmoe", "bert")  # docs/decisions/0019-rare-architectures.md
WAYS = ("lora", "packed")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_of_its_own_kind_trains_or_is_refused_in_words(name):
    lora, packed = walk([name], WAYS, measure=False)
    assert not lora.crashed and not packed.crashed, (lora.refusal, packed.refusal)
    assert lora.trained == (name != "bert") and packed.trained == (name in ("gpt_oss", "phimoe", "jetmoe"))


@pytest.mark.faults
@pytest.mark.parametrize("name", sorted(set(architectures()) - set(SAMPLE)))
def test_every_architecture_trains_or_is_refused_in_words(name):
    for outcome in walk([name], WAYS, measure=False):
        assert outcome.way != "build" and not outcome.crashed, outcome.refusal
        assert outcome.trained or outcome.refusal

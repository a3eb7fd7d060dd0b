"""What our ways around libraries are for, shown where nothing else shows it."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from benchmarks.miniatures import miniature
from sft_play.engines.stored import type_of
from sft_play.upstream.accelerate import wrapped_as_before
from sft_play.upstream.transformers import types_apart


def test_the_types_apart_are_those_that_transformers_loads_weights_in(tmp_path):
    AutoModelForCausalLM.from_config(miniature("ernie4_5_moe")).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    apart = types_apart(loaded, torch.bfloat16)
    found = {name: type_of(name, torch.bfloat16, apart) for name, _ in loaded.named_parameters()}
    assert found == {name: weight.dtype for name, weight in loaded.named_parameters()}
    assert {torch.bfloat16, torch.float32} == {*found.values()}


def test_a_model_that_is_prepared_again_computes_in_one_wrapper():
    model = torch.nn.Linear(2, 2)
    before = dict(vars(model))
    with wrapped_as_before(model):
        Accelerator().prepare(model)
        assert vars(model).keys() > before.keys()
    assert vars(model) == before

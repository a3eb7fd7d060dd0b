"""What the memory of ZeRO-2 depends on besides the blocks of a step: the order of parameters and of gradients."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.small_models import WIDE, small_config
from benchmarks.steps import step_of
from sft_play.config.schema import LoraSettings
from sft_play.model.adapters.attach import attach_adapter
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace.fake_model import trained_elements
from sft_play.sizing.trace.trace import trace_step
from sft_play.timeline import TERMS, WHOLE_MODEL, Buffer
from sft_play.train.trainer import PlannedTrainer

LORA = LoraSettings(r=4)
SMALL = WIDE | {"layers": 5, "vocabulary": 300}
HEAD_BYTES = 4 * SMALL["vocabulary"] * SMALL["hidden"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "activations", "lora", "found"),
    [
        ("full", "keep", LORA, WHOLE_MODEL),  # of the output head
        ("lora", "keep", LORA, 4),
        ("lora", "recompute", LORA, 4),
        ("lora", "recompute", LoraSettings(r=4, modules_to_save=("lm_head",)), WHOLE_MODEL),
    ],
)
def test_a_buffer_can_begin_with_the_first_gradient(mode, activations, lora, found):
    """That of a layer that is recomputed comes after this, when what the recomputation freed is gone."""
    spec = step_of(mode=mode, activations=activations, lora=lora, batch=PaddedRows(2, 32))
    step = trace_step(small_config("llama", SMALL), spec).step
    line = step.timeline

    def begins(place):
        longer = step.with_buffers(Buffer("engine", 1 << 40, "backward", "backward", place))
        return int(np.flatnonzero(longer.timeline.changes(longer.sizes) == 1 << 40)[0])

    begin = begins("gradients")
    assert line.layers[begin] == found
    first, end = begins("layers"), begins("end")
    if found == WHOLE_MODEL:
        assert begins("begin") < begin < first
        begun = set(line.events[:begin].tolist())
        alive = [line.source[event - 1] for event in begun if event > 0 and -event not in begun]
        kinds = {TERMS[line.terms[block]] for block in alive if step.sizes[block] == HEAD_BYTES}
        assert kinds - {"weights", "adapters", "gradients", "optimizer"}  # DeepSpeed copies it before it goes
    else:
        computed = line.layers[first:end] == found
        assert first < begin < first + computed.sum()
        before = np.sum(line.events[first:begin] > 0)
        assert before > (20 if activations == "recompute" else 0)


@pytest.mark.parametrize(
    ("mode", "lora", "new_tokens"),
    [
        ("full", LoraSettings(), 0),
        ("lora", LORA, 0),
        ("lora", LoraSettings(r=4, plus_ratio=4, modules_to_save=("norm", "input_layernorm")), 0),
        ("lora", LoraSettings(r=4, use_dora=True), 0),
        ("qlora", LORA, 2),
    ],
)
@pytest.mark.parametrize("name", ["llama", "starcoder2", "gpt2"])
def test_trained_elements_are_those_of_the_trainers_groups(name, mode, lora, new_tokens, tmp_path):
    if name != "llama" and "input_layernorm" in lora.modules_to_save:
        pytest.skip("its norms have other names")
    config = small_config(name, SMALL)
    model = AutoModelForCausalLM.from_config(config)  # weights in 4 bits are not trained
    if mode != "full":
        model = attach_adapter(model, lora, new_ids=range(new_tokens))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    trainer._plus_ratio = lora.plus_ratio
    optimizer = trainer.create_optimizer()
    if lora.plus_ratio:
        PlannedTrainer._split_by_rate(trainer, optimizer, model, lora.plus_ratio)
    groups = [[weight.numel() for weight in group["params"]] for group in optimizer.param_groups]
    found = trained_elements(config, StepSpec(mode=mode, lora=lora, new_tokens=new_tokens))
    assert found == [group for group in groups if group]

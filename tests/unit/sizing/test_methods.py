"""The memory of each method: its states are those of the real optimizer, and its step that of the CPU."""

from importlib.util import find_spec

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers.integrations.neftune import activate_neftune
from trl import SFTConfig, SFTTrainer

from benchmarks.cpu_meter import measure_step
from benchmarks.random_models import random_model
from benchmarks.small_models import TALL, WIDE, small_config
from benchmarks.steps import step_of
from sft_play.choices.optimizers import OPTIMIZERS, PAGED_FROM, make_optimizer, optimizer_state
from sft_play.config.schema import LoraSettings, TuningConfig
from sft_play.extras import install_command
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace.trace import trace_step

SCHEDULE_FREE = "schedule_free_adamw"
INSTALLED = [name for name in OPTIMIZERS if name != SCHEDULE_FREE or find_spec("schedulefree")]
ON_CPU = [name for name in INSTALLED if not name.startswith("paged")]
SHAPES = [(96, 64), (100,), (4, 40, 48)]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_that_the_trainers_optimizer_has_after_a_step(name, dtype, tmp_path):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    args = SFTConfig(output_dir=str(tmp_path), optim=OPTIMIZERS[name].trainer, use_cpu=True, bf16=False)
    kind, settings = SFTTrainer.get_optimizer_cls_and_kwargs(args)
    real = kind(parameters, **settings)
    ours = make_optimizer(name, parameters)
    assert type(ours) is type(real)
    if name == SCHEDULE_FREE:
        real.train()
    for optimizer in (real, ours):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert len(real.state) == len(SHAPES)
    for parameter in parameters:
        expected = optimizer_state(name, parameter, "cpu")
        for optimizer in (real, ours):
            found = optimizer.state[parameter]
            assert found.keys() == expected.keys()
            for key, value in found.items():
                if isinstance(value, torch.Tensor) and not key.startswith("qmap"):
                    assert (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype), key


FULL, LORA = "full", LoraSettings(r=16)
LAYERS = LoraSettings(r=4, rank_pattern={"layers.2.mlp.up_proj": 24, "q_proj": 2})


SLOW = [pytest.mark.slow]
NO_PACKAGE = pytest.mark.skipif(
    SCHEDULE_FREE not in INSTALLED, reason=f"run `{install_command('schedulefree')}`"
)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(FULL, {"optimizer": "adafactor"}, id="adafactor", marks=SLOW),
        pytest.param(FULL, {"optimizer": "lion_32bit"}, id="lion", marks=SLOW),
        pytest.param(FULL, {"optimizer": "lion_8bit"}, id="lion in 8 bits", marks=SLOW),
        pytest.param(FULL, {"optimizer": SCHEDULE_FREE}, id="schedule-free", marks=[*SLOW, NO_PACKAGE]),
        pytest.param(LORA, {"optimizer": "adamw_8bit"}, id="AdamW in 8 bits", marks=SLOW),
        pytest.param(LORA, {"optimizer": "adafactor"}, id="LoRA with adafactor", marks=SLOW),
        pytest.param(FULL, {"neftune": True}, id="NEFTune", marks=SLOW),
        pytest.param(LORA, {"neftune": True}, id="LoRA with NEFTune", marks=SLOW),
        pytest.param(LAYERS, {"optimizer": "lion_8bit", "neftune": True}, id="ranks by layer, lion, NEFTune"),
        pytest.param(LoraSettings(r=8, init="pissa"), {}, id="pissa", marks=SLOW),
        pytest.param(LoraSettings(r=8, init="olora"), {}, id="olora", marks=SLOW),
    ],
)
def test_the_real_step_on_the_cpu_allocates_what_the_trace_says(method, settings):
    config = small_config("llama", TALL | {"layers": 4})
    lora = LORA if method == FULL else method
    spec = step_of(
        mode="full" if method == FULL else "lora", lora=lora, **{"batch": PaddedRows(3, 32), **settings}
    )
    model = random_model(config, spec, TuningConfig(mode=spec.mode, lora=lora), torch.device("cpu"))
    if spec.neftune:
        activate_neftune(model, 5.0)
    embedding = model.get_input_embeddings()  # as the trainer does
    GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
    measured = measure_step(model, spec)
    predicted = trace_step(config, spec).step.peaks()
    for phase, size in measured.phases.items():
        assert predicted[phase].bytes == pytest.approx(size, rel=1e-3), phase
    top = max(measured.phases, key=measured.phases.get)
    assert predicted[top].bytes - measured.weights == pytest.approx(
        measured.peak - measured.weights, rel=1e-3
    )


def states(optimizer, device, mode="full"):
    spec = StepSpec(
        mode=mode, optimizer=optimizer, device=device, lora=LoraSettings(r=64), batch=PaddedRows(2, 128)
    )
    peaks = trace_step(small_config("llama", WIDE | {"layers": 2}), spec).step.peaks()
    return peaks["forward"].terms["optimizer"], peaks["optimizer"].bytes


@pytest.mark.slow
def test_every_optimizer_is_sized_for_a_gpu():
    found = {name: states(name, "cuda") for name in INSTALLED}
    assert found["lion_8bit"][0] < found["adamw_8bit"][0] < found["lion_32bit"][0]
    assert found["adafactor"][0] < found["adamw"][0] / 20
    for paged in (name for name in INSTALLED if name.startswith("paged")):
        plain = "adamw" if paged == "paged_adamw_32bit" else paged.removeprefix("paged_")
        assert found[paged][0] < found[plain][0] / 5 and found[paged][1] < found[plain][1]


def test_large_states_are_paged_and_small_ones_are_not():
    for count, place in ((PAGED_FROM - 1, "cpu"), (PAGED_FROM, "meta")):
        state = optimizer_state("paged_lion_32bit", torch.zeros(count), "cuda")
        assert state["state1"].device.type == place

"""After `sft.train()`, the libraries are as they were before it, for what else a notebook does."""

import importlib
import logging
import os
import sys
from datetime import date
from types import FunctionType, ModuleType

import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

import sft_play.api as sft
from tests.integration.cli import make_workspace

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
LIBRARIES = (
    "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "huggingface_hub", "datasets",
    "tensorboard", "torchao", "liger_kernel",
)  # fmt: skip
# Where something is changed, or may be: imported before, so that what is compared is there on both sides.
IMPORTED = """
    accelerate.state bitsandbytes.optim datasets deepspeed.ops.op_builder.builder deepspeed.runtime.engine
    deepspeed.runtime.zero.parameter_offload deepspeed.runtime.zero.stage3 huggingface_hub.constants huggingface_hub.utils._http
    huggingface_hub.utils._xet_progress_reporting peft peft.tuners.lora.dora torch._dynamo.config torch.utils.tensorboard
    transformers.core_model_loading transformers.integrations.integration_utils transformers.models.llama.modeling_llama
    trl.trainer.sft_trainer trl.kernels.chunked_logprob sft_play.train.run sft_play.commands.evaluate
"""
# State that a library counts in, and what it imports late under the same name.
OWN_STATE = {
    "huggingface_hub.utils._http._GLOBAL_CLIENT", "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch.autograd.profiler._cupti_monitor_checked", "torch.autograd.profiler._cupti_monitor_module",
    "torch._opaque_base._FakeScriptObject_cls", "torch.distributed.distributed_c10d._backend",
    "deepspeed.comm.comm.cdb", "deepspeed.dist",  # of the process group, which is destroyed and made anew
}  # fmt: skip
PLAIN = bool | int | float | str | tuple | frozenset | type | FunctionType | None
TEMPLATE = (
    "{{ strftime_now('%Y') }} {% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}"
    "{% if m.role == 'assistant' %}{{ '<eos> ' }}{% endif %}{% endfor %}"
)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def state() -> dict[str, object]:
    """By name: what modules and classes of the libraries hold, and what they keep for the process."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if not is_ours(name) or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                found |= {
                    f"{name}.{key}.{part}": one
                    for part, one in vars(value).items()
                    if callable(one) or isinstance(one, classmethod | staticmethod)
                }
            if callable(value) or isinstance(value, PLAIN):
                found[f"{name}.{key}"] = value
    from accelerate.state import AcceleratorState, PartialState
    from bitsandbytes.optim import GlobalOptimManager
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    loggers = {name: logging.getLogger(name) for name in logging.root.manager.loggerDict if is_ours(name)}
    kept = {
        "attention": dict(ALL_ATTENTION_FUNCTIONS),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "environment": dict(os.environ),
        "levels": {name: one.level for name, one in loggers.items()},
        "filters": {name: list(one.filters) for name, one in loggers.items()},
        "accelerate": [dict(AcceleratorState._shared_state), dict(PartialState._shared_state)],
        "overrides": dict(vars(GlobalOptimManager.get_instance())),
    }
    return found | {
        f"{kind}: {name}": value
        for kind, values in kept.items()
        for name, value in (values if isinstance(values, dict) else {"": values}).items()
    }


def differences(before: dict[str, object]) -> list[str]:
    """Names of what has changed since; what was not there before is compared for what the process keeps."""
    after = state()
    changed = [
        name
        for name, value in before.items()
        if name not in OWN_STATE and (name not in after or not same(after[name], value))
    ]
    loggers = ("levels: ", "filters: ")  # which libraries make when they are asked for something
    added = after.keys() - before.keys()
    return sorted([*changed, *(name for name in added if ": " in name and not name.startswith(loggers))])


def same(one: object, other: object) -> bool:
    return one is other or (not callable(one) and type(one) is type(other) and one == other)


@pytest.fixture(scope="module", autouse=True)
def imported():
    for name in IMPORTED.split():
        importlib.import_module(name)


@pytest.fixture(params=["lora", "full in 8 bits", "ZeRO-3 in RAM"])
def settings(request):
    plain = {"train.max_steps": 2, "train.report_to": ["tensorboard"], "data.chat_template": None}
    return {
        "lora": plain,
        "full in 8 bits": plain | {"tuning.mode": "full", "train.optimizer": "adamw_8bit"},
        "ZeRO-3 in RAM": plain | {"parallel.engine": "deepspeed_z3", "parallel.offload": "ram"},
    }[request.param]


def test_the_libraries_are_as_before(tiny_model, tmp_path, settings):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings["data.chat_template"] = str(tmp_path / "template.jinja")
    config = make_workspace(tmp_path, tiny_model)
    before = state()
    run = sft.train(config, settings=settings)
    assert run.summary["status"] == "done"
    assert "\n".join(differences(before)) == ""
    (text,), _ = render_jinja_template([[{"role": "user", "content": "w1"}]], chat_template=TEMPLATE)
    assert text.startswith(str(date.today().year))


def test_what_is_left_on_is_found(monkeypatch):
    from deepspeed.runtime.zero import stage3
    from transformers.utils.generic import GeneralInterface

    before = state()
    monkeypatch.setattr(stage3, "z3_leaf_parameter", lambda parameter: False)
    monkeypatch.setattr(GeneralInterface, "register", print)
    monkeypatch.setenv("ANOTHER", "1")
    with torch._dynamo.config.patch(recompile_limit=32):  # monkeypatch would take the setting away afterwards
        changed = differences(before)
    assert changed == [
        "deepspeed.runtime.zero.stage3.z3_leaf_parameter",
        "dynamo: recompile_limit",
        "environment: ANOTHER",
        "transformers.utils.generic.GeneralInterface.register",
    ]

"""Every method learns on two processes what it does on one, and goes on there from what one has saved.

fp32 unless a kind says otherwise, no dropout, rows that no batch divides; one launch with each engine, for all methods.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sft_play.choices.engines import TRAITS
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.train.run import train
from tests.conftest import token_rows
from tests.integration.processes import assert_same_curve, launch_jobs
from tests.jobs import NEW_TOKENS, SEQ, make_job, new_token_rows, tied_copy
from tests.rounding import summed

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

STEPS, SAVED = 6, 3
COMMON = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": SAVED, "effective_batch_size": 12, "batch_size": 2,
    "learning_rate": 1e-3, "weight_decay": 0.1,
    "rows": token_rows(31), "val": token_rows(11, seed=1),
}  # fmt: skip
NEW = {"new_tokens": NEW_TOKENS, "rows": new_token_rows(31), "val": new_token_rows(11, seed=1)}
OUTER = {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}}
FREE = {"optimizer": "schedule_free_adamw", "lr_schedule": "constant", "warmup_ratio": 0.3}
KINDS = {
    "lora-plus": {"lora": {"plus_ratio": 4, "modules_to_save": ["norm"]}},
    "lion": {"optimizer": "lion_32bit", "learning_rate": 1e-4},
    "lion-8bit": {"optimizer": "lion_8bit", "learning_rate": 1e-4},
    "adafactor": {"optimizer": "adafactor"},
    "full-adafactor": {"mode": "full", "optimizer": "adafactor"},
    "schedule-free": FREE,
    "pissa": {"lora": {"init": "pissa"}},
    "olora": {"lora": {"init": "olora"}},
    "norms": {"lora": {"modules_to_save": ["input_layernorm", "norm"]}},
    "outer": OUTER,
    "tied-outer": OUTER | {"tied": True},
    "new-tokens": NEW,
    "tied-new-tokens": NEW | {"tied": True},
    "qlora": {"mode": "qlora"},
    "dora": {"lora": {"use_dora": True}},
    "qlora-dora": {"mode": "qlora", "lora": {"use_dora": True}},
    "qlora-new-tokens": NEW | {"mode": "qlora"},
    "full-tied-new-tokens": NEW | {"tied": True, "mode": "full"},
    "full-bf16": {"mode": "full", "dtype": "bfloat16"},
}  # fmt: skip
if not find_spec("schedulefree"):
    del KINDS["schedule-free"]
WITH_ADAMW = [kind for kind, settings in KINDS.items() if "optimizer" not in settings]
WITH_ZERO2 = [
    kind
    for kind, settings in KINDS.items()
    if TRAITS["deepspeed_z2"].states in OPTIMIZERS[settings.get("optimizer", "adamw")].divided
]
PURE = "full-bf16"  # of which DeepSpeed keeps fp32 weights, so it learns another thing
# On a CPU, PEFT's DoRA replaces a 4-bit weight that it reads, and DeepSpeed does not know the new one.
WITH_ZERO3 = [kind for kind in WITH_ADAMW if kind not in (PURE, "qlora-dora")]
WITH_ZERO2.remove(PURE)

# Relative; the sums over the tokens of a step are made in another order.
NEAR = summed(12 * SEQ)
CLOSE = {"train/loss": NEAR, "eval/loss": NEAR, "train/grad_norm": NEAR, "train/learning_rate": 0}
# The 4-bit kernel may round by the shape of its input.
CLOSE_IN_4_BITS = {"train/loss": 2e-4, "eval/loss": 2e-4, "train/grad_norm": 2e-3, "train/learning_rate": 0}
# Weights, gradients and their norm are rounded to 8 bits, so a norm may be two of their steps off.
CLOSE_IN_BF16 = {"train/loss": 1e-4, "eval/loss": 1e-4, "train/grad_norm": 2**-6, "train/learning_rate": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("methods")


@pytest.fixture(scope="module")
def settings_of(tiny_model, folder):
    """The model of a kind, and the settings of its runs."""
    tied = tied_copy(tiny_model, folder / "tied-model")

    def of(kind: str, **more):
        settings = {**COMMON, **KINDS[kind], **more}
        return (tied if settings.pop("tied", False) else tiny_model), settings

    return of


@pytest.fixture(scope="module")
def one(settings_of, folder):
    """The runs of one process, by kind."""
    for kind in KINDS:
        model, settings = settings_of(kind)
        train(make_job(model, folder, f"one-{kind}", **settings))
    return folder


@pytest.fixture(scope="module")
def launch(one, settings_of, folder):
    """Trains kinds on two processes, from the start and from the checkpoint of one process."""

    def run(engine: str, kinds: list[str]) -> Path:
        specs = []
        for kind in kinds:
            checkpoint = folder / f"one-{kind}" / "checkpoints" / f"checkpoint-{SAVED}"
            for name, more in ((engine, {}), (f"{engine}-resumed", {"resume": str(checkpoint)})):
                model, settings = settings_of(kind, **more)
                specs.append({"model": str(model), "name": f"{name}-{kind}", "settings": settings})
        if engine == "ddp":
            model, settings = settings_of("pissa")
            specs.append({"model": str(model), "name": "signs", "settings": settings, "other_signs_on": 1})
        launch_jobs(folder, engine, 2, specs)
        return folder

    return run


@pytest.fixture(scope="module")
def ddp(launch):
    return launch("ddp", list(KINDS))


@pytest.fixture(scope="module")
def deepspeed_z2(launch):
    return launch("deepspeed_z2", WITH_ZERO2)


@pytest.fixture(scope="module")
def fsdp2(launch):
    return launch("fsdp2", WITH_ADAMW)


@pytest.fixture(scope="module")
def deepspeed_z3(launch):
    return launch("deepspeed_z3", WITH_ZERO3)


def close_for(kind: str) -> dict[str, float]:
    """Relative tolerances of the curves of a kind."""
    if kind == PURE:
        return CLOSE_IN_BF16
    return CLOSE_IN_4_BITS if kind.startswith("qlora") else CLOSE


ON = {"ddp": list(KINDS), "deepspeed_z2": WITH_ZERO2, "fsdp2": WITH_ADAMW, "deepspeed_z3": WITH_ZERO3}
RUNS = [(engine, kind) for engine, kinds in ON.items() for kind in kinds]


@pytest.mark.parametrize(("engine", "kind"), RUNS)
def test_two_processes_learn_what_one_does(request, engine, kind):
    folder = request.getfixturevalue(engine)
    assert_same_curve(folder / f"{engine}-{kind}", folder / f"one-{kind}", close_for(kind))


@pytest.mark.parametrize(("engine", "kind"), RUNS)
def test_two_processes_go_on_as_one_would(request, engine, kind):
    folder = request.getfixturevalue(engine)
    assert_same_curve(
        folder / f"{engine}-resumed-{kind}", folder / f"one-{kind}", close_for(kind), after=SAVED
    )


@pytest.mark.parametrize(("engine", "kind"), RUNS)
def test_two_processes_save_the_tensors_that_one_does(request, engine, kind):
    """So tied weights once."""
    folder = request.getfixturevalue(engine)
    ours, alone = (shapes_of_saved(folder / f"{which}-{kind}") for which in (engine, "one"))
    assert ours == alone


def shapes_of_saved(run: Path) -> dict[str, dict[str, torch.Size]]:
    """Shapes by name, of each file of weights in a run's folder."""
    files = {path.relative_to(run): load_file(path) for path in run.rglob("*model*.safetensors")}
    assert files
    return {
        str(path): {name: weight.shape for name, weight in weights.items()} for path, weights in files.items()
    }


def test_processes_that_find_other_singular_vectors_train_those_of_the_first(ddp):
    assert_same_curve(ddp / "signs", ddp / "one-pissa", CLOSE)
    found, expected = (
        load_file(ddp / name / "adapter/adapter_model.safetensors") for name in ("signs", "one-pissa")
    )
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)

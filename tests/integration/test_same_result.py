"""What must not change the result does not change it: one process, really trained, fp32, dropout 0."""

import random
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from sft_play.data.batching import pack
from sft_play.errors import ConfigError
from sft_play.model.layers import compilation
from sft_play.train.run import train
from tests.conftest import VOCABULARY, token_rows
from tests.jobs import SEQ, losses, make_job
from tests.packages import needs_torchao
from tests.rounding import assert_same_values, summed

pytestmark = pytest.mark.usefixtures("one_thread")
# 16 rows of up to 60 tokens are summed in another order in each step; the largest difference seen is 3e-7.
CLOSE = summed(16 * 60)


@pytest.fixture(scope="module")
def reference(tiny_model, tmp_path_factory):
    """Loss curves of the plain runs, by mode."""
    curves = {}

    def of(mode: str) -> tuple[list[float], list[float]]:
        if mode not in curves:
            job = make_job(tiny_model, tmp_path_factory.mktemp("reference"), mode, mode=mode, batch_size=16)
            train(job)
            curves[mode] = losses(job)
        return curves[mode]

    return of


CHANGES = {
    "1x16": {"batch_size": 1},
    "ckpt 4x4": {"batch_size": 4, "gradient_checkpointing": True},
    "tiles 4x4": {"batch_size": 4, "mlp_tiles": 3},
}
# Each change and each mode: the other pairs are of `make test-faults`.
ALWAYS = {("lora", "1x16"), ("full", "1x16"), ("qlora", "ckpt 4x4"), ("full", "tiles 4x4")}


def close_in(mode: str) -> float:
    """The 4-bit kernel rounds by the shape of its input."""
    return CLOSE if mode != "qlora" else 2e-4


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "change"),
    [
        pair if pair in ALWAYS else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in product(("lora", "qlora", "full"), CHANGES)
    ],
)
def test_accumulation_checkpointing_and_tiles_do_not_change_the_loss_curve(
    tiny_model, tmp_path, reference, mode, change
):
    job = make_job(tiny_model, tmp_path, "other", mode=mode, **CHANGES[change])
    train(job)
    for ours, theirs in zip(losses(job), reference(mode), strict=True):
        assert_same_values(ours, theirs, close_in(mode))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_what_becomes_of_activations_changes_no_weight(tiny_model, tmp_path, mode):
    """Some layers recomputed, all, or from inputs in RAM: bit for bit the weights of a run that keeps all."""
    found = {}
    for name, way, kept_layers in (("keep", "keep", 0), ("mix", "recompute", 1), ("ram", "offload", 0)):
        job = make_job(
            tiny_model,
            tmp_path,
            name,
            mode=mode,
            activations=way,
            kept_layers=kept_layers,
            batch_size=4,
            dropout=0.1 * (mode == "lora"),
        )
        train(job)
        folder = job.run.model if mode == "full" else job.run.adapter
        weights = load_file(next(iter(sorted(folder.glob("*.safetensors")))))
        found[name] = losses(job), weights
    for name, (curves, weights) in found.items():
        assert curves == found["keep"][0], name
        assert all(torch.equal(tensor, found["keep"][1][key]) for key, tensor in weights.items()), name


@pytest.mark.thorough
def test_evaluation_changes_nothing_and_every_step_is_trained_with_dropout(tiny_model, tmp_path, reference):
    curves = []
    for steps in (1, 100):
        job = make_job(tiny_model, tmp_path, f"every-{steps}", dropout=0.3, eval_steps=steps)
        train(job)
        curves.append(losses(job)[0])
    often, once = curves
    assert often == once and len(once) == 5
    without = reference("lora")[0]  # equal as long as B is zero: the learning rate of the first step is zero
    assert all(abs(a - b) > 1e-4 for a, b in zip(once[2:], without[2:], strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_padding_does_not_change_the_loss_curve(tiny_model, tmp_path, reference, mode):
    job = make_job(tiny_model, tmp_path, "padded", mode=mode, padding_free=False, batch_size=4)
    train(job)
    for ours, theirs in zip(losses(job), reference(mode), strict=True):
        assert_same_values(ours, theirs, CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_compiled_layers_do_not_change_the_loss_curve(tiny_model, tmp_path, reference, mode):
    job = make_job(tiny_model, tmp_path, "compiled", mode=mode, compile=True, batch_size=4)
    train(job)
    for ours, theirs in zip(losses(job), reference(mode), strict=True):
        assert_same_values(ours, theirs, close_in(mode))


@pytest.mark.thorough
def test_packed_rows_give_the_loss_of_the_same_rows_unpacked(tiny_model, tmp_path):
    """One step holds all rows, so both runs learn from the same set in each step."""
    rows = token_rows(32)
    unpacked = make_job(tiny_model, tmp_path, "unpacked", rows=rows, effective_batch_size=32, batch_size=4)
    packs = len(pack([row["length"] for row in rows], SEQ))
    packed = make_job(
        tiny_model,
        tmp_path,
        "packed",
        rows=rows,
        packing=True,
        effective_batch_size=packs * SEQ,
        batch_size=SEQ,
    )
    for job in (unpacked, packed):
        train(job)
    assert packed.plan.schedule.steps_per_epoch == unpacked.plan.schedule.steps_per_epoch == 1
    for ours, theirs in zip(losses(packed), losses(unpacked), strict=True):
        assert_same_values(ours, theirs, summed(32 * 60))


@pytest.mark.thorough
def test_tokens_without_supervision_have_no_influence_through_the_loss(tiny_model, tmp_path):
    """What an unsupervised token *predicts* must not count: the tail after the last answer differs."""
    rng = random.Random(3)
    rows, changed = [], []
    for row in token_rows(32):
        tail = [rng.randrange(3, VOCABULARY) for _ in range(4)]
        other = [rng.randrange(3, VOCABULARY) for _ in range(4)]
        for target, extra in ((rows, tail), (changed, other)):
            labels = row["labels"] + [-100] * 4
            target.append(
                {"input_ids": row["input_ids"] + extra, "labels": labels, "length": row["length"] + 4}
            )
    curves = []
    for name, data in (("one", rows), ("two", changed)):
        job = make_job(tiny_model, tmp_path, name, rows=data, batch_size=4)
        train(job)
        curves.append(losses(job))
    assert curves[0] == curves[1]


def test_resume_equals_no_interruption_bit_for_bit(tiny_model, tmp_path):
    def weights(job):
        return load_file(job.run.adapter / "adapter_model.safetensors")

    settings = dict(max_steps=8, save_steps=3, eval_steps=3, batch_size=4, new_tokens=("<tool>",))
    whole = make_job(tiny_model, tmp_path, "whole", **settings)
    train(whole)
    again = make_job(tiny_model, tmp_path, "again", **settings)
    train(again)
    for folder in again.run.checkpoints.glob("checkpoint-8"):
        (folder / "trainer_state.json").write_text("{")  # as after a kill in the last save
    resumed = make_job(tiny_model, tmp_path, "again", **settings, resume="auto")
    train(resumed)
    assert losses(resumed) == losses(whole)
    expected = weights(whole)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    settings |= {"max_steps": 4, "allow_changed": ["train.max_steps"]}
    fewer = make_job(tiny_model, tmp_path, "again", **settings, resume="auto")
    with pytest.raises(
        ConfigError, match=r"checkpoint-8 has 8 steps, .* ends after 4 .*resume checkpoint-3: train"
    ):
        train(fewer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "float8"),
    [("lora", False), ("qlora", False), ("full", False), pytest.param("full", True, marks=needs_torchao)],
)
def test_so_it_does_with_compiled_layers_and_float8(tiny_model, tmp_path, monkeypatch, capsys, mode, float8):
    """The graphs run without code of their own, which takes a minute to compile; each run makes them anew."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    settings = dict(mode=mode, compile=True, float8=float8, max_steps=4, save_steps=2, batch_size=8)
    found = []
    for folder, resume in (("whole", "never"), ("cut", "auto")):
        torch._dynamo.reset()
        compilation._compiled.cache_clear()
        job = make_job(tiny_model, tmp_path / folder, "run", **settings, resume=resume)
        train(job)
        (file,) = [*job.run.adapter.glob("*.safetensors"), *job.run.model.glob("*.safetensors")]
        found.append((losses(job), load_file(file)))
        if resume == "never":
            shutil.copytree(tmp_path / "whole", tmp_path / "cut")
            for state in (tmp_path / "cut").glob("run/checkpoints/checkpoint-4/trainer_state.json"):
                state.write_text("{")  # as after a kill in the last save
    compilation._compiled.cache_clear()
    assert "checkpoints/checkpoint-2" in "".join(capsys.readouterr().out.split())  # it went on from there
    (curve, weights), (again, others) = found
    assert again == curve
    assert all(torch.equal(others[name], tensor) for name, tensor in weights.items())

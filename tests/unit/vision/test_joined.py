"""Rows with pictures that are joined give what each gives alone in plain transformers; their memory is foreseen."""

import random

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch.nn.functional import cross_entropy

from benchmarks.cpu_meter import measure_step
from benchmarks.random_models import quantize_linear_layers
from sft_play.config.schema import LoraSettings
from sft_play.data.batching import padded_length
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.architecture.shape import know_multimodal
from sft_play.model.layers.loss_head import token_loss
from sft_play.parts import RECOMPUTED, Activations
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import trace_step
from sft_play.vision.batches import positions
from sft_play.vision.fits import RowFits, fits_of_rows
from sft_play.vision.looks import look_of, seeing_parts, trained_parts
from sft_play.vision.types import Fit, pictures_of
from tests.vision_built import LORA, batch_of, difference, gradients, ours
from tests.vision_models import IMAGE, config_of, picture_rows, random_model, random_pixels

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("qwen3_vl", "smolvlm", "gemma3", "qwen3_5")
NEAR = dict.fromkeys(KINDS, 2e-5) | {
    "qwen3_5": 1e-4
}  # plain transformers is as far from 64 bits; 1.1e-5 on AVX2


def alone(kind, rows, adapted=lambda model: model):
    """Loss and gradients of plain transformers, one row after the other."""
    look = look_of(config_of(kind))
    model = adapted(random_model(config_of(kind), attn_implementation="sdpa"))
    total, count = 0.0, sum(label != -100 for row in rows for label in row["labels"])
    for row in rows:
        pictures = pictures_of(row["pictures"])
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        seen = {}
        if pictures:
            pixels = torch.from_numpy(np.concatenate([random_pixels(look)(one) for one in pictures]))
            grids = torch.tensor([(1, one.fit.rows, one.fit.columns) for one in pictures])
            types = (ids == IMAGE).int()
            seen = {
                "patches": dict(pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types),
                "tiles": dict(pixel_values=pixels[None]),
                "squares": dict(pixel_values=pixels, token_type_ids=types),
            }[look.kind]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen).logits
        loss = cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, gradients(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vision", ["frozen", "full"])
def test_joined_rows_give_the_loss_and_gradients_that_each_gives_alone(kind, vision):
    rows = picture_rows(kind, 5, seed=3, images=[2, 0, 1, 3, 1])
    model = ours(kind, vision=vision)
    loss = token_loss(model, batch_of(kind, rows, range(5)))
    loss.backward()
    expected, wanted = alone(kind, rows)
    found = gradients(model)
    assert any("vision" in name or "visual" in name for name in found) == (vision == "full")
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    assert difference(found, wanted) < NEAR[kind]

    model.zero_grad()
    swapped = batch_of(kind, rows, range(5))
    swapped["pixel_values"] = swapped["pixel_values"].flip(0)
    other = token_loss(model, swapped)
    other.backward()
    assert abs(other.item() - expected) > 1e-4 * expected and difference(gradients(model), wanted) > 1e-2


def changed(adapted):
    """The model with an adapter that changes something, the same each time."""
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn_like(parameter)
    return adapted


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_rows_on_four_bit_weights_beside_a_tower_that_stays_as_it_is(kind):
    def on_four_bits(model):
        quantize_linear_layers(model, torch.float32)
        return changed(attach_adapter(model, LORA))

    rows, model = picture_rows(kind, 4, seed=3, images=[2, 0, 1, 1]), changed(ours(kind, "qlora"))
    seeing = seeing_parts(config_of(kind))
    packed = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert packed and not any(part in name for part in seeing for name in packed)
    loss = token_loss(model, batch_of(kind, rows, range(4)))
    loss.backward()
    expected, wanted = alone(kind, rows, on_four_bits)
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    assert difference(gradients(model), wanted) < NEAR[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_rows_whose_adapters_are_in_the_tower_too(kind):
    def everywhere(model):
        return changed(attach_adapter(model, LORA, seeing=seeing_parts(model.config)))

    rows, model = picture_rows(kind, 4, seed=3, images=[2, 0, 1, 1]), changed(ours(kind, "lora", "lora"))
    token_loss(model, batch_of(kind, rows, range(4))).backward()
    _, wanted = alone(kind, rows, everywhere)
    assert (
        gradients(model).keys()
        == wanted.keys()
        == {n for n, p in model.named_parameters() if p.requires_grad}
    )
    assert difference(gradients(model), wanted) < NEAR[kind]


@pytest.mark.parametrize("vision", ["frozen", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_in_the_decoder_and_where_asked_in_what_sees(kind, vision):
    """SmolVLM's tower has layers of the same names as its decoder."""
    for targets in ("auto", ("q_proj", "v_proj")):
        model = random_model(config_of(kind))
        seeing = trained_parts(model.config, vision)
        adapted = attach_adapter(model, LoraSettings(r=2, target_modules=targets), seeing=seeing)
        names = [name for name, p in adapted.named_parameters() if p.requires_grad]
        is_decoder = [".language_model." in name or ".text_model." in name for name in names]
        assert any(is_decoder)
        assert all(is_decoder) == (vision == "frozen" or (kind.startswith("qwen") and targets != "auto"))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_the_model(kind):
    config = config_of(kind)
    look, model = look_of(config), random_model(config).model
    for row in picture_rows(kind, 40, seed=5):
        fits, ids = [one.fit for one in pictures_of(row["pictures"])], torch.tensor([row["input_ids"]])
        found = positions(look, ids[0].numpy(), fits)
        grids = torch.tensor([(1, fit.rows, fit.columns) for fit in fits]) if fits else None
        wanted, _ = model.get_rope_index(ids, image_grid_thw=grids, mm_token_type_ids=(ids == IMAGE).int())
        assert np.array_equal(found[1:], wanted[:, 0]) and np.array_equal(found[0], np.arange(ids.shape[1]))


def test_fits_of_rows_come_back_by_row():
    rows = picture_rows("smolvlm", 6, seed=1, images=[0, 2, 1, 0, 3, 1])
    fits = RowFits(*fits_of_rows(rows))
    own = [[one.fit for one in pictures_of(row["pictures"])] for row in rows]
    assert fits.units(6).tolist() == [sum(fit.units for fit in row) for row in own]
    assert fits.of([4, -1, 1]) == (*own[4], *own[1])
    assert fits_of_rows(picture_rows("smolvlm", 2, seed=1, images=[0, 0])) == (None, None)
    assert not fits.may_pack(False) and RowFits().may_pack(False) and not RowFits().may_pack(True)
    assert RowFits().of([0]) == () and RowFits().units(2).tolist() == [0, 0]


def random_fits(kind, rng, count):
    rows = picture_rows(kind, 1, rng.randrange(1000), images=[count])
    return tuple(Fit(**one["fit"]) for one in rows[0]["pictures"])


def random_batch(kind, rng, tokens):
    """A batch of at least so many tokens, and the lengths of its rows if they are joined."""
    if kind == "qwen3_5":
        rows = rng.randint(1, 4)
        return PaddedRows(rows, padded_length(-(-tokens // rows))), ()
    first = rng.randrange(1, tokens // 3)
    return JoinedRows(tokens), (first, tokens - first)


CASES = [
    pytest.param(kind, *way, seed, marks=[] if seed == 0 else pytest.mark.thorough)
    for kind in KINDS
    for way in (
        ("full", "full"),
        ("full", "frozen"),
        ("lora", "frozen"),
        ("lora", "lora"),
        ("qlora", "frozen"),
    )
    for seed in range(8)
]


@pytest.mark.parametrize(("kind", "mode", "vision", "seed"), CASES)
def test_the_memory_of_a_step_with_pictures_is_foreseen(kind, mode, vision, seed):
    rng = random.Random(f"{kind} {mode} {vision} {seed}")
    fits = random_fits(kind, rng, rng.randint(1, 5))
    batch, lengths = random_batch(kind, rng, sum(fit.tokens for fit in fits) + rng.randrange(20, 200))
    spec = StepSpec(
        mode=mode,
        lora=LORA,
        vision=vision,
        batch=batch,
        lengths=lengths,
        eval_lengths=lengths,
        fits=fits,
        eval_fits=fits[: rng.randrange(3)],
        activations=rng.choice((Activations(), RECOMPUTED)),
        accumulates=rng.random() < 0.5,
    ).on_this_cpu(1)
    measured = measure_step(ours(kind, mode, vision), spec)
    know_multimodal(config_of(kind))
    predicted = trace_step(config_of(kind), spec).step.peaks()
    for phase, size in measured.phases.items():
        assert predicted[phase].bytes == pytest.approx(size, rel=1e-3), phase

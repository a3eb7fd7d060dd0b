"""Models that see, built as for training, and their micro-batches of random rows with pictures."""

from functools import partial

import torch

from benchmarks.random_models import quantize_linear_layers
from sft_play.config.schema import LoraSettings
from sft_play.model.adapters.attach import attach_adapter
from sft_play.model.attention import varlen
from sft_play.model.build import freeze_what_gets_no_gradient
from sft_play.model.collators import joined_micro_batches, padded_micro_batches
from sft_play.model.layers import own_passes
from sft_play.model.layers.loss_head import add_loss_head
from sft_play.vision.batches import with_pictures
from sft_play.vision.looks import look_of, trained_parts
from sft_play.vision.models import attention_by_part, join_pictures
from tests.vision_models import config_of, random_model, random_pixels

LORA = LoraSettings(r=4, dropout=0.0)


def ours(kind, mode="full", vision="frozen"):
    """A model as it is built for training, on these weights."""
    varlen.register()
    config = config_of(kind)
    model = random_model(config, attn_implementation=attention_by_part(config, varlen.LIBRARY_NAME))
    own_passes.replace_forwards(model)
    if mode == "qlora":
        quantize_linear_layers(model, torch.float32)
    parts, trained = trained_parts(config, vision), model
    if mode == "full":
        freeze_what_gets_no_gradient(model, parts)
    else:
        trained = attach_adapter(model, LORA, seeing=parts)
    join_pictures(model)
    add_loss_head(model)
    return trained.train()


def batch_of(kind, rows, chosen, *, always=False):
    """A micro-batch of rows, padded for Qwen3.5 and joined for the others."""
    look = look_of(config_of(kind))
    collator_of = partial(joined_micro_batches, boundaries="lengths")
    if kind == "qwen3_5":
        collator_of = partial(padded_micro_batches, pad_id=0)
    pixels = random_pixels(look)
    collate = with_pictures(collator_of, rows, look, lambda seen, _: [*map(pixels, seen)], always=always)
    return collate([{"rows": chosen}])


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(found, expected):
    """|found - expected| / |expected| over all gradients of the first."""
    apart = sum(((found[name] - expected[name]) ** 2).sum() for name in found)
    return (apart / sum((expected[name] ** 2).sum() for name in found)).sqrt().item()

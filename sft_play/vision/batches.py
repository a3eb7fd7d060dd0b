"""The tensors of a micro-batch beside its text: pixels, what a tower makes of sizes, positions."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from sft_play.parts import IGNORED
from sft_play.vision.looks import Look
from sft_play.vision.types import Fit, Picture, pictures_of

if TYPE_CHECKING:
    from datasets import Dataset


def with_pictures(
    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
    rows: "Dataset",
    look: Look,
    decode: Callable[[Sequence[Picture], int], Sequence[np.ndarray]],
    *,
    always: bool = False,
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """A collator of joined micro-batches of `rows` that adds their pictures.

    `decode` gives the pixels of each, [units, ...], for the micro-batch at a place of a run; they are joined
    one row after the other. Positions are of each row by itself.
    With `always`, a micro-batch without any gets one that nothing learns from (`with_smallest`).
    """
    table = rows.select_columns(["length", "pictures"]).with_format("arrow")

    def collated(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch, taken = collate(batches), table[batches[0]["rows"]]
        of_rows = [pictures_of(cell) for cell in taken["pictures"].to_pylist()]
        pictures = [picture for row in of_rows for picture in row]
        if not pictures:
            return with_smallest(batch, look) if always else batch
        fits = _fits(pictures)
        ids = batch["input_ids"][0].numpy()
        ends = np.cumsum(taken["length"].to_numpy())[:-1]
        own = zip(np.split(ids, ends), of_rows, strict=True)
        places = [positions(look, row, _fits(seen)) for row, seen in own]
        joined = np.concatenate(places, axis=1)
        return batch | {
            "position_ids": _position_ids(joined),
            "pixel_values": torch.from_numpy(np.concatenate(decode(pictures, batches[0]["place"]))),
            **tower_inputs(look, fits),
        }

    return collated


def _fits(pictures: Sequence[Picture]) -> list[Fit]:
    return [picture.fit for picture in pictures]


def _position_ids(rows: np.ndarray) -> torch.Tensor:
    """Positions of joined rows, [axes, tokens], as models take them: [1, tokens] or [axes, 1, tokens]."""
    found = torch.from_numpy(rows)
    return found[:, None] if len(found) > 1 else found


def with_smallest(batch: dict[str, Any], look: Look) -> dict[str, Any]:
    """A joined micro-batch of text with one more row, which is the smallest picture and has no labels.

    So what sees is used in every micro-batch. Its gradients are zero, and not missing: ranks would wait for
    each other forever, and AdamW moves a weight whose gradient is zero but leaves one that has none.
    """
    fit, text = look.smallest, batch["position_ids"]
    ids = np.full(fit.tokens, look.image_token)
    own = positions(look, ids, [fit])
    rest = {
        "input_ids": torch.from_numpy(ids)[None],
        "labels": torch.full((1, fit.tokens), IGNORED),
        "position_ids": _position_ids(own),
    }
    batch = batch | {"position_ids": text.expand(len(own), *text.shape) if len(own) > 1 else text}
    joined = {name: torch.cat([batch[name], value], dim=-1) for name, value in rest.items()}
    return batch | {
        **joined,
        "sequence_lengths": [*batch["sequence_lengths"], fit.tokens],
        "pixel_values": torch.full((fit.units, *look.unit_shape), -1.0),
        **tower_inputs(look, [fit]),
    }


def tower_inputs(look: Look, fits: Sequence[Fit]) -> dict[str, Any]:
    """What a tower would compute from the sizes of pictures itself, looking into tensors for them.

    Numbers of which the model takes plain lists are in NumPy's arrays: on a GPU, it would wait for tensors.
    """
    if look.kind == "tiles" or not fits:
        return {}
    grids = [(1, fit.rows, fit.columns) for fit in fits]
    grid = torch.tensor(grids)
    places, weights = get_vision_interpolation_indices_and_weights(
        grid, look.table_side, mode="bilinear", align_corners=True, spatial_merge_size=look.merged
    )
    return {
        "image_grid_thw": np.array(grids),
        "image_cu_seqlens": np.cumsum([0, *(fit.units for fit in fits)]).astype(np.int32),
        "image_position_ids": get_vision_position_ids(grid, look.merged),
        "image_interp_indices": places,
        "image_interp_weights": weights,
    }


def empty_pixels(look: Look, fits: Sequence[Fit]) -> dict[str, torch.Tensor]:
    """The tensor of the pixels of such pictures without values, [units, ...]."""
    return {"pixel_values": torch.empty(sum(fit.units for fit in fits), *look.unit_shape)}


def positions(look: Look, ids: np.ndarray, fits: Sequence[Fit]) -> np.ndarray:
    """The positions of one row's tokens, [tokens]: [1, tokens], or [4, tokens] where pictures have two sides.

    Then they are those of text, and time, height and width: the tokens of a picture are at the same time, and
    text goes on after its longer side.
    """
    plain = np.arange(len(ids))
    if look.kind == "tiles":
        return plain[None]
    found, at, current = np.empty((3, len(ids)), np.int64), 0, 0
    is_image = ids == look.image_token
    for fit in fits:
        start = at + int(is_image[at:].argmax())
        found[:, at:start] = current + np.arange(start - at)
        current += start - at
        height, width = fit.rows // look.merged, fit.columns // look.merged
        at = start + height * width
        found[0, start:at] = current
        found[1, start:at] = current + np.repeat(np.arange(height), width)
        found[2, start:at] = current + np.tile(np.arange(width), height)
        current += max(height, width)
    found[:, at:] = current + np.arange(len(ids) - at)
    return np.concatenate([plain[None], found])

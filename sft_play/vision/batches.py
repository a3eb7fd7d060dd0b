"""The tensors of a micro-batch beside its text: pixels, what a tower makes of sizes, positions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from sft_play.parts import IGNORED
from sft_play.upstream.torch import making_real_tensors
from sft_play.vision.looks import Look
from sft_play.vision.types import Fit, Picture, pictures_of

if TYPE_CHECKING:
    from datasets import Dataset


def with_pictures(
    collator_of: Callable[["Dataset"], Callable[[Sequence[dict[str, Any]]], dict[str, Any]]],
    rows: "Dataset",
    look: Look,
    decode: Callable[[Sequence[Picture], int | None], Sequence[np.ndarray]],
    *,
    always: bool = False,
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """A collator of micro-batches of `rows`, joined or padded, that adds their pictures.

    `decode` gives the pixels of each, [units, ...], for the micro-batch at a place of a run, if it has one.
    Positions are of each row by itself. With `always`, a micro-batch without any gets one more row, which is
    the smallest picture and has no labels. So what sees is used in every one, and its gradients are zero, not
    missing: ranks would wait for each other forever, and AdamW moves a weight whose gradient is zero but
    leaves one that has none.
    """
    smallest = len(rows)
    rows = _with_smallest(rows, look) if always else rows
    collate, table = collator_of(rows), rows.select_columns(["length", "pictures"]).with_format("arrow")

    def collated(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        chosen = list(batches[0]["rows"])
        pictures = [pictures_of(cell) for cell in table[chosen]["pictures"].to_pylist()]
        if filled := always and not any(pictures):
            chosen.append(smallest)
            pictures.append([_smallest(look)])
        batch, seen = collate([{"rows": chosen}]), [picture for row in pictures for picture in row]
        if not seen:
            return batch
        fits, lengths = [picture.fit for picture in seen], table[chosen]["length"].to_pylist()
        if filled:
            values: Sequence[np.ndarray] = [np.full((fits[0].units, *look.unit_shape), -1.0, np.float32)]
        else:
            values = decode(seen, batches[0].get("place"))
        batch |= tower_inputs(look, fits) | {"pixel_values": torch.from_numpy(np.concatenate(values))}
        if look.kind == "patches":
            joined = len(batch["input_ids"]) != len(lengths)
            of_rows = batch["input_ids"][0].split(lengths) if joined else batch["input_ids"]
            places = [
                positions(look, ids.numpy(), [one.fit for one in row])
                for ids, row in zip(of_rows, pictures, strict=True)
            ]
            axis = np.concatenate(places, axis=1)[:, None] if joined else np.stack(places, axis=1)
            batch["position_ids"] = torch.from_numpy(axis)
        if look.kind == "squares":
            batch["two_way_blocks"] = blocks_of(batch["input_ids"][0].numpy() == look.image_token, lengths)
        return batch

    return collated


def _smallest(look: Look) -> Picture:
    return Picture("", 0, look.smallest.height, look.smallest.width, look.smallest)


def _with_smallest(rows: "Dataset", look: Look) -> "Dataset":
    """The rows, and one with the smallest picture alone."""
    from datasets import Dataset, concatenate_datasets

    tokens = look.smallest.tokens
    row = {"input_ids": [look.image_token] * tokens, "labels": [IGNORED] * tokens, "length": tokens}
    own = [row | {"pictures": [asdict(_smallest(look))]}]
    return concatenate_datasets([rows, Dataset.from_list(own, features=rows.features)])


def blocks_of(is_image: np.ndarray, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """The `two_way_blocks` of joined rows of these lengths; a mask, [tokens], tells image tokens."""
    edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
    starts = np.cumsum([0, *lengths])
    return [(int(starts[starts <= begin][-1]), begin, end) for begin, end in edges.tolist()]


def tower_inputs(look: Look, fits: Sequence[Fit]) -> dict[str, torch.Tensor | np.ndarray]:
    """What a tower would compute from the sizes of pictures itself, looking into tensors for them.

    Numbers of which the model takes plain lists are in NumPy's arrays: on a GPU, it would wait for tensors.
    """
    if look.kind != "patches":
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


def add_empty(batch: dict[str, Any], look: Look, fits: Sequence[Fit]) -> None:
    """Adds to a batch of zeros what it has of such pictures: zeros, and tokens that stand for them."""
    if not fits:
        return
    ids: torch.Tensor = batch["input_ids"]
    with making_real_tensors():  # it looks into data
        pixels = torch.empty(sum(fit.units for fit in fits), *look.unit_shape)
        found = tower_inputs(look, fits) | {"pixel_values": pixels}
        if look.kind == "patches":
            found["position_ids"] = torch.empty((4, *ids.shape), dtype=torch.int64)
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            value = torch.zeros(value.shape, dtype=value.dtype, device=ids.device)
        batch[name] = value
    if look.kind == "squares":
        batch["two_way_blocks"] = _blocks_as_far(fits)
    ids.view(-1)[: sum(fit.tokens for fit in fits)] = look.image_token  # for a real model


def _blocks_as_far(fits: Sequence[Fit]) -> list[tuple[int, int, int]]:
    """Blocks that begin as far from the start of a row as those of the pictures, in rows that are close."""
    found, first, end = [], 0, 0
    for fit in fits:
        if first + fit.begin < end:
            first = end
        end = first + fit.begin + fit.tokens
        found.append((first, first + fit.begin, end))
    return found


def positions(look: Look, ids: np.ndarray, fits: Sequence[Fit]) -> np.ndarray:
    """The positions of one row's tokens, [tokens], where pictures have two sides: [4, tokens].

    They are those of text, and time, height and width: the tokens of a picture are at the same time, and text
    goes on after its longer side.
    """
    plain = np.arange(len(ids))
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

"""The pictures of prompts and rows that a model answers or scores, as its own processor gives them to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sft_play.vision.decoding import pixels
from sft_play.vision.families import TEXT_ALONE, OneSize, Recipe, Tiles
from sft_play.vision.types import Picture, pictures_of

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Pictures:
    """The pictures of some prompts or rows, which are decoded when they are given to a model."""

    recipe: Recipe | str = TEXT_ALONE  # how the model takes them, or why it takes none
    of_rows: Sequence[Sequence[Picture]] = ()
    folder: Path = Path()  # that their paths are relative to

    @classmethod
    def in_rows(cls, recipe: Recipe | str, rows: "Dataset", folder: Path) -> "Pictures":
        """Those of rows that were prepared in `folder`."""
        cells = rows["pictures"] if "pictures" in rows.column_names else [()] * len(rows)
        return cls(recipe, list(map(pictures_of, cells)), folder)

    def of(self, rows: Sequence[int]) -> "Pictures":
        """Those of some of the rows, in this order."""
        return replace(self, of_rows=self.of_rows and [self.of_rows[row] for row in rows])

    def cut(self, rows: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """The ids of rows, at most so many `tokens` of each; all of those with pictures."""
        return [ids[: None if seen else tokens] for ids, seen in zip(rows, self.of_rows, strict=True)]

    def inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a model is given beside ids, [rows, tokens], padded on either side; {} if there are none.

        Raises:
            DataError: a file is gone or has changed.
        """
        found = [picture for row in self.of_rows for picture in row]
        if isinstance(self.recipe, str) or not found:
            return {}
        values = np.concatenate([pixels(picture, self.recipe, self.folder) for picture in found])
        given = {"pixel_values": torch.from_numpy(values)}
        if isinstance(self.recipe.family, Tiles):
            given["pixel_values"] = given["pixel_values"][None]  # the tiles of all rows, as of one
        elif isinstance(self.recipe.family, OneSize):
            given["token_type_ids"] = (ids == self.recipe.image_token_id).int()
        else:
            given["image_grid_thw"] = torch.tensor([(1, one.fit.rows, one.fit.columns) for one in found])
            given["mm_token_type_ids"] = (ids == self.recipe.image_token_id).int()
        return {name: value.to(ids.device) for name, value in given.items()}

    def beside(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of rows, padded on the right, with pictures; then the model finds positions itself."""
        given = self.inputs(batch["input_ids"])
        return {name: batch[name] for name in ("input_ids", "labels")} | given if given else batch


NO_PICTURES = Pictures()

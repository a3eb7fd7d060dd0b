"""Pictures of later micro-batches, decoded in threads while a step computes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from sft_play.vision.types import Picture, pictures_of

if TYPE_CHECKING:
    from datasets import Dataset

AHEAD = 2  # micro-batches
MOST_THREADS = 8


class PicturesAhead:
    """Decodes the pictures of a micro-batch, and has begun with those of the next ones.

    Pillow and NumPy hold no lock of Python while they decode and resize, so threads do, and nothing is copied
    from other processes. What is wrong with a picture is raised when its micro-batch is due.
    """

    def __init__(
        self,
        decode: Callable[[Picture], np.ndarray],
        rows: "Dataset",
        order: "Dataset",
        *,
        ranks: int,
        threads: int,
    ) -> None:
        """`order` lists the `rows` of all micro-batches, of which so many `ranks` take one each in turn."""
        self._decode, self._ranks = decode, ranks
        self._pictures = rows.select_columns(["pictures"]).with_format("arrow")
        self._order = order.select_columns(["rows"])
        self._pool = ThreadPoolExecutor(min(threads, MOST_THREADS), thread_name_prefix="pictures")
        self._begun = dict[Picture, Future[np.ndarray]]()

    def __call__(self, pictures: Sequence[Picture], place: int | None) -> list[np.ndarray]:
        """The pixels of the pictures of a micro-batch, each [units, ...], at a place of `order` or none."""
        end = len(self._order)
        later = range(end if place is None else place + self._ranks, end, self._ranks)
        soon = {picture for at in islice(later, AHEAD) for picture in self._of(at)}
        due = [self._begin(picture) for picture in pictures]
        for picture in soon:
            self._begin(picture)
        self._begun = {picture: self._begun[picture] for picture in soon}
        return [each.result() for each in due]

    def _of(self, place: int) -> list[Picture]:
        cells: Any = self._pictures[self._order[place]["rows"]]["pictures"].to_pylist()
        return [picture for cell in cells for picture in pictures_of(cell)]

    def _begin(self, picture: Picture) -> "Future[np.ndarray]":
        if picture not in self._begun:
            self._begun[picture] = self._pool.submit(self._decode, picture)
        return self._begun[picture]

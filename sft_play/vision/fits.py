"""How the pictures of all rows are given to a model, as numbers: what a plan knows of them."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from sft_play.errors import ConfigError
from sft_play.vision.looks import NO_LOOK, Look
from sft_play.vision.types import Fit

if TYPE_CHECKING:
    import datasets

NAMES = tuple(field.name for field in fields(Fit))
UNITS = NAMES.index("units")


@dataclass(frozen=True)
class RowFits:
    """The fits of the pictures of rows; without any picture, None."""

    fits: np.ndarray | None = None  # [pictures, 7], one row after the other
    starts: np.ndarray | None = None  # where those of each row begin, and where all end: [rows + 1]
    look: Look = NO_LOOK  # of the model
    fills: bool = False  # whether a micro-batch without any gets the smallest, as in `with_pictures`

    @property
    def exist(self) -> bool:
        """Whether there is any picture."""
        return self.fits is not None

    @property
    def smallest(self) -> Fit | None:
        """The picture that a micro-batch without any gets; None if it gets none."""
        return self.look.smallest if self.exist and self.fills else None

    def batch_bytes(self, text: int) -> tuple[int, int]:
        """Of a token in a batch, which are `text` without pictures, and of a patch or tile."""
        return (self.look.token_bytes, self.look.unit_bytes) if self.exist else (text, 0)

    def filled(
        self,
        tokens: np.ndarray,
        units: np.ndarray,
        rows: np.ndarray | None,
        padded: Callable[[int], int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and units of micro-batches, [steps, bins], with the picture that some get.

        `rows` are those of each, if they are `padded`.
        """
        if (one := self.smallest) is None:
            return tokens, units
        grown = tokens + one.tokens
        if rows is not None:
            grown = (rows + 1) * np.maximum(tokens // rows, padded(one.tokens))
        return np.where(units == 0, grown, tokens), np.where(units == 0, one.units, units)

    def require_none(self, otherwise: str) -> None:
        """Raises ConfigError, with this sentence, if there is any picture: nothing cuts within one."""
        if self.exist:
            raise ConfigError(otherwise)

    def may_pack(self, packing: bool) -> bool:
        """Whether such rows could be packed, and are not: those with pictures never are."""
        return not (packing or self.exist)

    def compiled(self, asked: bool | str) -> bool | str:
        """What train.compile asks for such rows: auto compiles none with pictures yet."""
        return False if self.exist and asked == "auto" else asked

    def units(self, rows: int) -> np.ndarray:
        """Patches or tiles of each of so many rows, [rows]."""
        if self.fits is None or self.starts is None:
            return np.zeros(rows, dtype=np.int64)
        sums = np.concatenate([[0], np.cumsum(self.fits[:, UNITS])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def of(self, rows: Iterable[int]) -> tuple[Fit, ...]:
        """What a micro-batch of some rows has, in order; a negative number is a row without any picture."""
        if self.fits is None or self.starts is None:
            return ()
        parts = (self.fits[self.starts[row] : self.starts[row + 1]] for row in rows if row >= 0)
        found = tuple(Fit(*fit) for part in parts for fit in part.tolist())
        return found or ((self.smallest,) if self.smallest else ())


def same_fits(rows: int, pictures: int, fit: Fit) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The fields of the `RowFits` of rows that have so many pictures each, all alike."""
    if not pictures:
        return None, None
    return np.tile(astuple(fit), (rows * pictures, 1)), np.arange(rows + 1) * pictures


def fits_of_rows(rows: "datasets.Dataset") -> tuple[np.ndarray | None, np.ndarray | None]:
    """The fields of the `RowFits` of prepared rows."""
    if "pictures" not in rows.column_names:
        return None, None
    column = rows.select_columns(["pictures"]).with_format("arrow")[:]["pictures"].combine_chunks()
    counts = column.value_lengths().to_numpy()
    if not counts.sum():
        return None, None
    found = column.flatten().field("fit")
    fits = np.stack([found.field(name).to_numpy() for name in NAMES], axis=1).astype(np.int64)
    return fits, np.concatenate([[0], np.cumsum(counts)])

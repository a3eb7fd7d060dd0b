"""The tokens of pictures in a row: in its text, where the template wrote a placeholder, and in its ids."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sft_play.parts import IGNORED
from sft_play.rows.images import MARK, Message
from sft_play.vision.families import Recipe
from sft_play.vision.types import Picture, pictures_of

Span = tuple[int, int]


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> tuple[Picture, ...]:
    """The pictures of messages, in order."""
    return tuple(pictures_of(one for message in messages for one in message.get("images", ())))


def rooted(messages: Sequence[Message], folder: Path) -> tuple[Message, ...]:
    """Messages of rows that were prepared in `folder`, whose pictures are found from anywhere."""

    def moved(message: Message) -> Message:
        images = [{**one, "path": str(folder / one["path"])} for one in message.get("images", ())]
        return {**message, **({"images": images} if images else {})}

    return tuple(map(moved, messages))


def expanded(recipe: Recipe | str, row: Any, pictures: tuple[Picture, ...]) -> Any:
    """A `RenderedRow`, with what the model reads for each picture.

    That is in place of what the template wrote for it, its placeholder. A template that takes no images has
    left marks. Placeholders that are spelled as ordinary text stay.

    Raises:
        ValueError: the model takes no pictures; or there are more or fewer placeholders than pictures.
    """
    if isinstance(recipe, str):
        if pictures:  # never left out without a word
            raise ValueError(recipe)
        return row
    text: str = row.text
    pattern, write = re.escape(recipe.family.placeholder), recipe.family.text
    if pictures and MARK in text:
        pattern, write = MARK, recipe.family.bare_text
    begins = {begin for begin, _ in row.spelled}
    places = [found.span() for found in re.finditer(pattern, text) if found.start() not in begins]
    if len(places) != len(pictures):
        raise ValueError(
            f"the rendered text has {len(places)} places for images ({recipe.family.placeholder}), and the "
            f"row has {len(pictures)} images: no text may have this token, and the chat template has to "
            "write it for each"
        )
    pieces, moves, at, moved = list[str](), [0], 0, 0
    for (begin, end), picture in zip(places, pictures, strict=True):
        new = write(picture.fit)
        pieces += [text[at:begin], new]
        at, moved = end, moved + len(new) - (end - begin)
        moves.append(moved)
    ends = [end for _, end in places]

    def shifted(span: Span) -> Span:
        return span[0] + moves[bisect_right(ends, span[0])], span[1] + moves[bisect_right(ends, span[1])]

    spans = {name: tuple(map(shifted, getattr(row, name))) for name in ("supervised", "spelled")}
    return replace(row, text="".join([*pieces, text[at:]]), pictures=pictures, **spans)


def repeated(
    recipe: Recipe | str,
    ids: np.ndarray,
    labels: np.ndarray,
    pictures: Sequence[Picture],
    *,
    whole: bool = True,
) -> tuple[np.ndarray, np.ndarray, tuple[Picture, ...]]:
    """Ids and labels, [tokens], with each image token of an expanded text as often as the model needs it.

    Image tokens carry no loss. Unless `whole`, the text was cut, and so may have fewer. Pictures know then
    where they begin, if that matters.

    Raises:
        ValueError: an image token stands in a text of the row.
    """
    if isinstance(recipe, str):
        return ids, labels, ()
    places = np.flatnonzero(ids == recipe.image_token_id)
    runs = [run for picture in pictures for run in recipe.family.runs(picture.fit)]
    if len(places) > len(runs) or (whole and len(places) < len(runs)):
        raise ValueError(
            f"the row has {len(places)} tokens {recipe.family.image} in place of {len(runs)}: it stands for "
            "images, so no text may have it; data.control_tokens=escape spells it as ordinary text"
        )
    counts = np.ones(len(ids), np.int64)
    counts[places] = runs[: len(places)]
    labels = labels.copy()
    labels[places] = IGNORED
    begins = (np.cumsum(counts) - counts)[places].tolist() if recipe.family.attends_both_ways else []
    placed = [replace(one, fit=replace(one.fit, begin=at)) for one, at in zip(pictures, begins, strict=False)]
    return np.repeat(ids, counts), np.repeat(labels, counts), (*placed, *pictures[len(placed) :])


def cut_before(
    recipe: Recipe | str, ids: np.ndarray, pictures: Sequence[Picture], limit: int
) -> tuple[int, tuple[Picture, ...]]:
    """Where to cut a row to at most `limit` tokens, not within a picture, and the pictures before that."""
    if isinstance(recipe, str) or not pictures:
        return limit, ()
    places = np.flatnonzero(ids == recipe.image_token_id)
    last = np.cumsum([picture.fit.tokens for picture in pictures]) - 1
    kept = int(sum(end < len(places) and places[end] < limit for end in last))
    first = last[kept - 1] + 1 if kept else 0
    return min([limit, *places[first : first + 1].tolist()]), tuple(pictures[:kept])

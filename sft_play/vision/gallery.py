"""References in rows -> pictures: files are found, sizes read, and bytes kept that no file has."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from PIL import __version__ as PIL_VERSION

from sft_play.errors import DataError, first_line
from sft_play.files import read_whole, write_atomic
from sft_play.rows.formats import Conversation
from sft_play.rows.images import MARK, Message, Reference, downloaded, of_data_url
from sft_play.vision.decoding import MAX_BYTES, size_of
from sft_play.vision.families import TEXT_ALONE, Recipe
from sft_play.vision.types import FOLDER, Picture

WEB = ("http", "https")


@dataclass(frozen=True)
class Gallery:
    """Where the pictures of rows may come from, and where they are kept."""

    recipe: Recipe | str = TEXT_ALONE  # how the model takes them, or why it takes none
    allowed: Path | None = None  # the folder that their files have to be in; None: they are in none
    base: Path | None = None  # the folder that paths are relative to; None: that of the file of the row
    allow_urls: bool = False
    kept: Path = Path()  # the folder of the prepared rows

    def require_recipe(self, what: str = "") -> Recipe:
        """How the model takes pictures; DataError, after `what`, with the reason if it takes none."""
        if isinstance(self.recipe, str):
            raise DataError(f"{what}{self.recipe}")
        return self.recipe

    @property
    def key(self) -> list[str] | None:
        """What pictures depend on besides the rows; None if there can be none."""
        if isinstance(self.recipe, str):
            return None
        places = (place and place.resolve() for place in (self.allowed, self.base))
        return [repr(self.recipe), *map(str, places), str(self.allow_urls)]

    def located(self, row: Conversation, file: str) -> Conversation:
        """The conversation, of a row in `file`, with pictures in place of references.

        Raises:
            DataError: a picture cannot be used, or the model learns from text alone; names the row.
        """
        if not any("images" in message for message in row.messages):
            return row
        return replace(row, messages=tuple(self._located(each, row.source, file) for each in row.messages))

    def _located(self, message: Message, source: str, file: str) -> Message:
        if "images" not in message:
            return message
        recipe, found = self.require_recipe(f"{source}: the row has images, and "), []
        for one in message["images"]:
            try:
                found.append(asdict(self._picture(one, file, recipe)))
            except (OSError, ValueError) as problem:
                said = getattr(problem, "strerror", None) or first_line(problem)
                raise DataError(f"{source}: image {_shown(one)} cannot be used: {said}") from None
        if message["content"].count(MARK) != len(found):
            raise DataError(f"{source}: a text has the character U+FDD2, which stands for images here")
        return {**message, "images": found}

    def _picture(self, reference: Reference, file: str, recipe: Recipe) -> Picture:
        scheme = urlsplit(reference[:100]).scheme if isinstance(reference, str) else "bytes"
        path = None
        if isinstance(reference, bytes):
            content = reference
        elif scheme == "data":
            content = of_data_url(reference)
        elif scheme in WEB:
            if not self.allow_urls:
                raise ValueError("it would be downloaded; to allow that, set data.allow_urls=true")
            content = downloaded(reference)
        else:
            path = self._file(reference.removeprefix("file://"), file)
            content = read_whole(path, MAX_BYTES)
        height, width = size_of(content)
        fit = recipe.family.fit(height, width)
        name = str(path) if path else self._keep(content)
        return Picture(name, len(content), height, width, fit)

    def _file(self, name: str, file: str) -> Path:
        if self.allowed is None:
            raise ValueError(f"it is a path, and {file} is in no folder; set data.image_folder")
        path = ((self.base or Path(file).parent) / name).resolve()
        if not path.is_relative_to(self.allowed.resolve()):
            raise ValueError(
                f"it is not in {self.allowed}; files elsewhere are allowed by their folder, data.image_folder"
            )
        return path

    def _keep(self, content: bytes) -> str:
        """Writes a picture into the folder of the prepared rows, once; returns its path there."""
        digest = hashlib.sha256(content).hexdigest()[:32]
        name = f"{FOLDER}/{digest[:2]}/{digest}"
        if not (self.kept / name).exists():
            (self.kept / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.kept / name, content, flush=False)
        return name


def described(recipe: Recipe | str) -> dict[str, object] | None:
    """What decodes the pictures of prepared rows, for their manifest."""
    if isinstance(recipe, str):
        return None
    return {"backend": f"Pillow {PIL_VERSION}", "processor": recipe.processor, "settings": recipe.settings}


def _shown(reference: Reference) -> str:
    if isinstance(reference, bytes):
        return f"of {len(reference):,} bytes"
    return repr(reference if len(reference) <= 100 else f"{reference[:60]}...")

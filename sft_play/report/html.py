"""A page of tables, figures and texts, rendered into one self-contained HTML file without scripts."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sft_play.files import storing, write_atomic
from sft_play.report.table import Table
from sft_play.secrets import redact

TEMPLATE = "page.html.j2"
PART = re.compile(r"(?<=\w)[._:](?=[A-Za-z])")  # ends a part of a name: train.|gradient_|checkpointing
MARK = b'<meta name="generator" content="SFT-Play">'  # at the beginning of each of our pages


@dataclass(frozen=True)
class Text:
    """A paragraph, or a list if there are several."""

    kind = "text"
    lines: Sequence[str]
    warning: bool = False


@dataclass(frozen=True)
class Legend:
    """What a colour or a pattern stands for."""

    name: str
    colour: int | None = None  # of a series; None for what was measured
    level: bool = False  # the dashed line of a level
    dashed: bool = False


@dataclass(frozen=True)
class Figure:
    """A plot, its caption and legend."""

    title: str
    svg: str  # from plots.py
    caption: str = ""
    legend: Sequence[Legend] = ()


@dataclass(frozen=True)
class Figures:
    """Plots side by side where there is room."""

    kind = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Sample:
    """A prompt with labelled texts: reference and answers."""

    prompt: str
    texts: Sequence[tuple[str, str]]
    images: Sequence[str] = ()  # data: URLs


@dataclass(frozen=True)
class Samples:
    """Prompts and answers."""

    kind = "samples"
    title: str
    samples: Sequence[Sample]


Block = Text | Table | Figures | Samples


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    blocks: Sequence[Block]
    half: bool = False  # whether another one is beside it where there is room


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    tiles: Sequence[tuple[str, str]] = ()  # name and value of the key numbers
    status: str = ""
    share: float | None = None  # of the work that is done, as a bar
    facts: Sequence[tuple[str, str]] = ()  # name and value of what is said of it beside the status


def render(page: Page, template: str = TEMPLATE, **more: object) -> str:
    """The page as HTML, with what else its template takes.

    Every text is escaped, and access tokens in it are masked.
    """
    return _environment().get_template(template).render(page=page, **more)


def render_part(template: str, **values: object) -> Markup:
    """A part of a page, made by a template of its own; masked and escaped as in `render`."""
    return Markup(_environment().get_template(template).render(**values))


@functools.cache
def _environment() -> Environment:
    """The templates of this folder."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # masks before escaping, since an escaped token would not be recognized
        finalize=lambda value: redact(value) if type(value) is str else value,
    )
    environment.filters |= {"svg": Markup, "masked": redact, "wrapped": _wrapped}
    return environment


def _wrapped(cell: object) -> Markup:
    """A text whose long names may be wrapped after each part; masked, as `finalize` leaves it alone.

    What a file has in the place of a text is shown as it is.
    """
    return Markup(PART.sub(r"\g<0><wbr>", str(escape(redact(str(cell))))))


def is_page(path: Path) -> bool:
    """Whether a file is one of our pages."""
    with path.open("rb") as file:
        return MARK in file.read(1000)


def write_page(page: Page, path: Path) -> None:
    """Writes the page, whole or not at all; StorageError if that fails."""
    content = render(page).encode(errors="replace")  # answers may hold halves of surrogate pairs
    with storing(path, "Free space there, or make it writable"):
        write_atomic(path, content)

"""The console of all commands: lines are broken between words alone, so that paths stay whole.

Texts come from rows, models and names of files too. What a terminal would obey in them is shown instead.
"""

import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from sft_play.secrets import redact

WORD = re.compile(r"\S+")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line breaks
CONTINUED = " \\"
LEAST_NAMES = 10  # cells for names, so that the lists of a command are aligned


def visible(text: str) -> str:
    r"""A text for a person, with escapes such as \x1b in the place of control characters."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def write_stderr(text: str) -> None:
    """Writes a text to stderr as a person may see it: without secrets, control characters visible."""
    sys.stderr.write(visible(redact(text)))


def whole_words(line: Text, width: int, hang: int = 0) -> list[Text]:
    """Breaks a line between words for a screen of `width` cells; a word longer than that stands alone.

    The blanks at its start indent all lines made from it; `hang` is further blanks before all but the first.
    """
    plain = line.plain
    words = [match.span() for match in WORD.finditer(plain)]
    first = words[0][0] if words else 0
    lines: list[tuple[int, int]] = []
    for start, end in words:
        indent = first + (hang if len(lines) > 1 else 0)
        if lines and indent + cell_len(plain[lines[-1][0] : end]) <= width:
            lines[-1] = lines[-1][0], end
        else:
            lines.append((start, end))
    return [_indented(line[start:end], first + (hang if start > first else 0), width) for start, end in lines]


def _indented(line: Text, indent: int, width: int) -> Text:
    """The line, with fewer blanks if it is too long."""
    line.pad_left(max(0, min(indent, width - cell_len(line.plain))))
    line.no_wrap, line.overflow = True, "ignore"
    return line


class Words:
    """Text on the screen, broken between words (`whole_words`)."""

    def __init__(self, text: str | Text, hang: int = 0) -> None:
        """A string is taken as it is, without markup."""
        self.text, self.hang = _text(text), hang

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.split("\n", allow_blank=True):
            yield from whole_words(line, options.max_width, self.hang) or [Text("")]


class Command(Words):
    """A shell command; where it is broken, it goes on after a backslash, so that it can be copied.

    A shell does not continue lines in single quotes: a command with them is not broken.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if "'" in self.text.plain:
            yield from whole_words(self.text, max(options.max_width, self.text.cell_len))
            return
        *lines, last = whole_words(self.text, options.max_width - len(CONTINUED), self.hang)
        for line in lines:
            yield line.append(CONTINUED)
        yield last


class NamedValues:
    """Names and values in two columns; a value that is too long goes on below its start."""

    def __init__(self, rows: Iterable[tuple[str | Text, str | Text]]) -> None:
        self.rows = [(_text(name, "dim"), _text(value)) for name, value in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        column = max([LEAST_NAMES, *(name.cell_len for name, _ in self.rows)]) + 2
        for name, value in self.rows:
            for line in value.split("\n", allow_blank=True):
                first = name.copy()
                first.pad_right(column - name.cell_len)
                yield Words(first + line, hang=column if name else 0)
                name = Text()


def _text(value: str | Text, style: str = "") -> Text:
    return Text(visible(value), style=style) if isinstance(value, str) else value


class Screen(Console):
    """rich's console, which would also break words that are longer than a line.

    Strings have no markup, and what is printed has no control characters but our own colours. With NO_COLOR
    it writes no bold or dim text either.
    """

    def __init__(self, **settings: Any) -> None:
        if os.environ.get("NO_COLOR"):
            settings["color_system"] = None
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich, but control characters in texts are shown; those of rich are no texts.

        Where a width is measured before, as in tables, `render_str` has shown them already.
        """
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def render_str(self, text: str, **settings: Any) -> Text:
        """As in rich, of the visible text."""
        return super().render_str(visible(text), **settings)

    def print(self, *objects: object, **settings: Any) -> None:
        """As in rich, but text is broken between words alone, unless `end` continues the line."""
        if settings.get("end", "\n") == "\n":
            settings |= {"soft_wrap": False, "crop": False}
            objects = tuple(Words(one) if isinstance(one, str | Text) else one for one in objects)
        super().print(*objects, **settings)

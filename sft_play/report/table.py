"""A table, laid out once: `on_screen`, in Markdown, and on a page by the macro of page.html.j2."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as ScreenTable
from rich.text import Text

from sft_play.ui.screen import NamedValues

MOST_CELLS = 10_000  # of a screen that is wide enough for anything
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Table:
    """Texts under the names of their columns; the first of each row is its header."""

    kind = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""  # of a page
    left: Collection[int] = (0,)  # columns of text; those of numbers are aligned on the right
    bold: Collection[int] = ()  # rows that stand out
    folded: bool = False  # whether a page shows it after a click
    cards: bool = False  # whether each row is a card on a narrow page, as with many columns it always is
    # Name of a column -> what it is called on a screen, which has less room; None: it is left out there.
    short: Mapping[str, str | None] = field(default_factory=dict)


def on_screen(
    table: Table, gap: int = 3, bars: Mapping[int, Sequence[float]] | None = None, mark: str = ""
) -> ScreenTable:
    """The table without rules, with so many cells between its columns, and `mark` before bold rows.

    `bars` are, by column, the shares of a whole of each row, as bars to the right of it.
    """
    bars = bars or {}
    screen = ScreenTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    shown = [index for index, name in enumerate(table.head) if table.short.get(name, name) is not None]
    for index in shown:
        name = table.head[index]
        side = "left" if index in table.left else "right"
        whole = bool(bars) or not index  # a name is copied
        screen.add_column(table.short.get(name, name), justify=side, overflow="fold", no_wrap=whole)  # type: ignore[arg-type]
        if index in bars:
            screen.add_column("")  # which gives way
    for number, row in enumerate(table.rows):
        chosen, cells = number in table.bold, list[str | Bar]()
        before = {0: mark if chosen else " " * len(mark)}
        for index in shown:
            cells.append(before.get(index, "") + row[index])
            cells += [Bar(bars[index][number])] if index in bars else []
        screen.add_row(*cells, style="bold" if chosen else "")
    return screen


class Fitting:
    """The table if the screen has room for its words; else each row as a paragraph, with whole words too."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen, (_, *head) = on_screen(self.table), self.table.head
        for column in screen.columns:  # rich narrows the others alone
            column.no_wrap = not any(" " in str(cell) for cell in (column.header, *column.cells))
        if Measurement.get(console, options.update_width(MOST_CELLS), screen).minimum <= options.max_width:
            yield screen
            return
        for name, *cells in self.table.rows:
            said = (f"{column} {cell}" for column, cell in zip(head, cells, strict=True) if cell)
            yield NamedValues([(name, ", ".join(said))])


def markdown(table: Table) -> str:
    """The table in Markdown; empty without rows."""
    if not table.rows:
        return ""
    lines = []
    for row in (table.head, ("---",) * len(table.head), *table.rows):
        cells = [cell.replace("|", "&#124;") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Bar:
    """A share of a whole as a bar, of # on screens that have ASCII alone; narrower where there is no room."""

    def __init__(self, share: float, width: int = 12) -> None:
        self.share, self.width = min(1.0, max(0.0, share)), width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        whole, rest = divmod(round(self.share * width * len(EIGHTHS)), len(EIGHTHS))
        full, part = ("#", "") if options.ascii_only else ("█", EIGHTHS[rest].strip())
        yield Text((full * whole + part).ljust(width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, self.width)

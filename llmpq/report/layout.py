"""Tables that fit the terminal, and sentences below them that wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from llmpq.report.formatting import plain

UNBOUNDED = 10_000  # columns; wider than any table
INDENT = "  "


def new_table(columns: Sequence[str], words: Sequence[int] = (0,)) -> Table:
    """A table without lines between rows; columns in `words` hold text, others whole figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, head in enumerate(columns):
        is_words = index in words
        table.add_column(
            head, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold"
        )
    return table


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)
) -> Table:
    """A `new_table` with its rows, whose figures are in signs that every terminal has."""
    table = new_table(columns, words)
    for row in rows:
        table.add_row(*(cell if at in words else plain(cell) for at, cell in enumerate(row)))
    return table


@dataclass(frozen=True)
class Fitting:
    """A title above the first of several tables that fits the width, else the last, if any."""

    title: str
    tables: Sequence[Callable[[], Table]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose by what the tables would take without bounds."""
        yield from Notes([self.title], style="bold").__rich_console__(console, options)
        if not self.tables:
            return
        *wider, narrowest = self.tables
        for make in wider:
            table = make()
            unbounded = options.update(max_width=UNBOUNDED)
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                yield table
                return
        yield narrowest()


@dataclass(frozen=True)
class Notes:
    """Sentences of a line or more each; what follows the first line is indented."""

    lines: Sequence[str]
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from _wrapped(Text(plain(line), style=self.style), console, options.max_width)


def _wrapped(line: Text, console: Console, width: int) -> Iterator[RenderableType]:
    if cell_len(line.plain) <= width:
        yield line
        return
    for index, part in enumerate(line.wrap(console, width - len(INDENT))):
        part.rstrip()
        yield Text(INDENT if index else "", style=line.style) + part


def broken_name(device: str) -> str:
    """A device's name in two lines: its node, and its type with its number."""
    return device.replace("/", "/\n", 1)


def stacked(words: Sequence[str], width: int) -> str:
    """Words in lines of at most `width` characters, as far as each of them fits."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)

"""Printing lists of what is built in: as tables without lines in 80 columns, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import console

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WIDEST = 80


def print_json(shown: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Print values as indented JSON, without breaking lines."""
    console().print(json.dumps(shown, indent=1), soft_wrap=True, highlight=False)


def print_table(shown: RenderableType) -> None:
    """Print in at most 80 columns, however wide the terminal is."""
    screen = console()
    screen.print(shown, width=min(screen.width, _WIDEST), highlight=False)


def plain_table(heads: Iterable[str], left: Iterable[str], gap: int) -> Table:
    """A table with these heads, `gap` columns between two; all but `left` are numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    texts = frozenset(left)
    for head in heads:
        table.add_column(head, justify="left" if head in texts else "right", no_wrap=True)
    return table


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values, without those that are empty."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value:
            table.add_row(name, value)
    return table


def with_notes(table: RenderableType, *notes: str) -> RenderableType:
    """The table and paragraphs below it."""
    from rich.console import Group
    from rich.text import Text

    return Group(table, *(line for note in notes for line in (Text(), Text(note))))

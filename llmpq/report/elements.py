"""Parts that several sections of the page are made of: tables, bars and legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is set apart by its style, or has something in small print after it.

    "estimated" puts that word before the text.
    """

    text: str
    style: Literal["plain", "strong", "verdict", "estimated"] = "plain"
    small: str = ""


@dataclass(frozen=True)
class Table:
    """A table: the columns `words` hold text, the others numbers, aligned to the right."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    words: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Piece:
    """A coloured part of a bar: its style class, its width in percent of the bar, its tooltip."""

    style: str
    width: float
    title: str = ""


@dataclass(frozen=True)
class Bar:
    """A bar for stage `stage` with `words` above it.

    `style`: classes of its track. `label`: the bar in words. `width`: percent of the page's, None
    for all of it.
    """

    stage: int
    device: str
    words: str
    label: str
    pieces: Sequence[Piece]
    style: str = "track"
    width: float | None = None


Legend = Sequence[tuple[str, str]]
"""Pairs of a style class, which gives the colour, and what it stands for."""

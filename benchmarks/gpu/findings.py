"""Findings of a part, each written to a file at once: a part that hangs leaves what it had."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quant.common.errors import LlmpqError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """`folder` is shared by all parts of a run: models that one has written serve the others.

    `kept`: beside the report, for what parts of a later run may use.
    """

    folder: Path
    kept: Path
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        """The device to compute on."""
        import torch

        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    def size(self, full: _T, dry: _T) -> _T:
        """`full` on a GPU, `dry` in a dry run."""
        return dry if self.dry_run else full


Cell = str | float | int | bool | None


class NotRunError(Exception):
    """Says why a part cannot run here: something is missing, nothing is wrong."""


@dataclass(frozen=True)
class Table:
    """Rows of plain values; `formats` has a format string for each of `columns`."""

    title: str
    columns: tuple[str, ...]
    formats: tuple[str, ...]
    rows: list[list[Cell]] = field(default_factory=list)


class Findings:
    """Tables, notes and complaints of one part; every addition is saved to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: list[Table] = []
        self._notes: list[str] = []
        self._not_run = ""
        self.complaints: list[str] = []

    def table(self, title: str, **columns: str) -> Table:
        """An empty table: format strings by the names of its columns, `_` standing for a space."""
        names = tuple(name.replace("_", " ").strip() for name in columns)
        made = Table(title, names, tuple(columns.values()))
        self._tables.append(made)
        return made

    def row(self, table: Table, *cells: Cell) -> None:
        """Add a row to one of the tables; None is a figure that could not be had."""
        if len(cells) != len(table.columns):
            raise ValueError(f"{len(cells)} cells for the columns {table.columns}")
        table.rows.append(list(cells))
        self._save()

    def note(self, text: str) -> None:
        """Say something that a reader of the tables should know."""
        self._notes.append(text)
        self._save()

    def complain(self, text: str) -> None:
        """Note that something is wrong: the part goes on, and counts as failed."""
        self.complaints.append(text)
        self._save()

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Make a complaint of what goes wrong inside, so that the part goes on with the rest."""
        try:
            yield
        except (RuntimeError, LlmpqError) as error:
            traceback.print_exc()
            reason = str(error).partition("\n")[0]
            self.complain(f"{what}: {type(error).__name__}: {reason}")

    def not_run(self, reason: str) -> None:
        """Note why the part did not run."""
        self._not_run = reason
        self._save()

    def _save(self) -> None:
        content = {
            "tables": [asdict(table) for table in self._tables],
            "notes": self._notes,
            "complaints": self.complaints,
            "not_run": self._not_run,
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self._path)


def cells_of(table: Table, row: Sequence[Cell]) -> list[str]:
    """A row as text."""
    pairs = zip(table.formats, row, strict=True)
    return ["–" if cell is None else shape.format(cell) for shape, cell in pairs]

"""Reading and writing the CSV files of measurements: profiles, and the tables beside them."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from quant.common.errors import InputError, SpecError
from quant.common.files import write_whole

VERSION = 1
"""The version in the first column of every row of a table; other versions are refused."""

_Row = TypeVar("_Row")


@dataclasses.dataclass(frozen=True)
class TableLine:
    """A row as text by column; `place` is its file and line, for messages."""

    values: dict[str, str | None]
    place: str

    def fields(self) -> dict[str, str]:
        """The text of every column; SpecError where there are more or fewer fields than columns."""
        found = {
            name: text
            for name, text in self.values.items()
            if name is not None and text is not None
        }
        if len(found) != len(self.values):
            raise SpecError(f"{self.place}: the row has not as many fields as the header")
        return found


def read_lines(
    path: Path, check_columns: Callable[[Sequence[str]], None], kind: str = "table"
) -> list[TableLine]:
    """Read the rows of a CSV file; SpecError where it cannot be read, or from `check_columns` of
    the first line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            check_columns(reader.fieldnames or ())
            return [TableLine(values, f"{path}:{reader.line_num}") for values in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{kind} {path} cannot be read: {error}") from error


def write_lines(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically; InputError where it cannot be written."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(rows)
    try:
        write_whole(path, stream.getvalue())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def table_beside(profile: str | Path, name: str) -> Path:
    """The path of a table beside a profile: `times.links.csv` for `times.csv`."""
    path = Path(profile)
    return path.with_name(f"{path.stem}.{name}.csv")


def read_table(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """Read every row as a `kind`, a pydantic dataclass; SpecError names the line of a bad row."""
    names = _columns(kind)

    def check_columns(found: Sequence[str]) -> None:
        if tuple(found) != names:
            raise SpecError(f"{path}:1: the columns must be {','.join(names)}")

    return tuple(_row(line, kind) for line in read_lines(path, check_columns))


def write_table(path: Path, kind: type[_Row], rows: Iterable[_Row]) -> None:
    """Write rows so that `read_table` gives them back; errors as in `write_lines`."""
    names = _columns(kind)
    write_lines(path, names, ((VERSION, *(getattr(row, n) for n in names[1:])) for row in rows))


def _columns(kind: type[_Row]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # any of pydantic's are
    return ("version", *(field.name for field in fields))


def _row(line: TableLine, kind: type[_Row]) -> _Row:
    values = line.fields()
    version = values.pop("version")
    if version != str(VERSION):
        raise SpecError(
            f"{line.place}: the row is of version {version!r}, but this llmpq reads version "
            f"{VERSION}; measure again with llmpq profile"
        )
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise SpecError(f"{line.place}: {name} is {first['input']!r}: {first['msg']}") from error

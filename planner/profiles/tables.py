"""Small versioned CSV tables beside a profile: links, and loading."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from quant.common.errors import InputError, SpecError
from quant.common.whole_file import write_whole

VERSION = 1
"""In the first column of every row; a reader refuses others."""

_Row = TypeVar("_Row")


def table_beside(profile: str | Path, name: str) -> Path:
    """`times.links.csv` of the profile `times.csv`."""
    path = Path(profile)
    return path.with_name(f"{path.stem}.{name}.csv")


def read_table(path: Path, kind: type[_Row]) -> tuple[_Row, ...]:
    """Every row as a `kind`, a pydantic dataclass; SpecError names file and line of a bad one."""
    names = _columns(kind)
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != names:
                raise SpecError(f"{path}:1: the columns must be {','.join(names)}")
            return tuple(_row(values, kind, f"{path}:{reader.line_num}") for values in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error


def write_table(path: Path, kind: type[_Row], rows: Iterable[_Row]) -> None:
    """Write rows so that `read_table` gives them back: aside first, so that none is ever torn.

    InputError where the file cannot be written.
    """
    names = _columns(kind)
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(names)
    writer.writerows((VERSION, *(getattr(row, name) for name in names[1:])) for row in rows)
    try:
        write_whole(path, stream.getvalue())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _columns(kind: type[_Row]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # any of pydantic's are
    return ("version", *(field.name for field in fields))


def _row(values: dict[str, str | None], kind: type[_Row], where: str) -> _Row:
    if None in values or None in values.values():
        raise SpecError(f"{where}: the row has not as many fields as the header")
    version = values.pop("version")
    if version != str(VERSION):
        raise SpecError(
            f"{where}: the row is of version {version!r}, but this llmpq reads version {VERSION}; "
            "measure again with llmpq-profile"
        )
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise SpecError(f"{where}: {name} is {first['input']!r}: {first['msg']}") from error

"""The prompts of a job as a stream: JSON, CSV (also compressed), Parquet; folders, globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmpq.jobs import file_format
from llmpq.jobs.file_format import (
    READ_ERRORS,
    SUFFIXES,
    Compression,
    contradiction,
    input_format,
    json_value,
    numbered_lines,
    reason,
)
from llmpq.jobs.job_files import FileRecord, settled_identities
from llmpq.jobs.parquet import parquet_rows
from llmpq.jobs.store import InputRecord
from llmpq.jobs.text_files import csv_rows, is_whole_json, json_rows
from llmpq.rows.row import BadRow, Occurrences, Row, row_from_line, row_from_mapping
from quant.common.errors import InputError
from quant.common.files import FileIdentity
from quant.common.text import path_reason
from quant.common.url_files import (
    AnyFile,
    UrlFile,
    changed_while_read,
    files_at,
    identity_of,
    is_url,
)

_PLACES_PER_FILE = 2**40

Content = bytes | Mapping[str, Any] | str
"""A line of JSON, a row of a table, or a sentence on what is wrong with one."""


class PlacedRow(NamedTuple):
    """A row, and a number that stands for its file and line, or row where rows are no lines."""

    row: Row | BadRow
    place: int


def row_of(content: Content, place: str) -> Row | BadRow:
    """The row of one line; a bad one without an id is named by its `place`."""
    if isinstance(content, bytes):
        return row_from_line(content, place)
    if isinstance(content, str):
        return BadRow(place, content)
    return row_from_mapping(content, place)


@dataclass(frozen=True)
class JobInput:
    """The files of a job in a settled order, whose `rows` can be read again and again.

    `row_of` makes rows of lines, by default those of llmpq and of OpenAI's batches.
    """

    files: tuple[AnyFile, ...]
    names: tuple[str, ...]
    row_of: Callable[[Content, str], Row | BadRow] = row_of

    @classmethod
    def find(cls, named: Sequence[str | Path]) -> JobInput:
        """The files behind paths, folders, globs, URLs. InputError without any, or for a pipe."""
        found = dict.fromkeys(path for name in named for path in _files_of(str(name)))
        files = tuple(found)
        for path in files:
            if isinstance(path, Path) and not path.is_file():
                raise InputError(
                    f"cannot read input {path}: it is no regular file, and a job reads its input "
                    "twice; write it to a file first"
                )
        parents = [str(path.absolute().parent) for path in files]
        top = os.path.commonpath(parents)
        names = (os.fsencode(os.path.relpath(path.absolute(), top)) for path in files)
        # ids are made of names, and must be text
        return cls(files, tuple(name.decode("utf-8", "backslashreplace") for name in names))

    def rows(self) -> Iterator[PlacedRow]:
        """Every row in turn, ids made from content where they lack. Raises `InputError`."""
        occurrences = Occurrences()
        for index, path in enumerate(self.files):
            for number, content in _contents(path):
                row = self.row_of(content, f"{self.names[index]}:{number}")
                if not row.custom_id and isinstance(row, Row):
                    row = row.named(occurrences.custom_id(row.named_by))
                yield PlacedRow(row, index * _PLACES_PER_FILE + number)

    def begins_with_batch_line(self) -> bool:
        """Whether the first row that is an object is a line of OpenAI's batches."""
        for path in self.files:
            for _, content in _contents(path):
                if isinstance(content, bytes):
                    content = json_value(content)
                if isinstance(content, Mapping):
                    return isinstance(content.get("body"), Mapping)
        return False

    def place_name(self, place: int) -> str:
        index, number = divmod(place, _PLACES_PER_FILE)
        return f"{self.names[index]}:{number}"

    def identities(self) -> tuple[FileIdentity, ...]:
        """State of the files, to see whether any changes; of a new one only after a moment."""
        try:
            return tuple(settled_identities(self.files))
        except OSError as error:
            raise InputError(f"cannot read input {error.filename}: {error.strerror}") from error

    def record(self, before: Sequence[FileIdentity], rows: int, errors: int) -> InputRecord | None:
        """The record of the files when all rows are done; None if they are not as `before`."""
        try:
            records = [FileRecord.of(*file) for file in zip(self.files, self.names, strict=True)]
            if settled_identities(self.files) != list(before):
                return None
        except OSError:
            return None
        files = tuple(record for record in records if record is not None)
        return InputRecord(rows, errors, files) if len(files) == len(records) else None

    def matches(self, record: InputRecord) -> bool:
        """Whether these are the files of `record`, by names and sizes, then content."""
        if self.names != tuple(file.name for file in record.files):
            return False
        pairs = tuple(zip(record.files, self.files, strict=True))
        return all(file.matches(path) for file, path in pairs)


def _contents(path: AnyFile) -> Iterator[tuple[int, Content]]:
    """What a file holds, row by row; `InputError` where one behind a URL changes meanwhile."""
    if not isinstance(path, UrlFile):
        yield from _contents_now(path)
        return
    try:
        before = identity_of(path)
        try:
            yield from _contents_now(path)
        except InputError as error:
            if identity_of(path) != before:
                raise changed_while_read(path) from error
            raise
        if identity_of(path) != before:
            raise changed_while_read(path)
    except OSError as error:
        raise InputError(f"cannot read input {path}: {reason(error)}") from error


def _contents_now(path: AnyFile) -> Iterator[tuple[int, Content]]:
    named = input_format(path)
    try:
        wrong = contradiction(path, named)
        if wrong is not None:
            raise InputError(f"cannot read input {path}: {wrong}")
        if named.rows == "parquet":
            yield from enumerate(parquet_rows(path), start=1)
        elif named.rows == "csv":
            yield from csv_rows(path, named.compression)
        elif is_whole_json(path, named.compression):
            yield from enumerate(json_rows(path, named.compression), start=1)
        else:
            yield from _lines(path, named.compression)
    except READ_ERRORS as error:
        raise InputError(f"cannot read input {path}: {reason(error)}") from error


def _lines(path: AnyFile, compression: Compression) -> Iterator[tuple[int, Content]]:
    for number, line in numbered_lines(path, compression):
        if line is None:
            yield number, f"the line has more than {file_format.MAX_LINE_BYTES} bytes"
        elif line.strip():
            yield number, line


def no_prompts(source: str) -> InputError:
    return InputError(
        f"{source}: no prompts; give one JSON object per line with a prompt (or an array of them), "
        "or one row of a table"
    )


def _files_of(name: str) -> Sequence[AnyFile]:
    if is_url(name):
        return files_at(name, SUFFIXES)
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(
                p for p in path.iterdir() if p.name.lower().endswith(SUFFIXES) and p.is_file()
            )
            kinds = ", ".join(SUFFIXES)
        elif path.exists() or not glob.has_magic(name):
            path.stat()
            return [path]
        else:
            found = sorted(
                p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()
            )
            kinds = "name"
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot read input {name:.200}: {path_reason(error)}") from error
    if not found:
        raise InputError(f"cannot read input {name}: no file of that {kinds} there")
    return found

"""Rows of results as outputs hold them: writing them, reading them back, and their identities."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.formats.csv_files import read_csv_results
from llmpq.jobs.formats.file_format import FileFormat, output_format
from llmpq.jobs.formats.parquet import read_results, require_pyarrow
from llmpq.jobs.formats.streams import contradiction, numbered_lines
from llmpq.jobs.output.openai_lines import error_of, fingerprint_of, is_line
from llmpq.jobs.records.manifest import OutputForm
from llmpq.rows.results import FINGERPRINT, RESULT_FIELDS, Result
from quant.common.errors import InputError

_KEYS = ("custom_id", "error", FINGERPRINT)
_FINGERPRINT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{20}")
_REMEDY = "name another output or pass --overwrite"
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class ResultIdentity:
    """The id of a row of results, whether it failed, its fingerprint, and the form of its line."""

    custom_id: str
    failed: bool
    fingerprint: str
    form: OutputForm = "rows"

    @property
    def model(self) -> str:
        """Digest of the model that made it."""
        return self.fingerprint.partition("-")[0]


def line_of(result: Result, fingerprint: str) -> bytes:
    """A result as a line of JSON."""
    row = {name: getattr(result, name) for name in RESULT_FIELDS}
    row |= {FINGERPRINT: fingerprint} | dict(result.columns)
    return _ENCODE(row).encode() + b"\n"


def check_writable(named: Path, path: Path) -> None:
    """Raise `InputError` for a format that cannot be written to `path`.

    `named`: the name that was given, perhaps of a link to `path`.
    """
    found = output_format(path)
    if found != output_format(named):
        raise InputError(
            f"output {named} is a link to {path}, whose name stands for {found.name}; give both "
            "the same ending"
        )
    if found.rows == "parquet":
        require_pyarrow()
    elif found.compression == ".zst":
        require_pyarrow("Files that end in .zst")


def result_identities(path: Path) -> Iterator[ResultIdentity]:
    """Identities of the rows of a finished file.

    Raises `InputError` for a row that llmpq did not write and for a file that is not what its name
    says, one of `READ_ERRORS` for a damaged file.
    """
    named = output_format(path)
    wrong = contradiction(path, named)
    if wrong is not None:
        raise InputError(f"output {path} exists already: {wrong}, {_REMEDY}")
    for number, row in enumerate(finished_rows(path, named, _KEYS), start=1):
        found = result_identity(row)
        if found is None:
            raise InputError(
                f"output {path} exists already and its row {number} is no result of llmpq; "
                f"{_REMEDY}"
            )
        yield found


def result_identity(row: object) -> ResultIdentity | None:
    """The identity of a line or a row; None if it is no result of llmpq."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            return None
    if not isinstance(row, Mapping):
        return None
    form: OutputForm = "rows"
    if is_line(row):
        values = (row.get("custom_id"), error_of(row), fingerprint_of(row))
        form, row = "openai", dict(zip(_KEYS, values, strict=True))
    if any(key not in row for key in _KEYS):
        return None
    custom_id, error, fingerprint = (row[key] for key in _KEYS)
    if not isinstance(custom_id, str) or not isinstance(fingerprint, str):
        return None
    if not _FINGERPRINT.fullmatch(fingerprint) or not isinstance(error, str | None):
        return None
    return ResultIdentity(custom_id, error is not None, fingerprint, form)


def finished_rows(path: Path, named: FileFormat, columns: Sequence[str] | None) -> Iterator[object]:
    """Lines of JSON, or the rows of a table, of Parquet only the `columns` that are named."""
    if named.rows == "parquet":
        return read_results(path, columns)
    if named.rows == "csv":
        return read_csv_results(path, named.compression)
    return finished_lines(path, named)


def finished_lines(path: Path, named: FileFormat) -> Iterator[bytes]:
    """Lines, each with its end, which an editor may have dropped at the last one.

    A line that is too long is none of llmpq's, and given as an empty one.
    """
    for _, line in numbered_lines(path, named.compression):
        if line is None or line.strip():
            line = line or b""
            yield line if line.endswith(b"\n") else line + b"\n"

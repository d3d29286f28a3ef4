"""Reading a file of predictions by `custom_id`, for studies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.jobs.formats.file_format import READ_ERRORS, input_format, numbered_lines, reason
from planner.profiles.csv_table import read_lines
from planner.workload import MAX_TOKENS
from quant.common.errors import InputError, SpecError

COLUMNS = ("custom_id", "expected_tokens")

_REMEDY = f"give a CSV with the columns {','.join(COLUMNS)}, or JSON lines with these fields"


def read_trace(path: str | Path) -> dict[str, int]:
    """Expected tokens by `custom_id` of the CSV or the JSON lines at `path`.

    SpecError names file and line of what is no whole number of tokens, such as NaN or a negative
    one, and of an id that stands there twice.
    """
    found = Path(path).expanduser()
    rows = _table(found) if found.suffix.lower() == ".csv" else _lines(found)
    tokens: dict[str, int] = {}
    for place, values in rows:
        custom_id, expected = (values.get(name) for name in COLUMNS)
        if not isinstance(custom_id, str) or not custom_id:
            raise SpecError(f"{place}: custom_id is {custom_id!r:.80}; {_REMEDY}")
        if custom_id in tokens:
            raise SpecError(f"{place}: custom_id {custom_id!r:.80} stands there twice; keep one")
        tokens[custom_id] = whole_tokens(expected, COLUMNS[1], place)
    if not tokens:
        raise SpecError(f"predictions {path}: no rows; {_REMEDY}")
    return tokens


def whole_tokens(value: object, name: str, place: str) -> int:
    """The number of tokens that `value` is, also as text; SpecError naming `place` otherwise."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number <= MAX_TOKENS:
        raise SpecError(
            f"{place}: {name} is {value!r:.80}; it must be a whole number of 1 to {MAX_TOKENS}"
        )
    return number


def _table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def check_columns(found: Sequence[str]) -> None:
        if set(found) != set(COLUMNS):
            raise SpecError(f"{path}:1: the columns are {','.join(found)!r:.200}; {_REMEDY}")

    for line in read_lines(path, check_columns, "predictions"):
        yield line.place, line.fields()


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for number, line in numbered_lines(path, input_format(path).compression):
            if line is None or line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except READ_ERRORS as error:
        raise InputError(f"cannot read predictions {path}: {reason(error)}") from error


def _object(line: bytes | None, place: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line or b"")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        raise SpecError(f"{place}: no JSON object; {_REMEDY}")
    return values

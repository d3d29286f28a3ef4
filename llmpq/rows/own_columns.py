"""A row's own columns: what it carries beside the fields that llmpq reads, as JSON values.

They stay with the driver while the row is in flight and come out with its result.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from llmpq.rows.results import FINGERPRINT, REASONING, RESULT_FIELDS

_TAKEN = frozenset((*RESULT_FIELDS, REASONING, FINGERPRINT))
"""Names that a row of results has itself."""

PREFIX = "input_"
"""Stands before an own column of such a name: a reference answer `text` becomes `input_text`."""

_DEEPEST = 100  # as of messages: Python gives up at a thousand levels
_LARGEST_BITS = 10_000  # of a whole number: Python writes no more than 4300 digits
_PLAIN = frozenset((str, int, bool, dict, list, type(None)))
_MISSING = ("NAType", "NaTType")  # of pandas
_AS_TEXT = (Decimal, UUID, timedelta)


class ColumnError(ValueError):
    """A column that a result could not carry; the text says why."""


def own_columns(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The columns of `given` under the names and with the values that a result carries.

    Times become text by ISO 8601, decimals text, bytes base64, NaN null. Raises `ColumnError` for
    what JSON cannot hold, and for two columns of one name.
    """
    columns: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not name or not _is_text(name):
            raise ColumnError(f"the name of its column {name!r:.80} is no text; give it one")
        shown = PREFIX + name if name in _TAKEN else name
        if shown in columns or (shown != name and shown in given):
            raise ColumnError(
                f"its column {name!r} would come out as {shown!r}, as results have a {name!r} of "
                f"their own, and there is a column {shown!r} already; rename one of them"
            )
        try:
            columns[shown] = json_value(value)
        except ColumnError as error:
            raise ColumnError(f"its column {name!r:.80} {error}") from error
    return columns


def plain_value(value: Any) -> Any:
    """A value of numpy as Python's; None for those by which tables mark what is missing."""
    if type(value) in _PLAIN:
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    is_nan = isinstance(value, float) and value != value
    return None if is_nan or type(value).__name__ in _MISSING else value


def whole_number(value: Any) -> Any:
    """`value` with 3.0 as 3: pandas writes whole numbers so where others of their column lack."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_value(value: Any, levels: int = _DEEPEST) -> Any:
    """`value` as JSON has it; raises `ColumnError` where it has no form of it."""
    if isinstance(value, str):
        if not _is_text(value):
            raise ColumnError("holds half a surrogate pair, which UTF-8 cannot write")
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(value)
    if levels == 0:
        raise ColumnError(f"nests deeper than {_DEEPEST} levels; write it as text")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and _is_text(name) for name in value):
            raise ColumnError("has an object with a name that is no text; give it one")
        return {str(name): json_value(each, levels - 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each, levels - 1) for each in value]
    plain = plain_value(value)
    return _as_text(value) if plain is value else json_value(plain, levels - 1)


def _number(value: float) -> int | float | None:
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_BITS:
            raise ColumnError("is a number of thousands of digits; write it as text")
        return int(value)
    if math.isinf(value):
        raise ColumnError(f"is {value}, which JSON cannot write; leave it out, or write it as text")
    return None if math.isnan(value) else float(value)


def _as_text(value: Any) -> str | None:
    """The text of a value that tables and Python have, and JSON has not."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise ColumnError(
        f"is of type {type(value).__name__}, which JSON has not; give text, a number, a list or an "
        "object"
    )


def _is_text(value: str) -> bool:
    """Whether UTF-8 can write it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

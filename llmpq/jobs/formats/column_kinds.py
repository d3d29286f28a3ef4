"""The rows' own columns in tables: the kind of values that each column of a table has.

A table has one type a column, and rows may differ in what they carry. Columns of truth values,
whole numbers, numbers, texts and lists of one of these have that type. Any other column, as of
objects or of numbers beside texts, holds each value as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from llmpq.rows.results import FINGERPRINT, RESULT_FIELDS

Scalar = Literal["empty", "bool", "int", "long", "float", "text", "json"]

_KNOWN = frozenset((*RESULT_FIELDS, FINGERPRINT))
_EXACT = 2**53  # whole numbers up to here are exact as a float
_WIDEST = 2**63
MOST_COLUMNS = 1000
"""Own columns of a table: a thousand names are no table any more, and every row has a cell of each.
"""

_LEVELS = 3  # of lists in lists; deeper ones are JSON text


@dataclass(frozen=True)
class Kind:
    """The kind of a scalar, in lists of so many `levels`."""

    scalar: Scalar
    levels: int = 0


EMPTY, JSON = Kind("empty"), Kind("json")
_WIDER: Mapping[frozenset[Scalar], Scalar] = {
    frozenset(("int", "long")): "long",
    frozenset(("int", "float")): "float",
}


class ColumnKinds:
    """The own columns of many rows, in the order in which they are met, and their kinds."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the columns of `rows`, which are read once and not kept."""
        for row in rows:
            for name, value in row.items():
                if name not in _KNOWN:
                    kind = self._kinds.get(name, EMPTY)
                    self._kinds[name] = kind if kind == JSON else joined(kind, kind_of(value))

    def add(self, other: ColumnKinds) -> None:
        """Note the columns that `other` has noted."""
        for name, kind in other._kinds.items():
            self._kinds[name] = joined(self._kinds.get(name, EMPTY), kind)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._kinds)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Kinds of the columns by name."""
        return self._kinds

    def cells(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row for a table of these columns: JSON text where a column holds that."""
        texts = {
            name: json.dumps(row[name], ensure_ascii=False)
            for name, kind in self._kinds.items()
            if kind == JSON and row.get(name) is not None
        }
        return {**row, **texts}


def kind_of(value: Any) -> Kind:
    """The kind of one JSON value; of a list, the one that all its values have."""
    if value is None:
        return EMPTY
    if isinstance(value, bool):
        return Kind("bool")
    if isinstance(value, int):
        size = abs(value)
        return Kind("int" if size <= _EXACT else "long" if size < _WIDEST else "json")
    if isinstance(value, float):
        return Kind("float")
    if isinstance(value, str):
        return Kind("text")
    inner = reduce(joined, map(kind_of, value), EMPTY) if isinstance(value, list) else JSON
    deepest = inner == JSON or inner.levels == _LEVELS
    return JSON if deepest else Kind(inner.scalar, inner.levels + 1)


def joined(one: Kind, other: Kind) -> Kind:
    """The kind that values of both kinds have."""
    if one == other:
        return one
    for empty, full in ((one, other), (other, one)):
        if empty.scalar == "empty" and empty.levels <= full.levels:
            return full
    wider = _WIDER.get(frozenset((one.scalar, other.scalar)))
    return JSON if wider is None or one.levels != other.levels else Kind(wider, one.levels)
